// Sandbox: how many calls, how long they took, how they ended, and the slowest programs, to run again.

import { ask, column, exported, metrics, Problem, request } from "view/api";
import { chart } from "view/parts/charts";
import {
  badge,
  card,
  choice,
  color,
  empty,
  fixed,
  h,
  number,
  percent,
  runColor,
  seconds,
  table,
  whole,
} from "view/parts/dom";
import { program } from "view/pages/trajectory";

const SPANS = [
  [1, "last step"],
  [5, "last 5"],
  [20, "last 20"],
];

export async function sandbox({ run, runs, words, set, go }) {
  const rows = await metrics(run);
  return [
    overTime(rows, run),
    ...(await recorded({ run, steps: runs[run].recorded, words, set, go })),
  ];
}

function overTime(rows, run) {
  const curve = (name, label, paint, dash) => ({ label, ...column(rows, name), paint, dash });
  const made = [
    chart({
      title: "Calls",
      unit: "per second of a step",
      series: [curve("tools/calls_per_s", "calls/s", runColor(run))],
      from0: true,
      cursor: "sandbox",
      height: 170,
    }),
    chart({
      title: "Latency",
      unit: "ms, dispatch to result",
      series: [
        curve("tools/latency_p50_ms", "median", runColor(run)),
        curve("tools/latency_p99_ms", "p99", color("bad"), [5, 4]),
      ],
      from0: true,
      cursor: "sandbox",
      height: 170,
    }),
    chart({
      title: "Errors",
      unit: "share of calls",
      series: [curve("tools/error_share", "errors", color("bad"))],
      from0: true,
      cursor: "sandbox",
      height: 170,
      format: (value) => percent(value, 1),
    }),
    chart({
      title: "Saved by early dispatch",
      unit: "ms per call",
      series: [curve("tools/overlap_saved_ms", "overlap", color("good"))],
      from0: true,
      cursor: "sandbox",
      height: 170,
    }),
  ];
  return h("section", { class: "card" }, h("h2", {}, "By step"), h("div", { class: "two" }, made));
}

async function recorded({ run, steps, words, set, go }) {
  if (!steps.length)
    return [
      card(
        "Calls",
        empty(
          "No call is recorded of this run",
          "Outcomes and programs of single calls lie in record/steps. A run records itself unless record.max_mb=0.",
        ),
      ),
    ];
  const count = Number(words.count ?? 5);
  const chosen = steps.slice(-count);
  const found = await ask("tool-calls", { run, first: chosen[0], last: chosen.at(-1) });
  const span = card(
    null,
    h(
      "div",
      { class: "toolbar" },
      h("label", {}, "calls of"),
      choice(SPANS, count, (value) => set({ ...words, count: value })),
      h(
        "span",
        { class: "muted number" },
        `steps ${found.steps[0]} to ${found.steps.at(-1)}: ${whole(found.at.length)} calls`,
      ),
    ),
  );
  if (!found.at.length)
    return [
      span,
      card("Calls", empty("No call was made in these steps", "The model answered without a tool.")),
    ];
  return [
    span,
    h("div", { class: "two" }, outcomes(found), latencies(found)),
    slowest(found, run, go),
  ];
}

function outcomes(found) {
  const by = new Map();
  found.outcome.forEach((outcome, at) => {
    const key = `${found.tool[at]}\n${found.executed[at] ? outcome : `refused (${outcome})`}`;
    if (!by.has(key)) by.set(key, []);
    by.get(key).push(found.latency_s[at]);
  });
  const rows = [...by]
    .map(([key, latencies]) => ({
      tool: key.split("\n")[0],
      outcome: key.split("\n")[1],
      latencies: latencies.sort((a, b) => a - b),
    }))
    .sort((a, b) => b.latencies.length - a.latencies.length);
  return h(
    "section",
    { class: "card", id: "outcomes" },
    h("h2", {}, "Outcomes"),
    table(
      [
        { name: "tool", cell: (row) => row.tool },
        {
          name: "outcome",
          cell: (row) => badge(row.outcome, row.outcome === "ok" ? "good" : "bad"),
        },
        { name: "calls", number: true, cell: (row) => whole(row.latencies.length) },
        {
          name: "share",
          number: true,
          cell: (row) => percent(row.latencies.length / found.outcome.length, 1),
        },
        ...[
          ["median", 0.5],
          ["p90", 0.9],
          ["p99", 0.99],
        ].map(([name, share]) => ({
          name,
          number: true,
          cell: (row) =>
            row.outcome.startsWith("refused") ? "–" : seconds(percentile(row.latencies, share)),
        })),
      ],
      rows,
    ),
  );
}

