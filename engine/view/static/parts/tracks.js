// Makes the rows of the timeline: state and KV use of each replica, the spans of each track, and
// the event loop.

import { causeColor, causeText, color } from "view/parts/colors";
import { number, seconds, whole } from "view/parts/format";
import { replicaName } from "view/parts/recorded";

/** @import { Density, EngineSteps, ReplicaLane, Spans, Timeline } from "view/answers" */

/**
 * from, to: the seconds in view. x: the pixel of a second.
 * @typedef {{
 *   pen: CanvasRenderingContext2D,
 *   x: (time: number) => number,
 *   top: number,
 *   bottom: number,
 *   from: number,
 *   to: number,
 * }} Frame
 */

/**
 * text: describes what is at a time, y pixels below the row's top; a pixel is perPixel seconds.
 * @typedef {{
 *   name?: string,
 *   note?: string,
 *   height: number,
 *   gap: number,
 *   draw: (frame: Frame) => void,
 *   text: (time: number, y: number, perPixel: number) => string,
 * }} Row
 * @typedef {Row & { top: number, bottom: number }} PlacedRow
 */

// Heights in pixels.
const STATE = 16; // a replica's state
const USE = 30; // a replica's KV use
const MOST = 260; // a track, at most: its lanes get thinner the more there are
const DENSITY = 120; // a track of too many lanes
const LAG = 22; // the event loop

/**
 * @param {Timeline} timeline
 * @param {number} top of the first row
 */
export function rowsOf(timeline, top) {
  const most = Math.max(1, ...timeline.replicas.map(({ engine }) => largest(engine.used_blocks)));
  const rows = [
    ...timeline.replicas.flatMap((replica) => [
      stateRow(replica),
      ...(hasSteps(replica.engine) ? [useRow(replica.engine, most)] : []),
    ]),
    ...timeline.tracks.flatMap(({ node, track, spans, density }) => {
      if (density) return [densityRow(node, track, density, timeline.seconds)];
      if (!spans) return [];
      if (track !== "stages") return [spanRow(node, track, spans)];
      return byName(spans).map(([name, own]) => spanRow(node, `stage ${name}`, own));
    }),
    ...(timeline.lag.length ? [lagRow(timeline.lag)] : []),
  ];
  return rows.map((row) => {
    const placed = { ...row, top, bottom: top + row.height };
    top += row.height + row.gap;
    return placed;
  });
}

/**
 * Returns the spans of each name, all in one lane.
 * @param {Spans} spans
 * @returns {[name: string, spans: Spans][]}
 */
function byName(spans) {
  return [...new Set(spans.name)].map((name) => {
    const own = spans.name.flatMap((one, index) => (one === name ? [index] : []));
    /** @template T @param {T[]} values */
    const of = (values) => own.map((index) => values[index]);
    return [
      name,
      {
        lane: own.map(() => 0),
        name: own.map(() => "works"),
        start: of(spans.start),
        end: of(spans.end),
        args: of(spans.args),
        merged: 0,
      },
    ];
  });
}

/**
 * @param {Partial<EngineSteps>} engine
 * @returns {engine is EngineSteps}
 */
const hasSteps = (engine) => Boolean(engine.at?.length);

/** Unlike Math.max it takes any number of values. @param {number[]} values */
const largest = (values = []) => values.reduce((most, value) => Math.max(most, value), 0);

/**
 * @param {ReplicaLane} replica
 * @returns {Row}
 */
function stateRow(replica) {
  return {
    name: replicaName(replica),
    height: STATE,
    gap: hasSteps(replica.engine) ? 1 : 7,
    draw({ pen, x, top, from, to }) {
      for (const [cause, begin, end] of replica.idle) {
        if (end < from || begin > to) continue;
        pen.fillStyle = causeColor(cause);
        pen.fillRect(x(begin), top, Math.max(0.5, x(end) - x(begin)), STATE);
      }
    },
    text(time) {
      const stretch = replica.idle.find(([, begin, end]) => time >= begin && time < end);
      if (!stretch) return "";
      const [cause, begin, end] = stretch;
      return `${causeText(cause)}, ${seconds(end - begin)}`;
    },
  };
}

/**
 * @param {EngineSteps} engine
 * @param {number} most blocks at the full height
 * @returns {Row}
 */
function useRow({ at, used_blocks, running, waiting, preempted }, most) {
  return {
    height: USE,
    gap: 8,
    draw({ pen, x, top, bottom, from, to }) {
      pen.fillStyle = color("faint");
      pen.fillRect(x(from), top, x(to) - x(from), USE);
      pen.fillStyle = color("muted");
      pen.globalAlpha = 0.55;
      at.forEach((end, index) => {
        const begin = index ? Math.max(at[index - 1], end - 1) : end - 0.05;
        if (end < from || begin > to) return;
        const height = (used_blocks[index] / most) * USE;
        pen.fillRect(x(begin), bottom - height, Math.max(0.7, x(end) - x(begin)), height);
      });
      pen.globalAlpha = 1;
      pen.fillStyle = color("bad");
      at.forEach((time, index) => {
        if (preempted[index]) pen.fillRect(x(time) - 1, top, 2, USE);
      });
    },
    text(time) {
      const later = at.findIndex((one) => one >= time);
      const index = later < 0 ? at.length - 1 : later;
      const requests = `${whole(running[index])} running, ${whole(waiting[index])} waiting`;
      const lost = preempted[index] ? `, ${preempted[index]} preempted` : "";
      const blocks = `${whole(used_blocks[index])} KV blocks in use`;
      return `${blocks} (at most ${whole(most)} in these steps)\n${requests}${lost}`;
    },
  };
}

