// The page Sandbox: how many calls there were, how long they took, how they ended, and the slowest
// programs, which can be run again.

import { ask, column, metrics, request } from "view/api";
import { actions } from "view/parts/action";
import { chart } from "view/parts/charts";
import { color, runColor } from "view/parts/colors";
import {
  card,
  choice,
  empty,
  h,
  namedCard,
  outcomeBadge,
  spread,
  table,
  toolbar,
} from "view/parts/dom";
import { number, percent, seconds, whole } from "view/parts/format";
import { programOf } from "view/parts/program";
import { RECORDS } from "view/parts/recorded";

/** @import { Metrics, RunAgain, SlowCall, ToolCalls } from "view/answers" */
/** @import { Context } from "view/main" */

/** @type {[steps: number, text: string][]} */
const SPANS = [
  [1, "last step"],
  [5, "last 5"],
  [20, "last 20"],
];
const BINS = 24; // bins of the histogram
const BAR = 150; // pixels of its tallest bar

/** @param {Context} context */
export async function sandbox(context) {
  return [overTime(await metrics(context.run), context.run), await recorded(context)];
}

/**
 * @param {Metrics} rows
 * @param {number} run
 */
function overTime(rows, run) {
  /** @param {string} metric @param {string} label @param {string} paint @param {number[]} [dash] */
  const curve = (metric, label, paint, dash) => ({ label, ...column(rows, metric), paint, dash });
  const options = { from0: true, cursor: "sandbox", height: 170 };
  return card(
    "By step",
    h(
      "div",
      { class: "two" },
      chart({
        title: "Calls",
        unit: "per second of a step",
        series: [curve("tools/calls_per_s", "calls/s", runColor(run))],
        ...options,
      }),
      chart({
        title: "Latency",
        unit: "ms, dispatch to result",
        series: [
          curve("tools/latency_p50_ms", "median", runColor(run)),
          curve("tools/latency_p99_ms", "p99", color("bad"), [5, 4]),
        ],
        ...options,
      }),
      chart({
        title: "Errors",
        unit: "share of calls",
        series: [curve("tools/error_share", "errors", color("bad"))],
        format: (value) => percent(value, 1),
        ...options,
      }),
      chart({
        title: "Saved by early dispatch",
        unit: "ms per call",
        series: [curve("tools/overlap_saved_ms", "overlap", color("good"))],
        ...options,
      }),
    ),
  );
}

/** @param {Context} context */
async function recorded({ run, runs, query, set, go }) {
  const steps = runs[run].recorded;
  if (!steps.length)
    return card(
      "Calls",
      empty(
        "No calls of this run are recorded",
        `Outcomes and programs of single calls would be in record/steps. ${RECORDS}`,
      ),
    );
  const count = Number(query.count ?? 5);
  const chosen = steps.slice(-count);
  const answer = await ask("tool-calls", {
    run,
    first: chosen[0],
    last: chosen[chosen.length - 1],
  });
  const span = `steps ${answer.steps[0]} to ${answer.steps.at(-1)}`;
  const chooser = card(
    null,
    toolbar(
      h("label", {}, "calls of"),
      choice(SPANS, count, (value) => set({ ...query, count: value })),
      h("span", { class: "muted number" }, `${span}: ${whole(answer.name.length)} calls`),
    ),
  );
  if (!answer.name.length)
    return [
      chooser,
      card("Calls", empty("No call was made in these steps", "The model answered without a tool.")),
    ];
  /** @param {SlowCall} call */
  const open = ({ step, group, sample }) => go("trajectory", { step, group, sample });
  return [
    chooser,
    h("div", { class: "two" }, outcomes(answer), latencies(answer)),
    namedCard(
      "slowest",
      "Slowest programs",
      answer.slowest.map((call) => slowCall(run, call, () => open(call))),
    ),
  ];
}

