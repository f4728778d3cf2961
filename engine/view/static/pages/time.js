// The page "Where time goes": replicas, learner, sandbox and event loop on one axis, and what idle
// replicas waited for.

import { ask, column, last, metrics, Problem } from "view/api";
import { paceChanges } from "view/parts/changes";
import { CAUSES, causeColor, causeText, color, STEP_PARTS } from "view/parts/colors";
import {
  card,
  choice,
  empty,
  h,
  legend,
  namedCard,
  note,
  stepChooser,
  table,
  tip,
  toolbar,
} from "view/parts/dom";
import { fixed, percent, seconds, sum, whole } from "view/parts/format";
import { Lanes } from "view/parts/lanes";
import { chosenStep, RECORDS, replicaName } from "view/parts/recorded";
import { stacked } from "view/parts/stacked";

/** @import { Metrics, ReplicaLane, Timeline } from "view/answers" */
/** @import { Context } from "view/main" */

const RECENT = 8; // number of newest steps over which stages are measured
const SHOWN_REPLICAS = 8; // replicas that have a column in the table

/** @param {Context} context */
export async function time(context) {
  const { run, runs, query, set } = context;
  const rows = await metrics(run);
  const { last: trained, state, timeline: kept } = runs[run];
  // Once a run has ended, what is kept after its last step is the last evaluation.
  const most = state === "running" || !trained ? Infinity : trained;
  const steps = kept.filter((step) => step > 0 && step <= most);
  /** @param {number} step */
  const open = (step) => set({ ...query, step });
  return [
    bySteps(rows, open),
    paceChanges(await ask("changes", { run }), open),
    stages(rows),
    blockedLines(rows),
    ...(steps.length ? await timeline(context, steps) : [noTimeline()]),
  ];
}

function noTimeline() {
  return card(
    "Timeline",
    empty(
      "No timeline of this run is recorded",
      `It would be in record/timeline. ${RECORDS} If there is a timeline.json, Perfetto opens it.`,
    ),
  );
}

/**
 * @param {Metrics} rows
 * @param {(step: number) => void} onclick
 */
function bySteps(rows, onclick) {
  /** @param {string} cause */
  const valuesOf = (cause) =>
    rows.values[cause === "busy" ? "replicas/busy_s" : `idle/${cause}_s`] ?? [];
  const causes = CAUSES.filter((cause) => valuesOf(cause).some((value) => (value ?? 0) > 0));
  if (causes.length)
    return namedCard(
      "by-step",
      "Seconds of all replicas, by step",
      stacked(
        rows,
        causes.map((cause) => ({
          label: causeText(cause),
          values: valuesOf(cause),
          paint: causeColor(cause),
        })),
        onclick,
      ),
      note(
        "Sampling is at the bottom; above it are the seconds in which replicas were idle. " +
          "A click opens the step below.",
      ),
    );
  const parts = STEP_PARTS.filter(({ metric }) => rows.values[metric]);
  if (!parts.length) return card("By step", empty("No step yet", "Each step adds a column here."));
  return namedCard(
    "by-step",
    "Seconds of each step",
    stacked(
      rows,
      parts.map(({ label, metric, paint }) => ({
        label,
        values: rows.values[metric],
        paint: color(paint),
      })),
      onclick,
    ),
    note("An older version made this run, which did not measure idle time by cause."),
  );
}

/**
 * Returns what each stage of the pipeline did in the newest steps.
 * @param {Metrics} rows
 */
function stages(rows) {
  const names = Object.keys(rows.values).flatMap((name) => {
    const match = name.match(/^stage\/(.+)\/busy_s$/);
    return match ? [match[1]] : [];
  });
  if (!names.length) return null;
  /** @param {string} metric */
  const total = (metric) => sum(column(rows, metric).y.slice(-RECENT));
  const step_s = total("time/step_s");
  const newest = column(rows, "time/step_s").x.slice(-RECENT);
  const found = names.map((name) => {
    const [busy, waits_in, waits_out] = ["busy_s", "blocked_in_s", "blocked_out_s"].map((part) =>
      total(`stage/${name}/${part}`),
    );
    const all = busy + waits_in + waits_out || 1;
    return {
      name,
      items: total(`stage/${name}/items`) / (step_s || 1),
      busy: busy / all,
      waits_in: waits_in / all,
      waits_out: waits_out / all,
      queue: last(rows, `stage/${name}/queue`),
    };
  });
  return namedCard(
    "stages",
    "Stages",
    table(
      [
        { name: "stage", mono: true, cell: ({ name }) => name },
        { name: "items/s", number: true, cell: ({ items }) => fixed(items, 2) },
        { name: "works", number: true, cell: ({ busy }) => percent(busy, 1) },
        { name: "waits for an item", number: true, cell: (stage) => percent(stage.waits_in, 1) },
        { name: "waits for room", number: true, cell: (stage) => percent(stage.waits_out, 1) },
        { name: "queue", number: true, cell: ({ queue }) => whole(queue) },
      ],
      found,
    ),
    note(
      `Shares of its workers' time in the newest ${newest.length} steps; ` +
        "the queue is the last one's. " +
        "A stage that waits for neither works, also while it awaits something of its own.",
    ),
  );
}

