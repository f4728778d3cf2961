// Now: is the run healthy, what limits it, and what to change.

import { ask, column, last, metrics, Problem } from "view/api";
import { limitColor, limitText } from "view/parts/causes";
import {
  badge,
  bytes,
  card,
  color,
  empty,
  fixed,
  h,
  legend,
  number,
  percent,
  seconds,
  tip,
  whole,
} from "view/parts/dom";

const STRIP = 80; // steps of the strip, the newest

export async function now({ run, runs, go }) {
  const [found, rows, ages] = await Promise.all([
    ask("now", { run }),
    metrics(run),
    agesOf(run, runs[run].recorded.at(-1)),
  ]);
  return [
    verdict(found, runs[run]),
    ...(found.measured ? [...findings(found), lost(found)] : []),
    strip(rows, go),
    figures(rows),
    ...ages,
  ];
}

function verdict(found, one) {
  if (!found.measured)
    return card(
      null,
      empty(
        "What limits this run was not measured",
        "Its metrics do not say what the seconds of a step went to: it was made by an older version. The page Run has the sums of the whole run, if it ended.",
      ),
    );
  const healthy = found.limit === "none";
  const kind = found.alarms.length ? "bad" : healthy ? "good" : "warn";
  const word = found.alarms.length ? "alarm" : healthy ? "healthy" : `limited: ${found.limit}`;
  const span = found.steps ? `over steps ${found.steps[0]} to ${found.steps[1]}` : "";
  return h(
    "section",
    { class: "card", id: "verdict" },
    found.steps ? badge(word, kind) : badge(one.state === "running" ? "starting" : one.state),
    h("p", { class: "sentence" }, found.sentence),
    h("div", { class: "muted" }, span),
  );
}

function findings(found) {
  const list = (title, kind, items) =>
    items.length === 0
      ? null
      : h(
          "section",
          { class: "card", id: kind === "alarm" ? "alarms" : "advice" },
          h("h2", {}, title),
          items.map((item) =>
            h(
              "div",
              { class: `finding ${kind}` },
              h("div", {}, item.text),
              h(
                "div",
                { class: "of" },
                Object.entries(item.figures)
                  .map(([name, value]) => figureText(name, value, found))
                  .join("   ·   "),
                item.option
                  ? h(
                      "span",
                      {},
                      Object.keys(item.figures).length ? "   ·   " : "",
                      "change ",
                      h("code", {}, item.option),
                      item.value === null || item.value === undefined
                        ? ""
                        : ` (now ${number(item.value)})`,
                    )
                  : null,
              ),
            ),
          ),
        );
  return [list("Alarms", "alarm", found.alarms), list("Advice", "advice", found.advice)].filter(
    Boolean,
  );
}

/** How old the weights were that sampled the newest recorded tokens; nothing where that is not recorded. */
async function agesOf(run, step) {
  if (step === undefined) return [];
  let found;
  try {
    found = await ask("tokens", { run, step });
  } catch (error) {
    if (error instanceof Problem) return [];
    throw error;
  }
  const rows = Object.entries(found.ages);
  const all = rows.reduce((sum, [, count]) => sum + count, 0);
  return [
    h(
      "section",
      { class: "card", id: "staleness" },
      h("h2", {}, `Age of the weights that sampled step ${step}`),
      h(
        "div",
        { class: "bars" },
        rows.map(([age, count]) => [
          h(
            "span",
            {},
            age === "0" ? "those in training" : `${age} version${age === "1" ? "" : "s"} older`,
          ),
          h(
            "div",
            { class: "track" },
            h("div", {
              class: "bar",
              style: { width: `${(100 * count) / all}%`, background: color("staleness_gate") },
            }),
          ),
          h("span", { class: "number" }, `${percent(count / all, 1)}, ${whole(count)} tokens`),
        ]),
      ),
    ),
  ];
}

/** A share of the steps where the name is a cause, else a number of metrics.jsonl. */
const figureText = (name, value, found) =>
  name in found.lost
    ? `${limitText(name)} ${percent(value, 1)} of the steps`
    : `${name} ${number(value)}`;

function lost(found) {
  const shares = Object.entries(found.lost)
    .filter(([, share]) => share >= 0.002)
    .sort((a, b) => b[1] - a[1]);
  if (!shares.length)
    return card(
      "What the steps went to",
      empty(
        "No figures yet",
        "They come with the first step of a run that measures its replicas by step.",
      ),
    );
  return h(
    "section",
    { class: "card", id: "lost" },
    h("h2", {}, "What the steps went to"),
    h(
      "p",
      { class: "muted" },
      "Share of the steps by cause. Causes overlap: two may hold at once.",
    ),
    h(
      "div",
      { class: "bars" },
      shares.map(([limit, share]) => [
        h("span", {}, limitText(limit)),
        h(
          "div",
          { class: "track" },
          h("div", {
            class: "bar",
            style: { width: `${100 * Math.min(1, share)}%`, background: limitColor(limit) },
          }),
        ),
        h("span", { class: "number" }, percent(share, 1)),
      ]),
    ),
  );
}

