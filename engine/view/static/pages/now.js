// The page Now: whether the run is healthy, what limits it, and what to change.

import { ask, column, last, metrics, Problem } from "view/api";
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
import { bytes, fixed, mean, number, percent, seconds, sum, whole } from "view/parts/format";

/** @import { Finding, Metrics, Now, Pace, Run } from "view/answers" */
/** @import { Context } from "view/main" */
/** @import { Child } from "view/parts/dom" */

const STRIP = 80; // newest steps that the strip shows
const STRIP_HEIGHT = 84;
const RECENT = 8; // number of newest steps over which the figures are means
const LEAST = 0.002; // share of the steps below which a cause is not shown

/** @param {Context} context */
export async function now({ run, runs, go }) {
  const [answer, rows, ages] = await Promise.all([
    ask("now", { run }),
    metrics(run),
    ageOfWeights(run, runs[run].recorded.at(-1)),
  ]);
  const steps = strip(rows, (step) => go("time", { step }));
  if (!answer.measured) return [notMeasured(), steps, recentFigures(rows), ages];
  return [
    verdict(answer, runs[run]),
    findings("alarms", "Alarms", answer.alarms, answer),
    findings("advice", "Advice", answer.advice, answer),
    lost(answer),
    steps,
    recentFigures(rows),
    ages,
  ];
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
  const kind = !moves || alarms.length ? "bad" : limit === "none" ? "good" : "warn";
  const judged = alarms.length ? "alarm" : limit === "none" ? "healthy" : `limited: ${limit}`;
  const halted = pace.stalled ? "stalled" : run.state;
  const starting = run.state === "running" ? "starting" : run.state;
  return namedCard(
    "verdict",
    null,
    badge(!moves ? halted : steps ? judged : starting, steps || !moves ? kind : ""),
    pace.sentence ? h("p", { class: "sentence" }, pace.sentence) : null,
    h("p", { class: pace.sentence ? "" : "sentence" }, sentence),
    note([steps ? `over steps ${steps[0]} to ${steps[1]}` : "", paceText(pace, run)].join("")),
  );
}

/** @param {Pace} pace @param {Run} run */
function paceText({ step_s, age_s }, run) {
  if (step_s === null) return "";
  const age = run.state === "running" ? ` · last step ${seconds(age_s)} ago` : "";
  const left = (run.steps ?? 0) - run.last;
  const rest =
    run.state === "running" && left > 0 ? ` · about ${seconds(left * step_s)} to go` : "";
  return ` · ${seconds(step_s)} a step${age}${rest}`;
}

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
      ? `${limitText(name)} ${percent(value, 1)} of the steps`
      : `${name} ${number(value)}`;
  /** @param {Finding} item @returns {Child[]} */
  const change = ({ option, value }) => {
    const known = value !== null && value !== undefined;
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
 * @param {Metrics} rows
 * @param {(step: number) => void} onclick
 */
function strip(rows, onclick) {
  const times = rows.values["time/step_s"] ?? [];
  const shown = rows.step
    .map((_, row) => row)
    .filter((row) => (times[row] ?? null) !== null)
    .slice(-STRIP);
  if (!shown.length)
    return card("Steps", empty("No step yet", "A step appears here when its weights are live."));
  const most = Math.max(...shown.map((row) => times[row] ?? 0));
  const columns = shown.map((row) => {
    const parts = STEP_PARTS.map((part) => ({
      ...part,
      value: rows.values[part.metric]?.[row] ?? 0,
    }));
    const lines = parts.map(({ label, value }) => `${label} ${seconds(value)}`);
    return h(
      "div",
      {
        class: "column",
        ...withTip([`step ${rows.step[row]}: ${seconds(times[row])}`, ...lines].join("\n")),
        onclick: () => onclick(rows.step[row]),
      },
      parts.map(({ value, paint }) =>
        h("div", {
          style: { height: `${(STRIP_HEIGHT * value) / most}px`, background: color(paint) },
        }),
      ),
    );
  });
  return namedCard(
    "strip",
    `Steps ${rows.step[shown[0]]} to ${rows.step[shown[shown.length - 1]]}`,
    h("div", { class: "columns-of-steps", style: { height: `${STRIP_HEIGHT}px` } }, columns),
    spread(
      legend(STEP_PARTS.map(({ label, paint }) => [label, color(paint)])),
      h("span", { class: "muted number" }, `tallest ${seconds(most)}`),
    ),
  );
}

/** @param {Metrics} rows */
function recentFigures(rows) {
  /** @param {string} name */
  const value = (name) => last(rows, name);
  /** @param {string} name */
  const recent = (name) => column(rows, name).y.slice(-RECENT);
  /** @param {string} name */
  const average = (name) => (recent(name).length ? mean(recent(name)) : undefined);
  /** @param {string} part @param {string} all */
  const share = (part, all) => {
    const total = sum(recent(all));
    return total ? sum(recent(part)) / total : undefined;
  };
  const peaks = Object.keys(rows.values)
    .filter((name) => name.startsWith("kv_peak/"))
    .map((name) => value(name) ?? 0);
  const evaluated = value("eval/n");
  const low = percent(value("eval/accuracy_low"), 1);
  const high = percent(value("eval/accuracy_high"), 1);
  const interval = `95 %: ${low} to ${high}, n ${whole(evaluated)}`;
  const newest = `mean of the newest ${RECENT} steps`;
  return figures(
    [
      [
        "Held-out accuracy",
        percent(value("eval/accuracy"), 1),
        evaluated ? interval : "no evaluation yet",
      ],
      ["Reward", fixed(average("reward"), 3), newest],
      ["Step", seconds(average("time/step_s")), newest],
      ["Tokens sampled", `${whole(average("tokens/per_s"))} /s`, "all replicas"],
      ["Goodput", percent(average("tokens/goodput")), "of sampled tokens trained"],
      [
        "Groups without signal",
        percent(share("groups/flat", "groups/all")),
        `flat, of the newest ${RECENT} steps`,
      ],
      ["Cut by length", percent(share("stop/length", "rollout/trajectories")), "of trajectories"],
      [
        "Staleness",
        fixed(average("rollout/staleness_mean"), 2),
        `versions; at most ${whole(value("rollout/staleness_max"))}`,
      ],
      [
        "KV peak",
        percent(peaks.length ? Math.max(...peaks) : null),
        `${whole(value("kv/preemptions"))} preemptions in the last step`,
      ],
      [
        "Tool latency",
        `${fixed(value("tools/latency_p50_ms"), 1)} ms`,
        `p99 ${fixed(value("tools/latency_p99_ms"), 1)} ms`,
      ],
      [
        "Tool errors",
        percent(average("tools/error_share"), 1),
        `${percent(average("tools/error_share_correct"), 1)} in correct trajectories`,
      ],
      ["Canary", number(value("canary/max_abs")), "largest difference of log-probability"],
      [
        "Sampler / learner",
        number(value("learner/mismatch_fresh_max") ?? value("learner/mismatch_max")),
        "largest mismatch under the same weights",
      ],
      [
        "Replicas",
        whole(value("replicas/live")),
        `${whole(sum(column(rows, "replicas/deaths").y))} deaths`,
      ],
      [
        "Learner memory",
        bytes(value("learner/peak_bytes")),
        `${whole(average("learner/tokens_per_s"))} tokens/s`,
      ],
    ],
    "figures",
  );
}
