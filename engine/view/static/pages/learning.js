// Learning: curves of one run, or of several over each other.

import { ask, column, curve, metrics, Problem } from "view/api";
import { chart } from "view/parts/charts";
import {
  card,
  choice,
  empty,
  fixed,
  h,
  percent,
  runColor,
  signed,
  table,
  whole,
} from "view/parts/dom";

const asPercent = (value) => percent(value, value < 0.1 ? 1 : 0);

// [title, unit, metrics of one chart, options]. Of several metrics the later ones are dashed.
const CHARTS = [
  [
    "Held-out accuracy",
    "95 % interval",
    ["eval/accuracy"],
    { interval: ["eval/accuracy_low", "eval/accuracy_high"], format: asPercent, points: true },
  ],
  ["Reward", "mean of a step's trajectories", ["reward"], {}],
  [
    "Response length",
    "sampled tokens per trajectory",
    ["rollout/response_tokens"],
    { from0: true },
  ],
  ["Groups without signal", "flat, of a step's groups", ["groups/flat"], { from0: true }],
  [
    "Tool errors",
    "share of calls; dashed: in correct trajectories",
    ["tools/error_share", "tools/error_share_correct"],
    { from0: true, format: asPercent },
  ],
  [
    "Use of tools",
    "share of trajectories with a call",
    ["tools/rate"],
    { from0: true, format: asPercent },
  ],
  [
    "Ends by length",
    "trajectories; dashed: by turns",
    ["stop/length", "stop/turns"],
    { from0: true },
  ],
  ["Entropy", "nats per token", ["learner/entropy"], { from0: true }],
  [
    "Clipped tokens",
    "share above; dashed: below",
    ["learner/clip_high", "learner/clip_low"],
    { from0: true },
  ],
  ["Gradient norm", "", ["learner/grad_norm"], { from0: true }],
  [
    "Sampler / learner mismatch",
    "largest difference of log-probability",
    ["learner/mismatch_max"],
    { from0: true },
  ],
  ["KL to the sampler", "nats per token", ["learner/kl"], {}],
  ["Learning rate", "", ["learner/lr"], { from0: true }],
  [
    "Goodput",
    "trained tokens of all sampled",
    ["tokens/goodput"],
    { from0: true, format: asPercent },
  ],
  [
    "Staleness",
    "weight versions; dashed: largest",
    ["rollout/staleness_mean", "rollout/staleness_max"],
    { from0: true },
  ],
  ["Time of a step", "seconds", ["time/step_s"], { from0: true }],
];
const DASHES = [undefined, [5, 4]];

export async function learning({ run, runs, words, set }) {
  const found = await Promise.all(runs.map((_, number) => metrics(number)));
  if (found.every((one) => !one.step.length))
    return [
      empty("No rows yet", "metrics.jsonl gets its first row with the first evaluation or step."),
    ];
  const axis = words.axis ?? "step";
  const horizontal = axis === "seconds" ? "time/train_total_s" : null;
  const families = familiesOf(runs);
  const means = words.seeds === "mean" && families.length > 0;
  const curves = (names, options) =>
    means
      ? names.flatMap((name, at) =>
          families.map((family) => ({
            label: [
              `${runs[family[0]].name} and ${family.length - 1} more`,
              names.length > 1 ? name.split("/").at(-1) : null,
            ]
              .filter(Boolean)
              .join(" "),
            ...mean(family.map((number) => column(found[number], name, horizontal))),
            paint: runColor(family[0]),
            dash: DASHES[at],
          })),
        )
      : found.flatMap((one, number) =>
          names.map((name, at) => {
            const { x, y } = curve(one, name, horizontal);
            const [low, high] = options.interval ?? [];
            return {
              label: [
                runs.length > 1 ? runs[number].name : null,
                names.length > 1 || runs.length === 1 ? name.split("/").at(-1) : null,
              ]
                .filter(Boolean)
                .join(" "),
              x,
              y,
              paint: runColor(number),
              dash: DASHES[at],
              points: options.points,
              ...(low && x.length
                ? { low: column(one, low, horizontal).y, high: column(one, high, horizontal).y }
                : {}),
            };
          }),
        );
  const draw = ([title, unit, names, options]) =>
    h(
      "section",
      { class: "card" },
      chart({
        title,
        unit,
        series: curves(names, options),
        horizontal: axis === "seconds" ? "seconds of training" : "step",
        cursor: "learning",
        from0: options.from0,
        ...(options.format ? { format: options.format } : {}),
      }),
    );
  const names = [...new Set(found.flatMap((one) => Object.keys(one.values)))].sort();
  const asked = words.metric && names.includes(words.metric) ? words.metric : null;
  return [
    card(
      null,
      h(
        "div",
        { class: "toolbar" },
        h("label", {}, "over"),
        choice(
          [
            ["step", "steps"],
            ["seconds", "seconds of training"],
          ],
          axis,
          (value) => set({ ...words, axis: value }),
        ),
        families.length
          ? [
              h("label", {}, "of"),
              choice(
                [
                  ["each", "each run"],
                  ["mean", "the mean of seeds"],
                ],
                means ? "mean" : "each",
                (value) => set({ ...words, seeds: value }),
              ),
            ]
          : null,
        h("label", { for: "metric" }, "any metric"),
        h("input", {
          id: "metric",
          list: "metrics",
          value: asked ?? "",
          placeholder: "such as learner/ratio_max",
          onchange: (event) => set({ ...words, metric: event.target.value }),
        }),
        h(
          "datalist",
          { id: "metrics" },
          names.map((name) => h("option", { value: name })),
        ),
      ),
    ),
    ...(runs.length > 1 ? [comparison(found, runs, run)] : []),
    ...(await byPosition(run, runs)),
    h(
      "div",
      { class: "grid", id: "curves" },
      [...(asked ? [[asked, "", [asked], {}]] : []), ...CHARTS]
        .filter(
          ([, , names], at) =>
            at === 0 || names.some((name) => found.some((one) => name in one.values)),
        )
        .map(draw),
    ),
  ];
}