function strip(rows, go) {
  const parts = [
    ["rollout", "time/rollout_s", "busy"],
    ["learner", "time/learn_s", "staleness_gate"],
    ["weights", "time/sync_s", "weight_sync"],
  ];
  const at = rows.step
    .map((_, row) => row)
    .filter((row) => rows.values["time/step_s"]?.[row] != null)
    .slice(-STRIP);
  if (!at.length)
    return card("Steps", empty("No step yet", "A step appears here when its weights are live."));
  const most = Math.max(...at.map((row) => rows.values["time/step_s"][row]));
  const height = 84;
  const bars = at.map((row) => {
    const value = (name) => rows.values[name]?.[row] ?? 0;
    const text = [
      `step ${rows.step[row]}: ${seconds(value("time/step_s"))}`,
      ...parts.map(([label, name]) => `${label} ${seconds(value(name))}`),
    ].join("\n");
    return h(
      "div",
      {
        style: {
          flex: "1",
          maxWidth: "26px",
          display: "flex",
          flexDirection: "column-reverse",
          cursor: "pointer",
          height: `${height}px`,
        },
        onmousemove: (event) => tip(event, text),
        onmouseleave: (event) => tip(event, ""),
        onclick: () => go("time", { step: rows.step[row] }),
      },
      parts.map(([, name, paint]) =>
        h("div", {
          style: { height: `${(height * value(name)) / most}px`, background: color(paint) },
        }),
      ),
    );
  });
  return h(
    "section",
    { class: "card", id: "strip" },
    h("h2", {}, `Steps ${rows.step[at[0]]} to ${rows.step[at.at(-1)]}`),
    h("div", { style: { display: "flex", gap: "2px", alignItems: "flex-end" } }, bars),
    h(
      "div",
      { class: "toolbar", style: { justifyContent: "space-between", marginTop: "6px" } },
      legend(parts.map(([label, , paint]) => [label, color(paint)])),
      h("span", { class: "muted number" }, `tallest ${seconds(most)}`),
    ),
  );
}

function figures(rows) {
  const value = (name) => last(rows, name);
  const mean = (name) => {
    const { y } = column(rows, name);
    const newest = y.slice(-8);
    return newest.length ? newest.reduce((sum, one) => sum + one, 0) / newest.length : undefined;
  };
  const peak = Math.max(
    -1,
    ...Object.keys(rows.values)
      .filter((name) => name.startsWith("kv_peak/"))
      .map((name) => value(name) ?? -1),
  );
  const evaluated = value("eval/n");
  const shown = [
    [
      "Held-out accuracy",
      percent(value("eval/accuracy"), 1),
      evaluated
        ? `95 %: ${percent(value("eval/accuracy_low"), 1)} to ${percent(value("eval/accuracy_high"), 1)}, n ${whole(evaluated)}`
        : "no evaluation yet",
    ],
    ["Reward", fixed(mean("reward"), 3), "mean of the newest 8 steps"],
    ["Step", seconds(mean("time/step_s")), "mean of the newest 8 steps"],
    ["Tokens sampled", `${whole(mean("tokens/per_s"))} /s`, "all replicas"],
    ["Goodput", percent(mean("tokens/goodput")), "trained of all sampled"],
    [
      "Groups without signal",
      percent(share(rows, "groups/flat", "groups/all")),
      "flat, of the newest 8 steps",
    ],
    [
      "Cut by length",
      percent(share(rows, "stop/length", "rollout/trajectories")),
      "of trajectories",
    ],
    [
      "Staleness",
      fixed(mean("rollout/staleness_mean"), 2),
      `versions; at most ${whole(value("rollout/staleness_max"))}`,
    ],
    [
      "KV peak",
      peak < 0 ? "–" : percent(peak),
      `${whole(value("kv/preemptions"))} preemptions in the last step`,
    ],
    [
      "Tool latency",
      `${fixed(value("tools/latency_p50_ms"), 1)} ms`,
      `p99 ${fixed(value("tools/latency_p99_ms"), 1)} ms`,
    ],
    [
      "Tool errors",
      percent(mean("tools/error_share"), 1),
      `${percent(mean("tools/error_share_correct"), 1)} in correct ones`,
    ],
    ["Canary", number(value("canary/max_abs")), "largest difference of log-probability"],
    [
      "Sampler / learner",
      number(value("learner/mismatch_fresh_max") ?? value("learner/mismatch_max")),
      "largest mismatch under the same weights",
    ],
    [
      "Replicas",
      value("replicas/live") === undefined ? "–" : whole(value("replicas/live")),
      `${whole(sum(rows, "replicas/deaths"))} deaths`,
    ],
    [
      "Learner memory",
      bytes(value("learner/peak_bytes")),
      `${whole(mean("learner/tokens_per_s"))} tokens/s`,
    ],
  ];
  return h(
    "div",
    { class: "figures", id: "figures" },
    shown.map(([name, text, note]) =>
      h(
        "div",
        { class: "figure" },
        h("div", { class: "name" }, name),
        h("div", { class: "value" }, text),
        h("div", { class: "note" }, note),
      ),
    ),
  );
}

const sum = (rows, name) =>
  name in rows.values ? column(rows, name).y.reduce((all, one) => all + one, 0) : undefined;

function share(rows, part, all) {
  const parts = column(rows, part).y.slice(-8);
  const wholes = column(rows, all).y.slice(-8);
  const total = wholes.reduce((one, two) => one + two, 0);
  return total ? parts.reduce((one, two) => one + two, 0) / total : undefined;
}
