// The page Now: whether the run is healthy, what limits it, and what to change.

import { ask, column, last, metrics, Problem } from "view/api";
import { sparkline } from "view/parts/sparkline";
import { color, limitColor, limitText, STEP_PARTS } from "view/parts/colors";
import {
  badge,
  bars,
  card,
  empty,
  figures,
  h,
  legend,
  namedCard,
  note,
  spread,
  withTip,
} from "view/parts/dom";
import { bytes, fixed, number, percent, seconds, sum, whole } from "view/parts/format";

/** @import { Finding, Metrics, Now, Run } from "view/answers" */
/** @import { Context } from "view/main" */
/** @import { Child } from "view/parts/dom" */

const STRIP = 80; // newest steps that the strip shows
const STRIP_HEIGHT = 84;
const TALLEST = 4; // medians, beyond which a column of the strip is cut
const CURVE = 200; // newest points of a sparkline
const LEAST = 0.002; // share of the steps below which a cause is not shown

/** @param {Context} context */
export async function now({ run, runs }) {
  const [answer, rows, ages] = await Promise.all([
    ask("now", { run }),
    metrics(run),
    ageOfWeights(run, runs[run].recorded.at(-1)),
  ]);
  const parts = answer.measured
    ? [
        verdict(answer, runs[run]),
        findings("alarms", "Alarms", answer.alarms, answer),
        mainFigures(answer, rows),
        findings("advice", "Advice", answer.advice, answer),
        lost(answer),
      ]
    : [notMeasured(), mainFigures(answer, rows)];
  return [parts, strip(rows, run), moreFigures(answer, rows), ages];
}

function notMeasured() {
  return card(
    null,
    empty(
      "What limits this run was not measured",
      "An older version made it, which did not measure where the seconds of a step went. " +
        "Once the run has ended, the page Run has the sums.",
    ),
  );
}

/**
 * @param {Now} answer
 * @param {Run} run
 */
function verdict({ alarms, limit, pace, sentence, steps }, run) {
  const moves = run.state !== "stopped" && !pace.stalled;
  const healthy = sentence.startsWith("Healthy");
  const [judged, kind] = alarms.length
    ? ["alarm", "bad"]
    : healthy
      ? ["healthy", "good"]
      : limit === "none"
        ? ["no single limit", ""]
        : [`limited: ${limitText(limit)}`, "warn"];
  const halted = pace.stalled ? "stalled" : run.state;
  const starting = run.state === "running" ? "starting" : run.state;
  return namedCard(
    "verdict",
    null,
    badge(!moves ? halted : steps ? judged : starting, !moves ? "bad" : steps ? kind : ""),
    pace.sentence ? h("p", { class: "sentence" }, pace.sentence) : null,
    h("p", { class: pace.sentence ? "" : "sentence" }, sentence),
    steps ? note(windowText(steps)) : null,
  );
}

/** @param {[first: number, last: number]} steps */
const windowText = ([first, last]) =>
  first === last
    ? `All figures here are of step ${first}.`
    : `All figures here are of the newest ${last - first + 1} steps, ${first} to ${last}.`;

/**
 * @param {string} id
 * @param {string} title
 * @param {Finding[]} items
 * @param {Now} answer
 */
function findings(id, title, items, { lost }) {
  if (!items.length) return null;
  /** @param {[name: string, value: number]} entry a cause with its share, or a metric */
  const figure = ([name, value]) =>
    name in lost
      ? `${limitText(name)} ${percent(value, 1)} of the ${name === "evaluation" ? "time" : "steps"}`
      : `${name} ${number(value)}`;
  /** @param {Finding} item @returns {Child[]} */
  const change = ({ option, value }) => {
    const known = String(value ?? "") !== "";
    return ["change ", h("code", {}, option), known ? ` (now ${number(value)})` : ""];
  };
  return namedCard(
    id,
    title,
    items.map((item) => {
      const details = [
        ...Object.entries(item.figures).map((entry) => h("span", {}, figure(entry))),
        ...(item.option ? [h("span", {}, change(item))] : []),
      ];
      return h(
        "div",
        { class: `finding ${id}` },
        h("div", {}, item.text),
        h("div", { class: "details" }, details),
      );
    }),
  );
}

/**
 * Returns how old the weights were that sampled the newest recorded tokens; nothing if that is not
 * recorded.
 * @param {number} run
 * @param {number | undefined} step
 */
