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

/** @typedef {{ track: string, start: number, end: number }} SpanTimes in seconds of the axis */

/**
 * text: describes what is at a time, y pixels below the row's top; a pixel is perPixel seconds.
 * span: returns the span of a trajectory that is there.
 * @typedef {{
 *   name?: string,
 *   note?: string,
 *   height: number,
 *   gap: number,
 *   draw: (frame: Frame) => void,
 *   text: (time: number, y: number, perPixel: number) => string,
 *   span?: (time: number, y: number, perPixel: number) => SpanTimes | null,
 * }} Row
 * @typedef {Row & { top: number, bottom: number }} PlacedRow
 */

// Heights in pixels.
const STATE = 16; // a replica's state
const BAND = 7; // a replica's state where there are many
const FEW = 16; // replicas that have a row each; more have bands
const USE = 30; // a replica's KV use
const MOST = 260; // a track, at most: its lanes get thinner the more there are
const DENSITY = 120; // a track of too many lanes
const LAG = 22; // the event loop

/**
 * @param {Timeline} timeline
 * @param {number} top of the first row
 */
export function rowsOf(timeline, top) {
  const most = Math.max(
    1,
    largest(timeline.replicas.map(({ engine }) => largest(engine.used_blocks))),
  );
  const gap = gapOf(timeline);
  const rows = [
    ...(timeline.replicas.length > FEW
      ? timeline.replicas.map(bandRow)
      : timeline.replicas.flatMap((replica) => [
          stateRow(replica),
          ...(hasSteps(replica.engine) ? [useRow(replica.engine, most, gap)] : []),
        ])),
    ...timeline.tracks.flatMap(({ node, track, lanes, picked, spans, density }) => {
      if (density) return [densityRow(node, track, density, timeline)];
      if (!spans?.lane.length) return [];
      const note = picked ? `${whole(largest(spans.lane) + 1)} of ${whole(lanes)}` : null;
      if (track !== "stages") return [spanRow(node, track, spans, note)];
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
        count: own.length,
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

/**
 * Returns the most seconds that an engine step is drawn before its end: a second, or what a point
 * stands for where they are thinned.
 * @param {Timeline} timeline
 */
function gapOf({ from, to, replicas }) {
  const points = largest(replicas.map(({ engine }) => engine.at?.length ?? 0));
  return Math.max(1, (2 * (to - from)) / Math.max(1, points));
}

/** Returns a function that looks each colour up once. @param {(name: string) => string} paint */
function remembered(paint) {
  /** @type {Map<string, string>} */
  const paints = new Map();
  return (/** @type {string} */ name) => {
    const known = paints.get(name) ?? paint(name);
    paints.set(name, known);
    return known;
  };
}

/** Unlike Math.max it takes any number of values. @param {number[]} values */
const largest = (values = []) => values.reduce((most, value) => Math.max(most, value), 0);

/**
 * Draws what a replica did as a band without KV use; each eighth has its name.
 * @param {ReplicaLane} replica
 * @param {number} index
 * @param {ReplicaLane[]} replicas
 * @returns {Row}
 */
function bandRow(replica, index, replicas) {
  const name = index % 8 ? "" : replicaName(replica);
  return { ...stateRow(replica, BAND), name, gap: index === replicas.length - 1 ? 9 : 0 };
}

/**
 * @param {ReplicaLane} replica
 * @returns {Row}
 */
function stateRow(replica, height = STATE) {
  return {
    name: replicaName(replica),
    height,
    gap: hasSteps(replica.engine) ? 1 : 7,
    draw({ pen, x, top, from, to }) {
      const paint = remembered(causeColor);
      const filled = height === STATE ? height : height - 1;
      for (const [cause, begin, end] of replica.idle) {
        if (end < from || begin > to) continue;
        pen.fillStyle = paint(cause);
        pen.fillRect(x(begin), top, Math.max(0.5, x(end) - x(begin)), filled);
      }
    },
    text(time) {
      const stretch = replica.idle.find(([, begin, end]) => time >= begin && time < end);
      if (!stretch) return "";
      const [cause, begin, end] = stretch;
      return `${replicaName(replica)}: ${causeText(cause)}, ${seconds(end - begin)}`;
    },
  };
}

/**
 * @param {EngineSteps} engine
 * @param {number} most blocks at the full height
 * @param {number} gap seconds
 * @returns {Row}
 */
function useRow({ at, used_blocks, running, waiting, preempted }, most, gap) {
  return {
    height: USE,
    gap: 8,
    draw({ pen, x, top, bottom, from, to }) {
      pen.fillStyle = color("faint");
      pen.fillRect(x(from), top, x(to) - x(from), USE);
      pen.fillStyle = color("muted");
      pen.globalAlpha = 0.55;
      pen.beginPath(); // one for all, because edges that meet would show as stripes
      at.forEach((end, index) => {
        const begin = index ? Math.max(at[index - 1], end - gap) : end - 0.05;
        if (end < from || begin > to) return;
        const height = (used_blocks[index] / most) * USE;
        pen.rect(x(begin), bottom - height, Math.max(0.7, x(end) - x(begin)), height);
      });
      pen.fill();
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

/** Tracks that are called otherwise on the page. @type {Record<string, string>} */
const TRACK_NAMES = { replicas: "weights loaded" };

/** @param {string} node @param {string} track */
const trackName = (node, track) =>
  node ? `${TRACK_NAMES[track] ?? track} (${node})` : (TRACK_NAMES[track] ?? track);

/** Tracks whose spans belong to a trajectory. */
const OF_TRAJECTORIES = ["trajectories", "tool calls"];

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
  if (track === "tool calls") return color(name === "ok" ? "call" : "bad");
  if (track.startsWith("stage ")) return color("stage");
  return color(TRACK_COLORS[track] ?? "other");
}

/**
 * @param {string} node
 * @param {string} track
 * @param {Spans} spans
 * @param {string | null} note
 * @returns {Row}
 */
function spanRow(node, track, spans, note = null) {
  const lanes = 1 + largest(spans.lane);
  const height = Math.max(1, Math.min(14, MOST / lanes));
  /** @param {number} time @param {number} y @param {number} perPixel */
  const indexAt = (time, y, perPixel) => {
    const near = 2 * perPixel;
    return spans.lane.findIndex(
      (lane, at) =>
        lane === Math.floor(y / height) &&
        time >= spans.start[at] - near &&
        time <= spans.end[at] + near,
    );
  };
  return {
    name: trackName(node, track),
    note: note ?? (lanes > 3 ? `${lanes} lanes` : ""),
    height: Math.max(16, lanes * height),
    gap: 9,
    draw({ pen, x, top, bottom, from, to }) {
      pen.fillStyle = color("faint");
      pen.fillRect(x(from), top, x(to) - x(from), bottom - top);
      const filled = Math.max(1, Math.floor(height > 3 ? height - 1 : height));
      const paint = remembered((name) => spanColor(track, name));
      spans.lane.forEach((lane, index) => {
        const [begin, end] = [spans.start[index], spans.end[index]];
        if (end < from || begin > to) return;
        pen.fillStyle = paint(spans.name[index]);
        // Rounded, because thin lanes between pixels would blur into bands.
        const y = top + Math.round(lane * height);
        pen.fillRect(x(begin), y, Math.max(0.8, x(end) - x(begin)), filled);
      });
    },
    span(time, y, perPixel) {
      const index = OF_TRAJECTORIES.includes(track) ? indexAt(time, y, perPixel) : -1;
      return index < 0 ? null : { track, start: spans.start[index], end: spans.end[index] };
    },
    text(time, y, perPixel) {
      const index = indexAt(time, y, perPixel);
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
 * @param {Timeline} timeline
 * @returns {Row}
 */
function densityRow(node, track, { lanes, busy }, { from: first, to: last }) {
  const kinds = Object.entries(busy);
  const parts = kinds[0]?.[1].length ?? 0;
  const length = last - first;
  return {
    name: trackName(node, track),
    note: `${whole(lanes)} at once`,
    height: DENSITY,
    gap: 9,
    draw({ pen, x, top, bottom, from, to }) {
      pen.fillStyle = color("faint");
      pen.fillRect(x(from), top, x(to) - x(from), bottom - top);
      const paint = remembered((name) => spanColor(track, name));
      for (let part = 0; part < parts; part++) {
        const begin = first + (part * length) / parts;
        const end = first + ((part + 1) * length) / parts;
        if (end < from || begin > to) continue;
        let base = bottom;
        for (const [name, counts] of kinds) {
          const height = (counts[part] / lanes) * DENSITY;
          // One trajectory of ten thousand is still to be seen: the end of a step has few.
          const shown = counts[part] > 0 ? Math.max(1, height) : 0;
          pen.fillStyle = paint(name);
          pen.fillRect(x(begin), base - shown, Math.max(0.8, x(end) - x(begin)), shown);
          base -= shown;
        }
      }
    },
    text(time) {
      const share = Math.max(0, Math.min(1, (time - first) / length));
      const part = Math.min(parts - 1, Math.floor(share * parts));
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
