// Where time goes: every replica, the learner, the sandbox and the event loop on one axis; and what was lost, to what.

import { ask, metrics } from "view/api";
import { CAUSES, causeColor, causeText } from "view/parts/causes";
import {
  card,
  choice,
  color,
  empty,
  h,
  legend,
  percent,
  seconds,
  stepChooser,
  table,
} from "view/parts/dom";
import { Lanes } from "view/parts/lanes";
import { stacked } from "view/parts/stacked";

export async function time({ run, runs, words, set }) {
  const rows = await metrics(run);
  const steps = runs[run].timeline.filter((step) => step > 0);
  return [
    bySteps(rows, (step) => set({ ...words, step })),
    ...(steps.length
      ? await lanes({ run, steps, words, set, finished: runs[run].last, path: runs[run].path })
      : [noTimeline()]),
  ];
}

function noTimeline() {
  return card(
    "Timeline",
    empty(
      "No timeline is recorded of this run",
      "It lies in record/timeline; a run records itself unless record.max_mb=0. timeline.json, if there is one, opens in Perfetto.",
    ),
  );
}

function bySteps(rows, onclick) {
  const names = CAUSES.filter((cause) =>
    rows.values[cause === "busy" ? "replicas/busy_s" : `idle/${cause}_s`]?.some(
      (value) => value > 0,
    ),
  );
  if (!names.length) {
    const parts = [
      ["rollout", "time/rollout_s", "busy"],
      ["learner", "time/learn_s", "staleness_gate"],
      ["weights", "time/sync_s", "weight_sync"],
    ];
    const known = parts.filter(([, name]) => rows.values[name]);
    if (!known.length)
      return card("By step", empty("No step yet", "Each step adds a column here."));
    return h(
      "section",
      { class: "card", id: "by-step" },
      h("h2", {}, "Seconds of each step"),
      stacked(
        rows,
        known.map(([label, name, paint]) => [label, rows.values[name], color(paint)]),
        onclick,
      ),
      h(
        "p",
        { class: "muted" },
        "The replicas' idle time by cause is not in this run's metrics; it was recorded by an older version.",
      ),
    );
  }
  return h(
    "section",
    { class: "card", id: "by-step" },
    h("h2", {}, "Seconds of all replicas, by step"),
    stacked(
      rows,
      names.map((cause) => [
        causeText(cause),
        rows.values[cause === "busy" ? "replicas/busy_s" : `idle/${cause}_s`],
        causeColor(cause),
      ]),
      onclick,
    ),
    h(
      "p",
      { class: "muted" },
      "Sampling at the bottom, above it the seconds in which replicas stood still, by cause. A click opens the step below.",
    ),
  );
}

async function lanes({ run, steps, words, set, finished, path }) {
  const wanted = Number(words.step);
  const step = steps.includes(wanted)
    ? wanted
    : (steps.findLast((one) => one <= finished) ?? steps.at(-1)); // what follows the last step is its evaluation
  const count = Math.max(1, Number(words.count ?? 1));
  const last = steps
    .filter((one) => one >= step)
    .slice(0, count)
    .at(-1);
  const found = await ask("timeline", { run, first: step, last });
  const losses = h("div", { id: "losses" });
  const drawn = new Lanes(found, (from, to) => losses.replaceChildren(lossTable(found, from, to)));
  losses.append(lossTable(found, 0, found.seconds));
  const seen = CAUSES.filter((cause) =>
    found.replicas.some((replica) => replica.idle.some(([name]) => name === cause)),
  );
  return [
    h(
      "section",
      { class: "card", id: "timeline" },
      h(
        "div",
        { class: "toolbar", style: { marginBottom: "8px" } },
        stepChooser(steps, step, (value) => set({ ...words, step: value })),
        h("label", {}, "and the next"),
        choice(
          [
            [1, "none"],
            [2, "1"],
            [4, "3"],
            [8, "7"],
          ],
          count,
          (value) => set({ ...words, step, count: value }),
        ),
        h("button", { onclick: () => drawn.reset() }, "show all"),
        h(
          "span",
          { class: "muted" },
          "drag to zoom, double-click for all; the table below counts what is in view",
        ),
      ),
      legend(seen.map((cause) => [causeText(cause), causeColor(cause)])),
      legend([
        ["below: KV blocks in use", color("muted")],
        ["preemption", color("bad")],
        ["turn", color("busy")],
        ["waits for its tools", color("tool_wait")],
        ["call", color("good")],
        ["call that failed", color("bad")],
      ]),
      h("div", { style: { height: "8px" } }),
      drawn.element,
      h(
        "p",
        { class: "muted", style: { marginTop: "8px" } },
        "All events of these steps, for ui.perfetto.dev: ",
        h(
          "code",
          {},
          `python -m engine.programs.trace ${path} --steps ${step === last ? step : `${step}-${last}`}`,
        ),
      ),
      found.left_out
        ? h(
            "p",
            { class: "muted" },
            `${found.left_out.toLocaleString("en-US")} spans of these steps are left out. Fewer steps show all.`,
          )
        : null,
    ),
    card("Replica-seconds in view", losses),
    loopLag(found),
  ];
}

function lossTable(found, from, to) {
  const sums = {};
  let all = 0;
  for (const replica of found.replicas) {
    for (const [cause, begin, end] of replica.idle) {
      const length = Math.min(end, to) - Math.max(begin, from);
      if (length <= 0) continue;
      sums[cause] = (sums[cause] ?? 0) + length;
      all += length;
    }
  }
  const rows = Object.entries(sums).sort((a, b) => b[1] - a[1]);
  if (!rows.length)
    return empty("No replica was observed in this stretch", "Zoom out, or choose another step.");
  return table(
    [
      {
        name: "the replicas",
        cell: ([cause]) => causeText(cause),
        key: ([cause]) => causeColor(cause),
      },
      { name: "seconds", number: true, cell: ([, value]) => seconds(value) },
      { name: "share", number: true, cell: ([, value]) => percent(value / all, 1) },
      ...found.replicas
        .map((replica) => ({
          name: `replica ${replica.node ? `${replica.node} ` : ""}${replica.replica}`,
          number: true,
          cell: ([cause]) =>
            seconds(
              replica.idle
                .filter(([name]) => name === cause)
                .reduce(
                  (sum, [, begin, end]) =>
                    sum + Math.max(0, Math.min(end, to) - Math.max(begin, from)),
                  0,
                ),
            ),
        }))
        .slice(0, 8),
    ],
    rows,
  );
}

function loopLag(found) {
  if (!found.lag.length)
    return card(
      "Event loop",
      empty(
        "No lag was recorded",
        "The node notes how late its event loop is where a timeline is recorded.",
      ),
    );
  const lags = found.lag.map(([, lag]) => lag).sort((a, b) => a - b);
  const at = (share) => lags[Math.min(lags.length - 1, Math.floor(share * lags.length))];
  return card(
    "Event loop of the node",
    h(
      "p",
      {},
      `Timers were late by ${seconds(at(0.5))} at the median, ${seconds(at(0.99))} at the 99th percentile, and ${seconds(lags.at(-1))} at most (${lags.length.toLocaleString("en-US")} samples).`,
    ),
  );
}