/**
 * Returns the lines that blocked the event loop in the newest steps; nothing if none did.
 * @param {Metrics} rows
 */
function blockedLines(rows) {
  const steps = column(rows, "time/step_s").x.slice(-RECENT);
  const lines = Object.keys(rows.values)
    .flatMap((name) => name.match(/^host\/blocked_at\/(.+)$/)?.slice(1) ?? [])
    .map((line) => {
      const { x, y } = column(rows, `host/blocked_at/${line}`);
      const recent = y.filter((_, index) => steps.includes(x[index]));
      return { line, blocked_s: sum(recent), steps: recent.length };
    })
    .filter(({ blocked_s }) => blocked_s > 0)
    .sort((a, b) => b.blocked_s - a.blocked_s);
  if (!lines.length) return null;
  return namedCard(
    "blocked",
    "Lines that block the event loop",
    table(
      [
        { name: "line", mono: true, cell: ({ line }) => line },
        { name: "blocked", number: true, cell: ({ blocked_s }) => seconds(blocked_s) },
        { name: "in steps", number: true, cell: ({ steps }) => whole(steps) },
      ],
      lines,
    ),
    note(
      `The worst line of each of the newest ${steps.length} steps. While it runs, no stage, tool ` +
        "or reward goes on; what computes for long belongs into a thread (asyncio.to_thread).",
    ),
  );
}

/** Names of picks as the server knows them. @typedef {Record<string, string>} Picks */

/**
 * @param {Context} context
 * @param {number[]} steps
 */
async function timeline({ run, runs, query, set, go }, steps) {
  const step = query.step ? chosenStep(steps, query.step) : newestTrained(steps, runs[run].last);
  const count = Math.max(1, Number(query.count ?? 1));
  const last =
    steps
      .filter((one) => one >= step)
      .slice(0, count)
      .at(-1) ?? step;
  const answer = await ask("timeline", { run, first: step, last });
  /** @type {Picks} */
  const picks = {};
  const losses = h("div", { id: "losses" });
  const thin = h("div", { id: "thinned" });
  /** @param {Timeline} shown @param {number} from @param {number} to */
  const describe = (shown, from, to) => {
    losses.replaceChildren(lossTable(shown, from, to));
    thin.replaceChildren(...thinned(shown));
  };
  const lanes = new Lanes(answer, {
    load: (from, to) => finer({ run, first: step, last }, answer, from, to, picks),
    drawn: describe,
    open: async ({ start, end }, event) => {
      const owner = await ownerOf({ run, first: step, last }, answer.started_at, start, end);
      if (owner) go("trajectory", { ...owner });
      else tip(event, "Its trajectory is not recorded, or not in this file.");
    },
  });
  describe(answer, 0, answer.seconds);
  const seen = CAUSES.filter((cause) =>
    answer.replicas.some(({ idle }) => idle.some(([name]) => name === cause)),
  );
  const span = step === last ? `${step}` : `${step}-${last}`;
  return [
    namedCard(
      "timeline",
      null,
      toolbar(
        stepChooser(steps, step, (value) => set({ ...query, step: value })),
        h("label", {}, "and the next"),
        choice(
          [
            [1, "none"],
            [2, "1"],
            [4, "3"],
            [8, "7"],
          ],
          count,
          (value) => set({ ...query, step, count: value }),
        ),
        pickers(answer, picks, () => lanes.reload()),
        h("button", { "data-zoom": "all", onclick: () => lanes.reset() }, "show all"),
        h(
          "span",
          { class: "muted" },
          "drag to zoom, double-click for all; keys: arrows, + and -; " +
            "a click on a trajectory opens it; the table below counts what is in view",
        ),
      ),
      legend(seen.map((cause) => [causeText(cause), causeColor(cause)])),
      legend([
        ["below: KV blocks in use", color("muted")],
        ["preemption", color("bad")],
        ["turn", color("busy")],
        ["waits for its tools", color("tool_wait")],
        ["call", color("call")],
        ["call that failed", color("bad")],
      ]),
      lanes.element,
      note(
        "All events of these steps, for ui.perfetto.dev: ",
        h("code", {}, `rocstar trace ${runs[run].path} steps=${span}`),
      ),
      thin,
    ),
    card("Replica-seconds in view", losses),
    loopLag(await metrics(run), step, last),
  ];
}

/**
 * Returns the timeline of a stretch; null in an exported file, which has each step once.
 * @param {{ run: number, first: number, last: number }} steps
 * @param {Timeline} whole
 * @param {number} from
 * @param {number} to
 * @param {Picks} picks
 */
async function finer(steps, whole, from, to, picks) {
  const isPart = from > 0 || to < whole.seconds;
  /** @type {Picks} */
  const stretch = isPart ? { from: from.toFixed(6), to: to.toFixed(6) } : {};
  try {
    return await ask("timeline", { ...steps, ...stretch, ...picks });
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return null;
  }
}