/** @type {Record<string, string>} */
const TRACK_COLORS = {
  reward: "reward",
  learner: "staleness_gate",
  weights: "weight_sync",
  evaluation: "run-3",
};

/**
 * @param {string} track
 * @param {string} name
 */
function spanColor(track, name) {
  if (track === "trajectories") return color(name === "generate" ? "busy" : "tool_wait");
  if (track === "tool calls") return color(name === "ok" ? "good" : "bad");
  return color(TRACK_COLORS[track] ?? "other");
}

/**
 * @param {string} node
 * @param {string} track
 * @param {Spans} spans
 * @returns {Row}
 */
function spanRow(node, track, spans) {
  const lanes = 1 + largest(spans.lane);
  const height = Math.max(1, Math.min(14, MOST / lanes));
  return {
    name: node ? `${track} (${node})` : track,
    note: lanes > 3 ? `${lanes} lanes` : "",
    height: Math.max(16, lanes * height),
    gap: 9,
    draw({ pen, x, top, bottom, from, to }) {
      pen.fillStyle = color("faint");
      pen.fillRect(x(from), top, x(to) - x(from), bottom - top);
      const filled = Math.max(1, Math.floor(height > 3 ? height - 1 : height));
      spans.lane.forEach((lane, index) => {
        const [begin, end] = [spans.start[index], spans.end[index]];
        if (end < from || begin > to) return;
        pen.fillStyle = spanColor(track, spans.name[index]);
        // Rounded, because thin lanes between pixels would blur into bands.
        const y = top + Math.round(lane * height);
        pen.fillRect(x(begin), y, Math.max(0.8, x(end) - x(begin)), filled);
      });
    },
    text(time, y, perPixel) {
      const near = 2 * perPixel;
      const index = spans.lane.findIndex(
        (lane, at) =>
          lane === Math.floor(y / height) &&
          time >= spans.start[at] - near &&
          time <= spans.end[at] + near,
      );
      if (index < 0) return "";
      const details = Object.entries(spans.args[index])
        .map(([name, value]) => `${name} ${number(value)}`)
        .join(", ");
      const length = seconds(spans.end[index] - spans.start[index]);
      return `${spans.name[index]}, ${length}${details ? `\n${details}` : ""}`;
    },
  };
}

/**
 * Draws how many lanes are busy, the kinds of spans on top of each other.
 * @param {string} node
 * @param {string} track
 * @param {Density} density
 * @param {number} length seconds of the timeline
 * @returns {Row}
 */
function densityRow(node, track, { lanes, busy }, length) {
  const kinds = Object.entries(busy);
  const parts = kinds[0]?.[1].length ?? 0;
  return {
    name: node ? `${track} (${node})` : track,
    note: `${whole(lanes)} at once`,
    height: DENSITY,
    gap: 9,
    draw({ pen, x, top, bottom, from, to }) {
      pen.fillStyle = color("faint");
      pen.fillRect(x(from), top, x(to) - x(from), bottom - top);
      for (let part = 0; part < parts; part++) {
        const [begin, end] = [(part * length) / parts, ((part + 1) * length) / parts];
        if (end < from || begin > to) continue;
        let base = bottom;
        for (const [name, counts] of kinds) {
          const height = (counts[part] / lanes) * DENSITY;
          // One trajectory of ten thousand is still to be seen: the end of a step has few.
          const shown = counts[part] > 0 ? Math.max(1, height) : 0;
          pen.fillStyle = spanColor(track, name);
          pen.fillRect(x(begin), base - shown, Math.max(0.8, x(end) - x(begin)), shown);
          base -= shown;
        }
      }
    },
    text(time) {
      const part = Math.min(parts - 1, Math.floor((time / length) * parts));
      const lines = kinds.map(([name, counts]) => `${whole(counts[part])} ${name}`);
      return [`of ${whole(lanes)} at once:`, ...lines].join("\n");
    },
  };
}

/**
 * @param {Timeline["lag"]} lag
 * @returns {Row}
 */
function lagRow(lag) {
  const most = Math.max(0.001, largest(lag.map(([, lag_s]) => lag_s)));
  return {
    name: "event loop",
    note: `late up to ${seconds(most)}`,
    height: LAG,
    gap: 4,
    draw({ pen, x, bottom, from, to }) {
      pen.fillStyle = color("host");
      for (const [at, lag_s] of lag) {
        if (at < from || at > to) continue;
        const height = Math.max(0.5, (lag_s / most) * (LAG - 2));
        pen.fillRect(x(at), bottom - height, 2, height);
      }
    },
    text(time) {
      const [, lag_s] = lag.reduce((nearest, one) =>
        Math.abs(one[0] - time) < Math.abs(nearest[0] - time) ? one : nearest,
      );
      return `the event loop was ${seconds(lag_s)} late`;
    },
  };
}
