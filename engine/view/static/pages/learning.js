// The page Learning: curves of one run, or of several runs in the same charts.

import { ask, column, curve, metrics, Problem } from "view/api";
import { chart, dashes, stroke } from "view/parts/charts";
import { runColor } from "view/parts/colors";
import { card, choice, empty, h, namedCard, note, table, toolbar } from "view/parts/dom";
import { fixed, mean, percent, signed, sum, whole } from "view/parts/format";
import { metricSearch } from "view/parts/search";

/** @import { Metrics, Run } from "view/answers" */
/** @import { Context } from "view/main" */
/** @import { Series } from "view/parts/charts" */

/**
 * metrics: all but the first are dashed. interval: the metrics of its low and its high end.
 * @typedef {{
 *   title: string,
 *   unit: string,
 *   metrics: string[],
 *   interval?: [low: string, high: string],
 *   format?: (value: number) => string,
 *   points?: boolean,
 *   from0?: boolean,
 * }} Curves
 */

/** @param {number} value */
const asPercent = (value) => percent(value, value < 0.1 ? 1 : 0);

/** @type {Curves[]} */
const CHARTS = [
  {
    title: "Held-out accuracy",
    unit: "95 % interval",
    metrics: ["eval/accuracy"],
    interval: ["eval/accuracy_low", "eval/accuracy_high"],
    format: asPercent,
    points: true,
  },
  { title: "Reward", unit: "mean of a step's trajectories", metrics: ["reward"] },
  {
    title: "Response length",
    unit: "sampled tokens per trajectory",
    metrics: ["rollout/response_tokens"],
    from0: true,
  },
  {
    title: "Groups without signal",
    unit: "flat, of a step's groups",
    metrics: ["groups/flat"],
    from0: true,
  },
  {
    title: "Tool errors",
    unit: "share of calls; dashed: in correct trajectories",
    metrics: ["tools/error_share", "tools/error_share_correct"],
    from0: true,
    format: asPercent,
  },
  {
    title: "Use of tools",
    unit: "share of trajectories with a call",
    metrics: ["tools/rate"],
    from0: true,
    format: asPercent,
  },
  {
    title: "Ends by length",
    unit: "trajectories; dashed: by turns",
    metrics: ["stop/length", "stop/turns"],
    from0: true,
  },
  { title: "Entropy", unit: "nats per token", metrics: ["learner/entropy"], from0: true },
  {
    title: "Clipped tokens",
    unit: "share above; dashed: below",
    metrics: ["learner/clip_high", "learner/clip_low"],
    from0: true,
  },
  { title: "Gradient norm", unit: "", metrics: ["learner/grad_norm"], from0: true },
  {
    title: "Sampler / learner mismatch",
    unit: "largest difference of log-probability",
    metrics: ["learner/mismatch_max"],
    from0: true,
  },
  { title: "KL to the sampler", unit: "nats per token", metrics: ["learner/kl"] },
  { title: "Learning rate", unit: "", metrics: ["learner/lr"], from0: true },
  {
    title: "Goodput",
    unit: "share of sampled tokens that are trained",
    metrics: ["tokens/goodput"],
    from0: true,
    format: asPercent,
  },
  {
    title: "Staleness",
    unit: "weight versions; dashed: largest",
    metrics: ["rollout/staleness_mean", "rollout/staleness_max"],
    from0: true,
  },
  { title: "Time of a step", unit: "seconds", metrics: ["time/step_s"], from0: true },
];
const OWN = "a metric of the recipe's own";

/** The metrics that an address names. @param {string | undefined} text */
const namesIn = (text) => (text ? text.split(",").map(decodeURIComponent) : []);