/**
 * Returns whose span this is; null if its trajectory is not recorded.
 * @param {{ run: number, first: number, last: number }} steps
 * @param {number} zero
 * @param {number} start
 * @param {number} end
 */
async function ownerOf(steps, zero, start, end) {
  try {
    return await ask("owner", { ...steps, start: zero + start, end: zero + end });
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    return null;
  }
}

/**
 * Returns buttons that choose what is shown where there is too much for a screen.
 * @param {Timeline} answer
 * @param {Picks} picks
 * @param {() => void} onchange
 */
function pickers({ tracks, replica_count }, picks, onchange) {
  /** @param {string} what @param {string} name @param {string} text */
  const picker = (what, name, text) => {
    const box = h("span", { class: "toolbar", "data-pick": what });
    const show = () =>
      box.replaceChildren(
        h("label", {}, what),
        ...choice(
          [
            ["", "all"],
            [name, text],
          ],
          picks[what] ?? "",
          (value) => {
            if (value) picks[what] = value;
            else delete picks[what];
            show();
            onchange();
          },
        ),
      );
    show();
    return box;
  };
  return [
    tracks.some(({ track, density }) => track === "trajectories" && density)
      ? picker("trajectories", "longest", "the 40 longest")
      : null,
    replica_count > 8 ? picker("replicas", "idlest", "the 8 least busy") : null,
  ];
}

/**
 * Says what of the timeline is not drawn by itself.
 * @param {Timeline} timeline
 */
function thinned({ tracks, replicas, replica_count }) {
  const dense = tracks.filter(({ density }) => density).map(({ track }) => track);
  const spans = tracks.flatMap((track) => track.spans ?? []);
  const merged = sum(spans.map((one) => one.merged));
  const picked = tracks.filter((track) => track.picked).map(({ lanes }) => whole(lanes));
  const all = sum(spans.map((one) => one.count));
  const parts = [
    dense.length ? `Of ${dense.join(" and ")} the number is shown that is busy at once.` : "",
    picked.length ? `The longest of ${picked.join(" and ")} trajectories are shown.` : "",
    replicas.length < replica_count
      ? `${replicas.length} of ${replica_count} replicas are shown, and counted below.`
      : "",
    merged
      ? `${whole(merged)} of ${whole(all)} spans are narrower than a pixel and drawn with their ` +
        "neighbours."
      : "",
  ].filter(Boolean);
  if (!parts.length) return [];
  return [note(`${parts.join(" ")} A closer look shows more; the command above has every span.`)];
}

/**
 * Returns the newest trained step: a later one has only the last evaluation.
 * @param {number[]} steps
 * @param {number} trained
 */
const newestTrained = (steps, trained) =>
  steps.findLast((step) => step <= trained) ?? steps[steps.length - 1];

/**
 * @param {Timeline} timeline
 * @param {number} from
 * @param {number} to
 */
function lossTable({ replicas }, from, to) {
  /** @param {ReplicaLane} replica @param {string} cause */
  const secondsOf = ({ idle }, cause) =>
    sum(
      idle
        .filter(([name]) => name === cause)
        .map(([, begin, end]) => Math.max(0, Math.min(end, to) - Math.max(begin, from))),
    );
  const causes = new Set(replicas.flatMap(({ idle }) => idle.map(([cause]) => cause)));
  const rows = [...causes]
    .map((cause) => ({ cause, total: sum(replicas.map((replica) => secondsOf(replica, cause))) }))
    .filter(({ total }) => total > 0)
    .sort((a, b) => b.total - a.total);
  if (!rows.length)
    return empty("No replica was observed in this stretch", "Zoom out, or choose another step.");
  const all = sum(rows.map(({ total }) => total));
  return table(
    [
      {
        name: "the replicas",
        cell: ({ cause }) => causeText(cause),
        key: ({ cause }) => causeColor(cause),
      },
      { name: "seconds", number: true, cell: ({ total }) => seconds(total) },
      { name: "share", number: true, cell: ({ total }) => percent(total / all, 1) },
      ...replicas.slice(0, SHOWN_REPLICAS).map((replica) => ({
        name: replicaName(replica),
        number: true,
        cell: (/** @type {{ cause: string }} */ { cause }) => seconds(secondsOf(replica, cause)),
      })),
    ],
    rows,
  );
}

/**
 * Says how long the event loop stood still in these steps.
 * @param {Metrics} rows
 * @param {number} first
 * @param {number} last
 */
function loopLag(rows, first, last) {
  /** @param {string} name */
  const values = (name) => {
    const { x, y } = column(rows, name);
    return y.filter((_, at) => x[at] >= first && x[at] <= last);
  };
  const longest = values("host/loop_lag_max_ms");
  if (!longest.length) return null;
  const blocked_s = sum(values("host/loop_blocked_s"));
  const most_ms = longest.reduce((most, value) => Math.max(most, value));
  return card(
    "Event loop of the node",
    h(
      "p",
      {},
      most_ms
        ? `It was blocked for ${seconds(blocked_s)} in stalls of over 20 ms, ` +
            `the longest of ${seconds(most_ms / 1000)}.`
        : "It was never blocked for over 20 ms.",
    ),
  );
}