const percentile = (sorted, share) =>
  sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];

/** A histogram with bins of equal width on a logarithmic axis. */
function latencies(found) {
  const logs = found.latency_s.filter((value) => value > 0).map((value) => Math.log10(1e3 * value));
  if (!logs.length) return card("Latency", empty("No call was run", "All were refused."));
  const low = Math.min(...logs);
  const width = Math.max(0.02, (Math.max(...logs) - low) / 24);
  const counts = new Array(26).fill(0);
  for (const value of logs) counts[Math.min(25, Math.floor((value - low) / width))] += 1;
  const most = Math.max(...counts);
  const bars = counts
    .map((count, at) => ({ count, from: 10 ** (low + at * width) }))
    .filter((bar, at) => bar.count || at < 25);
  return h(
    "section",
    { class: "card", id: "latencies" },
    h(
      "h2",
      {},
      "Latency ",
      h(
        "span",
        { class: "muted", style: { fontWeight: 400 } },
        "calls by milliseconds, logarithmic",
      ),
    ),
    h(
      "div",
      { style: { display: "flex", alignItems: "flex-end", gap: "2px", height: "150px" } },
      bars.map((bar) =>
        h("div", {
          title: `from ${number(Number(bar.from.toPrecision(3)))} ms: ${whole(bar.count)} calls`,
          style: {
            flex: "1",
            height: `${Math.max(bar.count ? 2 : 0, (150 * bar.count) / most)}px`,
            background: color("tool_wait"),
            borderRadius: "2px 2px 0 0",
          },
        }),
      ),
    ),
    h(
      "div",
      { class: "toolbar muted number", style: { justifyContent: "space-between" } },
      [0, 8, 16, bars.length - 1]
        .filter((at) => bars[at])
        .map((at) => h("span", {}, `${number(Number(bars[at].from.toPrecision(3)))} ms`)),
    ),
  );
}

function slowest(found, run, go) {
  const one = (call) => {
    const result = h("div", {});
    const again = h("button", { disabled: exported, onclick: () => rerun() }, "run again");
    async function rerun() {
      again.disabled = true;
      result.replaceChildren(h("p", { class: "muted" }, "running in a jail ..."));
      try {
        const made = await request("run-again", {
          run,
          step: call.step,
          group: call.group,
          sample: call.sample,
          call: call.call,
        });
        result.replaceChildren(
          h(
            "h3",
            {},
            "now ",
            badge(made.outcome, made.outcome === "ok" ? "good" : "bad"),
            ` ${seconds(made.wall_s)}, ${seconds(made.cpu_s)} of CPU`,
          ),
          h(
            "pre",
            {},
            [made.stdout, made.display, made.stderr].filter(Boolean).join("\n") || "(no output)",
          ),
        );
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        result.replaceChildren(empty("It could not be run", error.message));
      }
      again.disabled = false;
    }
    return h(
      "details",
      { class: `call${call.outcome === "ok" ? "" : " wrong"}` },
      h(
        "summary",
        {},
        h("b", { class: "number" }, seconds(call.latency_s)),
        " ",
        call.tool,
        " ",
        badge(call.outcome, call.outcome === "ok" ? "good" : "bad"),
        ` step ${call.step}, group ${call.group} #${call.sample}`,
      ),
      h("h3", {}, "program"),
      h("pre", {}, program(call.arguments)),
      h("h3", {}, "what the model read"),
      h("pre", {}, call.reply),
      h(
        "div",
        { class: "toolbar", style: { marginTop: "8px" } },
        again,
        h(
          "button",
          {
            onclick: () =>
              go("trajectory", { step: call.step, group: call.group, sample: call.sample }),
          },
          "its trajectory",
        ),
      ),
      result,
    );
  };
  return h(
    "section",
    { class: "card", id: "slowest" },
    h("h2", {}, "Slowest programs"),
    found.slowest.map(one),
  );
}