/** @param {ToolCalls} answer */
function outcomes({ name, outcome, executed, latency_s }) {
  /** @typedef {{ tool: string, outcome: string, refused: boolean, latencies: number[] }} Kind */
  /** @type {Map<string, Kind>} */
  const kinds = new Map();
  outcome.forEach((each, call) => {
    const refused = !executed[call];
    const text = refused ? `refused (${each})` : each;
    const key = `${name[call]} ${text}`;
    const kind = kinds.get(key) ?? { tool: name[call], outcome: text, refused, latencies: [] };
    kind.latencies.push(latency_s[call]);
    kinds.set(key, kind);
  });
  const rows = [...kinds.values()].sort((a, b) => b.latencies.length - a.latencies.length);
  for (const { latencies } of rows) latencies.sort((a, b) => a - b);
  /** @param {string} name @param {number} share */
  const percentile = (name, share) => ({
    name,
    number: true,
    cell: (/** @type {Kind} */ { refused, latencies }) =>
      refused ? "–" : seconds(latencies[Math.floor(share * latencies.length)]),
  });
  return namedCard(
    "outcomes",
    "Outcomes",
    table(
      [
        { name: "tool", cell: ({ tool }) => tool },
        { name: "outcome", cell: ({ outcome }) => outcomeBadge(outcome) },
        { name: "calls", number: true, cell: ({ latencies }) => whole(latencies.length) },
        {
          name: "share",
          number: true,
          cell: ({ latencies }) => percent(latencies.length / outcome.length, 1),
        },
        percentile("median", 0.5),
        percentile("p90", 0.9),
        percentile("p99", 0.99),
      ],
      rows,
    ),
  );
}

/**
 * Returns a histogram with bins of equal width on a logarithmic axis.
 * @param {ToolCalls} answer
 */
function latencies({ latency_s }) {
  const logs = latency_s.filter((value) => value > 0).map((value) => Math.log10(1e3 * value));
  if (!logs.length) return card("Latency", empty("No call was run", "All were refused."));
  const low = logs.reduce((least, value) => Math.min(least, value));
  const high = logs.reduce((most, value) => Math.max(most, value));
  const width = Math.max(0.02, (high - low) / BINS);
  const counts = new Array(BINS + 1).fill(0);
  for (const value of logs) counts[Math.min(BINS, Math.floor((value - low) / width))] += 1;
  const most = Math.max(...counts);
  /** @param {number} bin */
  const from = (bin) => `${number(Number((10 ** (low + bin * width)).toPrecision(3)))} ms`;
  return namedCard(
    "latencies",
    "Latency",
    h(
      "div",
      { class: "histogram", style: { height: `${BAR}px` } },
      counts.map((count, bin) =>
        h("div", {
          title: `from ${from(bin)}: ${whole(count)} calls`,
          style: { height: `${Math.max(count ? 2 : 0, (BAR * count) / most)}px` },
        }),
      ),
    ),
    h(
      "div",
      { class: "toolbar spread muted number" },
      [0, BINS / 3, (2 * BINS) / 3, BINS].map((bin) => h("span", {}, from(bin))),
    ),
    h("p", { class: "muted" }, "Calls by latency, on a logarithmic axis."),
  );
}

/**
 * @param {number} run
 * @param {SlowCall} slow
 * @param {() => void} open
 */
function slowCall(run, slow, open) {
  const { step, group, sample, call } = slow;
  const { buttons, result } = actions({
    choices: [
      {
        text: "run again",
        act: async () => outputOf(await request("run-again", { run, step, group, sample, call })),
      },
    ],
    waiting: "running in a jail ...",
    failed: "The program could not be run",
  });
  return h(
    "details",
    { class: slow.outcome === "ok" ? "call" : "call wrong" },
    h(
      "summary",
      {},
      h("b", { class: "number" }, seconds(slow.finished_at - slow.dispatched_at)),
      ` ${slow.name} `,
      outcomeBadge(slow.outcome),
      ` step ${step}, group ${group} #${sample}`,
    ),
    h("h3", {}, "program"),
    h("pre", {}, programOf(slow.arguments)),
    h("h3", {}, "what the model read"),
    h("pre", {}, slow.response),
    toolbar(buttons, h("button", { onclick: open }, "its trajectory")),
    result,
  );
}

/** @param {RunAgain} answer */
function outputOf({ outcome, wall_s, cpu_s, stdout, display, stderr }) {
  const output = [stdout, display, stderr].filter(Boolean).join("\n");
  return [
    h("h3", {}, "now ", outcomeBadge(outcome), ` ${seconds(wall_s)}, ${seconds(cpu_s)} of CPU`),
    h("pre", {}, output || "(no output)"),
  ];
}