/** @param {Context} context */
export async function learning({ run: shown, runs: open, chosen: numbers, query, set }) {
  const runs = numbers.map((number) => open[number]);
  const run = numbers.indexOf(shown);
  const rows = await Promise.all(numbers.map(metrics));
  if (rows.every(({ step }) => !step.length))
    return empty(
      "No rows yet",
      "metrics.jsonl gets its first row with the first evaluation or step.",
    );
  const axis = query.axis === "seconds" ? "seconds" : "step";
  const families = familiesOf(runs);
  const meansOnly = query.seeds === "mean" && families.length > 0;
  const names = [...new Set(rows.flatMap(({ values }) => Object.keys(values)))].sort();
  const meanings = Object.assign(
    {},
    ...(await Promise.all(numbers.map((number) => ask("meanings", { run: number })))),
  );
  const chosen = namesIn(query.charts).filter((name) => names.includes(name));

  /** @param {Curves} curves */
  const draw = (curves) =>
    card(
      null,
      chart({
        ...curves,
        series: meansOnly
          ? meanCurves(curves, rows, runs, families, axis)
          : runCurves(curves, rows, runs, axis),
        horizontal: axis === "seconds" ? "seconds of training" : "step",
        cursor: "learning",
        about: curves.metrics.map((name) => `${name}: ${meanings[name] ?? ""}`).join("\n"),
      }),
    );
  const known = CHARTS.filter(
    ({ metrics }, index) => index === 0 || metrics.some((name) => names.includes(name)),
  );
  return [
    card(
      null,
      toolbar(
        h("label", {}, "over"),
        choice(
          [
            ["step", "steps"],
            ["seconds", "seconds of training"],
          ],
          axis,
          (value) => set({ ...query, axis: value }),
        ),
        families.length
          ? [
              h("label", {}, "of"),
              choice(
                [
                  ["each", "each run"],
                  ["mean", "the mean of seeds"],
                ],
                meansOnly ? "mean" : "each",
                (value) => set({ ...query, seeds: value }),
              ),
            ]
          : null,
      ),
      metricSearch({
        meanings,
        chosen,
        initial: query.search ?? "",
        onchoose: (metrics, search) =>
          set({ ...query, search, charts: metrics.map(encodeURIComponent).join(",") }),
        ontype: (search) => {
          query.search = search; // a redrawn page has it too
          history.replaceState(null, "", `#/learning?${new URLSearchParams({ ...query })}`);
        },
      }),
    ),
    chosen.length
      ? h(
          "div",
          { class: "grid", id: "chosen" },
          chosen.map((name) => draw({ title: name, unit: meanings[name] ?? OWN, metrics: [name] })),
        )
      : null,
    runs.length > 1 ? comparison(rows, runs, run) : null,
    await byPosition(runs, numbers),
    h("div", { class: "grid", id: "curves" }, known.map(draw)),
  ];
}

/** @param {string} axis */
const horizontalOf = (axis) => (axis === "seconds" ? "time/train_total_s" : null);

/** Returns "accuracy" for "eval/accuracy". @param {string} metric */
const shortName = (metric) => metric.split("/").at(-1) ?? metric;

/**
 * @param {Curves} curves
 * @param {Metrics[]} rows by run
 * @param {Run[]} runs
 * @param {string} axis
 * @returns {Series[]}
 */
function runCurves({ metrics, interval, points }, rows, runs, axis) {
  const horizontal = horizontalOf(axis);
  return rows.flatMap((own, number) =>
    metrics.map((name, index) => {
      const { x, y } = curve(own, name, horizontal);
      const labels = [
        ...(runs.length > 1 ? [runs[number].name] : []),
        ...(metrics.length > 1 || runs.length === 1 ? [shortName(name)] : []),
      ];
      const ends =
        interval && x.length
          ? {
              low: column(own, interval[0], horizontal).y,
              high: column(own, interval[1], horizontal).y,
            }
          : {};
      return {
        label: labels.join(" "),
        x,
        y,
        paint: runColor(number),
        dash: dashes(number, index > 0),
        points,
        ...ends,
      };
    }),
  );
}

/**
 * @param {Curves} curves
 * @param {Metrics[]} rows by run
 * @param {Run[]} runs
 * @param {number[][]} families
 * @param {string} axis
 * @returns {Series[]}
 */
function meanCurves({ metrics }, rows, runs, families, axis) {
  return metrics.flatMap((name, index) =>
    families.map((family) => {
      const label = `${runs[family[0]].name} and ${family.length - 1} more`;
      return {
        label: metrics.length > 1 ? `${label} ${shortName(name)}` : label,
        ...meanOverSeeds(family.map((number) => column(rows[number], name, horizontalOf(axis)))),
        paint: runColor(family[0]),
        dash: dashes(family[0], index > 0),
      };
    }),
  );
}

/**
 * Shows at which positions learner and sampler differ, in the newest recorded step of each run.
 * @param {Run[]} runs
 * @param {number[]} numbers of the runs among those that are open
 */
async function byPosition(runs, numbers) {
  const answers = await Promise.all(
    runs.map(async ({ recorded }, run) => {
      const step = recorded.at(-1);
      if (step === undefined) return [];
      try {
        return [{ run, ...(await ask("tokens", { run: numbers[run], step })) }];
      } catch (error) {
        if (error instanceof Problem) return [];
        throw error;
      }
    }),
  );
  const known = answers.flat().filter(({ positions }) => positions.position.length);
  if (!known.length) return null;
  /** @param {"mismatch" | "entropy"} name */
  const curves = (name) =>
    known
      .map(({ run, step, positions }) => ({
        label: `${runs[run].name}, step ${step}`,
        x: positions.position,
        y: positions[name],
        paint: runColor(run),
        dash: dashes(run),
        points: true,
      }))
      .filter(({ y }) => y.some((value) => value !== null));
  const options = {
    horizontal: "sampled tokens before",
    height: 160,
    from0: true,
    cursor: "position",
  };
  return namedCard(
    "by-position",
    null,
    h(
      "div",
      { class: "two" },
      chart({
        title: "Mismatch by position",
        unit: "mean |learner − sampler|, same weights",
        series: curves("mismatch"),
        missing: "No recorded token was trained by the very weights that sampled it.",
        ...options,
      }),
      chart({
        title: "Entropy by position",
        unit: "nats per token",
        series: curves("entropy"),
        ...options,
      }),
    ),
  );
}

