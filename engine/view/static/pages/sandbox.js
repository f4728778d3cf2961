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
  note,
  outcomeBadge,
  spread,
  table,
  toolbar,
} from "view/parts/dom";
import { number, percent, seconds, whole } from "view/parts/format";
import { programOf } from "view/parts/program";
import { RECORDS } from "view/parts/recorded";

/** @import { CallKind, Metrics, RunAgain, SlowCall, ToolCalls } from "view/answers" */
/** @import { Context } from "view/main" */

/** @type {[steps: number, text: string][]} */
const SPANS = [
  [1, "last step"],
  [5, "last 5"],
  [20, "last 20"],
];
const BAR = 150; // pixels of the histogram's tallest bar

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
        title: "Queue and run",
        unit: "ms, median of calls; the queue is the wait for a slot",
        series: [
          curve("tools/run_p50_ms", "run", runColor(run)),
          curve("tools/queue_p50_ms", "queue", color("tool_wait"), [5, 4]),
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
      h("span", { class: "muted number" }, `${span}: ${whole(answer.count)} calls`),
      answer.steps.length < answer.asked
        ? h("span", { class: "muted" }, "older steps are left out: these have many calls")
        : null,
    ),
  );
  const lost = answer.damage.map((line) => h("div", { class: "problem" }, line));
  if (!answer.count)
    return [
      chooser,
      lost,
      card("Calls", empty("No call was made in these steps", "The model answered without a tool.")),
    ];
  /** @param {SlowCall} call */
  const open = ({ step, group, sample }) => go("trajectory", { step, group, sample });
  return [
    chooser,
    lost,
    h("div", { class: "two" }, outcomes(answer), latencies(answer)),
    namedCard(
      "slowest",
      "Slowest programs",
      answer.slowest.map((call) => slowCall(run, call, () => open(call))),
    ),
  ];
}

/** @param {ToolCalls} answer */
function outcomes({ kinds, count }) {
  /**
   * @param {string} name
   * @param {"p50_s" | "p90_s" | "p99_s" | "queue_s" | "run_s"} part
   */
  const time = (name, part) => ({
    name,
    number: true,
    cell: (/** @type {CallKind} */ kind) => (kind.executed ? seconds(kind[part]) : "–"),
  });
  return namedCard(
    "outcomes",
    "Outcomes",
    table(
      [
        {
          name: "tool",
          cell: ({ name }) => h("span", { style: { whiteSpace: "nowrap" } }, name),
        },
        {
          name: "outcome",
          cell: ({ outcome, executed }) =>
            outcomeBadge(executed ? outcome : `refused (${outcome})`),
        },
        { name: "calls", number: true, cell: (kind) => whole(kind.count) },
        { name: "share", number: true, cell: (kind) => percent(kind.count / count, 1) },
        time("median", "p50_s"),
        time("p90", "p90_s"),
        time("p99", "p99_s"),
        time("queue", "queue_s"),
        time("run", "run_s"),
      ],
      kinds,
    ),
    note(
      "Queue and run are medians. The queue is the wait for a slot of the sandbox; a dash: the " +
        "tool does not measure it.",
    ),
  );
}

/**
 * Returns a histogram with bins of equal width on a logarithmic axis.
 * @param {ToolCalls} answer
 */
function latencies({ histogram }) {
  if (!histogram) return card("Latency", empty("No call was run", "All were refused."));
  const { counts, edges_s } = histogram;
  const most = counts.reduce((largest, count) => Math.max(largest, count), 1);
  const bins = counts.length;
  /** @param {number} edge */
  const from = (edge) => `${number(Number((1e3 * edges_s[edge]).toPrecision(3)))} ms`;
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
      [0, bins / 3, (2 * bins) / 3, bins].map((edge) => h("span", {}, from(Math.round(edge)))),
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
      slow.queue_s === null ? null : ` (${seconds(slow.queue_s)} in the queue)`,
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