async function ageOfWeights(run, step) {
  if (step === undefined) return null;
  let answer;
  try {
    answer = await ask("tokens", { run, step });
  } catch (error) {
    if (error instanceof Problem) return null;
    throw error;
  }
  const rows = Object.entries(answer.ages);
  const all = sum(Object.values(answer.ages));
  return namedCard(
    "staleness",
    `Age of the weights that sampled step ${step}`,
    bars(
      rows.map(([age, count]) => ({
        name: age === "0" ? "current version" : `${age} version${age === "1" ? "" : "s"} older`,
        share: count / all,
        paint: color("staleness_gate"),
        text: `${percent(count / all, 1)}, ${whole(count)} tokens`,
      })),
    ),
  );
}

/** @param {Now} answer */
function lost(answer) {
  const shares = Object.entries(answer.lost)
    .filter(([, share]) => share >= LEAST)
    .sort(([, a], [, b]) => b - a);
  if (!shares.length)
    return card(
      "Where the time of a step went",
      empty("No figures yet", "They appear after the first step."),
    );
  return namedCard(
    "lost",
    "Where the time of a step went",
    note("Share of the steps by cause. Causes overlap: two may hold at once."),
    bars(
      shares.map(([limit, share]) => ({
        name: limitText(limit),
        share,
        paint: limitColor(limit),
        text: percent(share, 1),
      })),
    ),
  );
}

/**
 * Draws the seconds of the newest steps as columns of their parts, up to TALLEST times the median:
 * one step of eight times that would make all others flat.
 * @param {Metrics} rows
 * @param {number} run
 */
function strip(rows, run) {
  const times = rows.values["time/step_s"] ?? [];
  const shown = rows.step
    .map((_, row) => row)
    .filter((row) => (times[row] ?? null) !== null)
    .slice(-STRIP);
  if (!shown.length)
    return card("Steps", empty("No step yet", "A step appears here when its weights are live."));
  const took_s = shown.map((row) => times[row] ?? 0);
  const usual = median(took_s);
  const longest = took_s.reduce((most, value) => Math.max(most, value), 0);
  const top = Math.min(longest, TALLEST * usual) || 1;
  const columns = shown.map((row) => stepColumn(rows, row, top, run));
  const evaluated = new Set(column(rows, "eval/accuracy").x);
  const numbers = shown.map((row) => rows.step[row]);
  return namedCard(
    "strip",
    `Steps ${numbers[0]} to ${numbers[numbers.length - 1]}`,
    h(
      "div",
      { class: "columns-of-steps", style: { height: `${STRIP_HEIGHT}px` } },
      columns,
      h("div", { class: "usual", style: { bottom: `${(STRIP_HEIGHT * usual) / top}px` } }),
    ),
    h(
      "div",
      { class: "marks-of-steps" },
      numbers.map((step, at) => {
        const edge = at === 0 || at === numbers.length - 1;
        return h("span", {}, evaluated.has(step) ? "▲" : edge ? String(step) : "");
      }),
    ),
    spread(
      legend(STEP_PARTS.map(({ label, paint }) => [label, color(paint)])),
      h(
        "span",
        { class: "muted" },
        [
          `dashed: median ${seconds(usual)}`,
          evaluated.size ? "▲ evaluation after it" : "",
          longest > top ? `dotted: cut, up to ${seconds(longest)}` : `longest ${seconds(longest)}`,
        ]
          .filter(Boolean)
          .join(" · "),
      ),
    ),
  );
}

/**
 * @param {Metrics} rows
 * @param {number} row
 * @param {number} top seconds of a full column
 * @param {number} run
 */
function stepColumn(rows, row, top, run) {
  const step = rows.step[row];
  const took = rows.values["time/step_s"][row] ?? 0;
  const parts = STEP_PARTS.map((part) => ({
    ...part,
    value: rows.values[part.metric]?.[row] ?? 0,
  }));
  const lines = parts.map(({ label, value }) => `${label} ${seconds(value)}`);
  const scale = STRIP_HEIGHT / Math.max(top, took);
  return h(
    "a",
    {
      class: took > top ? "column taller" : "column",
      href: `#/time?run=${run}&step=${step}`,
      "aria-label": `step ${step}, ${seconds(took)}`,
      ...withTip([`step ${step}: ${seconds(took)}`, ...lines].join("\n")),
    },
    parts.map(({ value, paint }) =>
      h("div", { style: { height: `${scale * value}px`, background: color(paint) } }),
    ),
  );
}