/**
 * Returns each set of several runs that differ only by their seed, as the numbers of the runs.
 * @param {Run[]} runs
 */
function familiesOf(runs) {
  const families = Map.groupBy(runs.keys(), (number) => runs[number].family);
  return [...families.values()].filter((members) => members.length > 1);
}

// The 95 % quantile of Student's t for 1 degree of freedom, 2, ...
const STUDENT = [12.71, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26];

/**
 * Returns the mean of several curves where all have a value, and its 95 % interval over the seeds.
 * @param {{ x: number[], y: number[] }[]} curves
 */
function meanOverSeeds(curves) {
  /** @type {Map<number, number[]>} */
  const values = new Map();
  for (const { x, y } of curves)
    x.forEach((at, index) => values.set(at, [...(values.get(at) ?? []), y[index]]));
  const rows = [...values]
    .filter(([, all]) => all.length === curves.length)
    .sort(([a], [b]) => a - b)
    .map(([x, all]) => {
      const y = mean(all);
      const variance = sum(all.map((value) => (value - y) ** 2)) / (all.length - 1);
      const half = (STUDENT[all.length - 2] ?? 1.96) * Math.sqrt(variance / all.length);
      return { x, y, low: y - half, high: y + half };
    });
  return {
    x: rows.map(({ x }) => x),
    y: rows.map(({ y }) => y),
    low: rows.map(({ low }) => low),
    high: rows.map(({ high }) => high),
  };
}

/**
 * @typedef {{
 *   step: number | null,
 *   accuracy: number | null,
 *   low: number | null,
 *   high: number | null,
 *   n: number | null,
 * }} Evaluation
 */

/** @type {Evaluation} */
const NOT_EVALUATED = { step: null, accuracy: null, low: null, high: null, n: null };

/**
 * Returns the evaluations of a run, ascending.
 * @param {Metrics} rows
 * @returns {Evaluation[]}
 */
function evaluationsOf({ step, values }) {
  return step.flatMap((at, row) => {
    /** @param {string} name */
    const value = (name) => values[`eval/${name}`]?.[row] ?? null;
    const accuracy = value("accuracy");
    if (accuracy === null) return [];
    const interval = { low: value("accuracy_low"), high: value("accuracy_high") };
    return [{ step: at, accuracy, ...interval, n: value("n") }];
  });
}

/**
 * Returns the newest evaluation of each run, beside the chosen one.
 * @param {Metrics[]} rows by run
 * @param {Run[]} runs
 * @param {number} chosen
 */
function comparison(rows, runs, chosen) {
  const evaluations = rows.map(evaluationsOf);
  const newest = evaluations.map((all, run) => ({ run, ...(all.at(-1) ?? NOT_EVALUATED) }));
  /** @param {Evaluation} row */
  const variance = ({ accuracy, n }) =>
    accuracy === null || n === null ? 0 : (accuracy * (1 - accuracy)) / n;
  /** @param {{ run: number, step: number | null }} row */
  const difference = ({ run, step }) => {
    if (run === chosen || !evaluations[run].length || !evaluations[chosen].length) return "–";
    const one = evaluations[run].findLast((own) => at(chosen, own.step));
    const two = one && at(chosen, one.step);
    if (!one || !two) return "no step in common";
    const spread = 1.96 * Math.sqrt(variance(one) + variance(two));
    const points = signed(100 * ((one.accuracy ?? 0) - (two.accuracy ?? 0)), 1);
    const isNewest = one.step === step && one.step === newest[chosen].step;
    const where = isNewest ? "" : `, both at step ${whole(one.step)}`;
    return `${points} ± ${fixed(100 * spread, 1)} points${where}`;
  };
  /** @param {number} run @param {number | null} step */
  const at = (run, step) => evaluations[run].findLast((one) => one.step === step);
  return namedCard(
    "comparison",
    "Newest evaluation of each run",
    h(
      "div",
      { class: "wide" },
      table(
        [
          {
            name: "run",
            cell: ({ run }) => [
              stroke({ paint: runColor(run), dash: dashes(run) }),
              ` ${runs[run].name}`,
            ],
          },
          {
            name: "step",
            number: true,
            cell: ({ step }) => whole(step),
          },
          { name: "accuracy", number: true, cell: ({ accuracy }) => percent(accuracy, 1) },
          {
            name: "95 % interval",
            number: true,
            cell: ({ low, high }) =>
              low === null ? "–" : `${percent(low, 1)} to ${percent(high, 1)}`,
          },
          { name: "n", number: true, cell: ({ n }) => whole(n) },
          { name: `difference to ${runs[chosen].name}`, number: true, cell: difference },
        ],
        newest,
      ),
    ),
    note(
      "A difference is that at the newest step that both runs evaluated. " +
        "Its 95 % interval treats the evaluations as independent. " +
        "If both runs answered the same problems, it is too wide, never too narrow.",
    ),
  );
}