/** Where in an answer learner and sampler differ, in the newest recorded step of each run. */
async function byPosition(run, runs) {
  const found = await Promise.all(
    runs.map(async (one, number) => {
      const step = one.recorded.at(-1);
      try {
        return step === undefined
          ? null
          : { number, ...(await ask("tokens", { run: number, step })) };
      } catch (error) {
        if (error instanceof Problem) return null;
        throw error;
      }
    }),
  );
  const there = found.filter((one) => one?.positions.position.length);
  if (!there.length) return [];
  const curves = (name) =>
    there.map((one) => ({
      label: `${runs[one.number].name}, step ${one.step}`,
      x: one.positions.position,
      y: one.positions[name],
      paint: runColor(one.number),
      points: true,
    }));
  const options = {
    horizontal: "sampled tokens before",
    height: 160,
    from0: true,
    cursor: "position",
  };
  return [
    h(
      "section",
      { class: "card", id: "by-position" },
      h(
        "div",
        { class: "two" },
        chart({
          title: "Mismatch by position",
          unit: "mean |learner − sampler| of the log-probability",
          series: curves("mismatch"),
          ...options,
        }),
        chart({
          title: "Entropy by position",
          unit: "nats per token",
          series: curves("entropy"),
          ...options,
        }),
      ),
    ),
  ];
}

/** Runs that differ by their seed only, where there are several: lists of their numbers. */
function familiesOf(runs) {
  const of = Map.groupBy(
    runs.map((one, number) => [one.family, number]),
    ([family]) => family,
  );
  return [...of.values()]
    .filter((members) => members.length > 1)
    .map((members) => members.map(([, number]) => number));
}

const STUDENT = [null, 12.71, 4.3, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]; // 95 %, by degrees of freedom

/** The mean of several curves where all have a value, and its 95 % interval over the seeds. */
function mean(curves) {
  const values = new Map();
  for (const { x, y } of curves)
    x.forEach((at, index) => values.set(at, [...(values.get(at) ?? []), y[index]]));
  const rows = [...values]
    .filter(([, all]) => all.length === curves.length)
    .sort((a, b) => a[0] - b[0]);
  const made = { x: [], y: [], low: [], high: [] };
  for (const [at, all] of rows) {
    const centre = all.reduce((sum, value) => sum + value, 0) / all.length;
    const spread = Math.sqrt(
      all.reduce((sum, value) => sum + (value - centre) ** 2, 0) / (all.length - 1) / all.length,
    );
    const half = (STUDENT[all.length - 1] ?? 1.96) * spread;
    made.x.push(at);
    made.y.push(centre);
    made.low.push(centre - half);
    made.high.push(centre + half);
  }
  return made;
}

/** The newest evaluation of each run, beside the one that is chosen. */
function comparison(found, runs, chosen) {
  const rows = found.map((one, number) => {
    const at = one.step.findLastIndex((_, row) => one.values["eval/accuracy"]?.[row] != null);
    const value = (name) => (at < 0 ? undefined : one.values[name]?.[at]);
    return {
      number,
      step: at < 0 ? undefined : one.step[at],
      accuracy: value("eval/accuracy"),
      low: value("eval/accuracy_low"),
      high: value("eval/accuracy_high"),
      n: value("eval/n"),
    };
  });
  const reference = rows[chosen];
  const difference = (row) => {
    if (row === reference || row.accuracy === undefined || reference.accuracy === undefined)
      return "–";
    const spread =
      1.96 *
      Math.sqrt(
        [row, reference].reduce((sum, one) => sum + (one.accuracy * (1 - one.accuracy)) / one.n, 0),
      );
    return `${signed(100 * (row.accuracy - reference.accuracy), 1)} ± ${fixed(100 * spread, 1)} points`;
  };
  return h(
    "section",
    { class: "card", id: "comparison" },
    h("h2", {}, "Newest evaluation of each run"),
    table(
      [
        { name: "run", cell: (row) => runs[row.number].name, key: (row) => runColor(row.number) },
        { name: "step", number: true, cell: (row) => whole(row.step) },
        { name: "accuracy", number: true, cell: (row) => percent(row.accuracy, 1) },
        {
          name: "95 % interval",
          number: true,
          cell: (row) =>
            row.low === undefined ? "–" : `${percent(row.low, 1)} to ${percent(row.high, 1)}`,
        },
        { name: "n", number: true, cell: (row) => whole(row.n) },
        { name: `difference to ${runs[chosen].name}`, number: true, cell: difference },
      ],
      rows,
    ),
    h(
      "p",
      { class: "muted" },
      "The difference's 95 % interval takes both evaluations as independent. Of runs that answered the same problems it is too wide, never too narrow.",
    ),
  );
}