/** @param {number[]} values at least one */
function median(values) {
  const sorted = [...values].sort((one, other) => one - other);
  const middle = Math.floor(sorted.length / 2);
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/**
 * Returns what is read each day, each figure with its curve over the newest steps.
 * @param {Now} answer
 * @param {Metrics} rows
 */
function mainFigures({ figures: values }, rows) {
  /** @param {string} name @param {string} label @param {(value: number) => string} format */
  const curveOf = (name, label, format) => {
    const { x, y } = column(rows, name);
    return sparkline({ label, x: x.slice(-CURVE), y: y.slice(-CURVE), format });
  };
  const evaluated = last(rows, "eval/n");
  const low = percent(last(rows, "eval/accuracy_low"), 1);
  const high = percent(last(rows, "eval/accuracy_high"), 1);
  const scored = evaluated
    ? `95 %: ${low} to ${high}, after step ${column(rows, "eval/accuracy").x.at(-1)}`
    : "no evaluation yet";
  return figures(
    [
      [
        "Held-out accuracy",
        percent(last(rows, "eval/accuracy"), 1),
        scored,
        curveOf("eval/accuracy", "accuracy", (value) => percent(value, 1)),
      ],
      [
        "Reward",
        fixed(values.reward, 3),
        "mean over trajectories",
        curveOf("reward", "reward", (value) => fixed(value, 3)),
      ],
      ["Step", seconds(values.step_s), "mean", curveOf("time/step_s", "step", seconds)],
      [
        "Tokens sampled",
        `${whole(values.tokens_per_s)} /s`,
        "all replicas",
        curveOf("tokens/per_s", "tokens a second", whole),
      ],
      [
        "Goodput",
        percent(values.goodput_share),
        "of sampled tokens trained",
        curveOf("tokens/goodput", "goodput", percent),
      ],
    ],
    "figures",
  );
}

/**
 * Returns the other figures, in three groups.
 * @param {Now} answer
 * @param {Metrics} rows
 */
function moreFigures({ figures: values, steps }, rows) {
  if (!steps) return null;
  /** @param {string} id @param {string} title @param {[string, string, string][]} entries */
  const group = (id, title, entries) =>
    h("details", { class: "more", id, open: true }, h("summary", {}, title), figures(entries));
  const mismatch =
    values.mismatch === null
      ? ["not checked", "no token was trained by the weights that sampled it"]
      : [number(values.mismatch), "largest difference under the same weights"];
  return [
    group("learning-figures", "Learning", [
      ["Groups without signal", percent(values.flat_share), "of all groups"],
      ["Cut by length", percent(values.truncated_share), "of trajectories"],
      ["Length", `${whole(values.response_tokens)} tokens`, "mean of a trajectory"],
      ["Entropy", fixed(values.entropy, 3), "nats per token, mean"],
      [
        "Tool errors",
        percent(values.tool_error_share, 1),
        `${percent(values.tool_error_correct_share, 1)} in correct trajectories`,
      ],
      [
        "Staleness",
        fixed(values.staleness_mean, 2),
        `versions, mean; at most ${whole(values.staleness_max)}`,
      ],
    ]),
    group("machine-figures", "Machine", [
      ["Replicas", whole(values.replicas_live), `serve; ${whole(values.deaths)} died`],
      [
        "KV peak",
        percent(values.kv_peak_share),
        `largest; ${whole(values.preemptions)} preemptions`,
      ],
      [
        "Tool latency",
        `${fixed(values.tool_latency_p50_ms, 1)} ms`,
        `mean of the medians; p99 up to ${fixed(values.tool_latency_p99_ms, 1)} ms`,
      ],
      [
        "Learner",
        `${whole(values.learner_tokens_per_s)} /s`,
        `tokens; ${bytes(values.learner_peak_bytes)} at its peak`,
      ],
      ["Others on the machine", percent(values.others_cpu_share), "of its cores"],
    ]),
    group("numerics-figures", "Numerics", [
      ["Canary", number(values.canary), "largest difference of log-probability"],
      ["Sampler / learner", mismatch[0], mismatch[1]],
      ["Largest of the run", number(largest(rows, "canary/max_abs")), "canary, all steps"],
    ]),
  ];
}

/** @param {Metrics} rows @param {string} name */
function largest(rows, name) {
  const { y } = column(rows, name);
  return y.length ? y.reduce((most, value) => Math.max(most, value)) : null;
}
