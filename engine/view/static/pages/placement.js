// The page Placement: how full each replica was, where each turn went and why, and what other
// policies would have done.

import { ask, Problem, request } from "view/api";
import { actions } from "view/parts/action";
import { chart } from "view/parts/charts";
import { runColor } from "view/parts/colors";
import { card, empty, h, namedCard, note, stepChooser, table, toolbar } from "view/parts/dom";
import { fixed, mean, percent, seconds, whole } from "view/parts/format";
import { virtualList } from "view/parts/list";
import { chosenStep, damage, freeBlocks, RECORDS, replicaName } from "view/parts/recorded";

/** @import { Decision, EngineSteps, Placement, ReplicaLane, Rivals } from "view/answers" */
/** @import { Run, Timeline } from "view/answers" */
/** @import { Context } from "view/main" */

const ROW = 23; // pixels
const FEW = 16; // replicas that have a curve each
const MOMENTS = 600; // of the curves of more replicas
const VIEW = 460;

/** @param {Context} context */
export async function placement({ run, runs, query, set, go }) {
  const steps = runs[run].recorded;
  if (!steps.length)
    return empty(
      "No placement of this run is recorded",
      `The decisions would be in record/steps. ${RECORDS}`,
    );
  const step = chosenStep(steps, query.step);
  const answer = await ask("placement", { run, step });
  const chooser = card(
    null,
    toolbar(
      stepChooser(steps, step, (value) => set({ ...query, step: value })),
      h("span", { class: "muted" }, `${whole(answer.count)} decisions`),
    ),
  );
  return [
    chooser,
    damage(answer.groups, answer.groups_written),
    await kvUse(run, runs[run], answer),
    rules(answer),
    counterfactual(run, step),
    await decisions(run, answer, ({ group, sample }) => go("trajectory", { step, group, sample })),
  ];
}

/**
 * @param {number} number
 * @param {Run} run
 * @param {Placement} placement
 */
async function kvUse(number, run, { step, started_at }) {
  if (!run.timeline.includes(step))
    return card(
      "KV cache",
      empty("The timeline of this step is not kept", "KV use would be in record/timeline."),
    );
  const timeline = await ask("timeline", { run: number, first: step, last: step });
  const shift = timeline.started_at - started_at;
  const { replicas } = timeline;
  /** @param {keyof EngineSteps} column */
  const curves = (column) =>
    replicas.length > FEW ? across(replicas, column, timeline, shift) : each(column);
  /** @param {keyof EngineSteps} column */
  const each = (column) =>
    replicas.map((replica, index) => ({
      label: replicaName(replica),
      x: (replica.engine.at ?? []).map((at) => at + shift),
      y: replica.engine[column] ?? [],
      paint: runColor(index),
      stepped: true,
    }));
  const options = { horizontal: "seconds", from0: true, cursor: "placement" };
  return namedCard(
    "kv",
    null,
    h(
      "div",
      { class: "two" },
      chart({
        title: "KV blocks in use",
        unit: "largest of each moment",
        series: curves("used_blocks"),
        ...options,
      }),
      chart({
        title: "Running requests",
        unit: "largest of each moment, by seconds of the step",
        series: curves("running"),
        ...options,
      }),
    ),
  );
}

/**
 * Returns the fullest, the mean and the emptiest of many replicas at each moment.
 * @param {ReplicaLane[]} replicas
 * @param {keyof EngineSteps} column
 * @param {Timeline} timeline
 * @param {number} shift
 */
function across(replicas, column, { seconds }, shift) {
  const x = Array.from({ length: MOMENTS + 1 }, (_, index) => (index * seconds) / MOMENTS);
  const values = replicas.map(({ engine }) => valuesAt(x, engine.at ?? [], engine[column] ?? []));
  /** @param {(all: number[]) => number} of */
  const over = (of) =>
    x.map((_, index) => {
      const known = values.map((own) => own[index]).filter((value) => value !== null);
      return known.length ? of(known) : null;
    });
  /** @param {string} label @param {(all: number[]) => number} of @param {number} paint */
  const curve = (label, of, paint) => ({
    label,
    x: x.map((at) => at + shift),
    y: over(of),
    paint: runColor(paint),
    stepped: true,
  });
  return [
    curve(`fullest of ${replicas.length} replicas`, (all) => Math.max(...all), 5),
    curve("mean", mean, 0),
    curve("emptiest", (all) => Math.min(...all), 2),
  ];
}

/**
 * Returns the newest value at each moment, null before the first.
 * @param {number[]} moments ascending
 * @param {number[]} at ascending
 * @param {number[]} values
 */
function valuesAt(moments, at, values) {
  let next = 0;
  return moments.map((moment) => {
    while (next < at.length && at[next] <= moment) next++;
    return next ? values[next - 1] : null;
  });
}

/** @param {Placement} placement */
function rules({ rules }) {
  return namedCard(
    "rules",
    "By rule",
    rules.length
      ? table(
          [
            { name: "rule", cell: ({ rule }) => rule },
            { name: "decisions", number: true, cell: ({ count }) => whole(count) },
            {
              name: "blocks left, mean",
              number: true,
              cell: ({ headroom_blocks }) => fixed(headroom_blocks, 1),
            },
            { name: "wait, mean", number: true, cell: ({ waited_s }) => seconds(waited_s) },
            { name: "input from cache", number: true, cell: ({ cached }) => percent(cached) },
          ],
          rules,
        )
      : noDecisions(),
  );
}

const noDecisions = () => empty("No decisions", "The policy of this run recorded none.");

/**
 * @param {number} run
 * @param {number} step
 */
function counterfactual(run, step) {
  const { buttons, result } = actions({
    choices: [
      {
        text: "run this step under other policies",
        act: async () => rivals(await request("rivals", { run, step })),
      },
    ],
    waiting: "simulating ...",
    failed: "The simulation failed",
  });
  result.append(
    note(
      "The simulator runs the trajectories of this step, with their lengths and tool times, " +
        "under each policy.",
    ),
  );
  result.id = "rivals";
  return namedCard("counterfactual", "Under other policies", toolbar(buttons), result);
}

/** @param {Rivals} answer */
function rivals({ sentence, lever, rows }) {
  return [
    h("p", {}, h("b", {}, sentence)),
    h("p", {}, lever),
    h(
      "div",
      { class: "sideways", tabindex: "0" },
      table(
        [
          { name: "policy", cell: ({ policy }) => policy },
          { name: "seconds", number: true, cell: ({ makespan_s }) => seconds(makespan_s) },
          { name: "times this run's", number: true, cell: ({ ratio }) => fixed(ratio, 2) },
          { name: "", cell: ({ verdict }) => verdict },
          { name: "preemptions", number: true, cell: ({ preemptions }) => whole(preemptions) },
          {
            name: "tokens computed again",
            number: true,
            cell: ({ recomputed_tokens }) => whole(recomputed_tokens),
          },
        ],
        rows,
      ),
    ),
  ];
}

/** Returns how long a turn waited for its place. @param {Decision} decision */
const waited = ({ queued_at, started_at }) => started_at - queued_at;

/**
 * startedAt: when the step began.
 * @type {{
 *   name: string,
 *   number: boolean,
 *   text: (decision: Decision, startedAt: number) => string,
 * }[]}
 */
const COLUMNS = [
  { name: "at", number: true, text: ({ at }, startedAt) => seconds(at - startedAt) },
  { name: "trajectory", number: false, text: ({ group, sample }) => `group ${group} #${sample}` },
  { name: "turn", number: true, text: ({ turn }) => String(turn) },
  { name: "replica", number: true, text: ({ replica }) => String(replica) },
  { name: "rule", number: false, text: ({ rule }) => rule },
  { name: "blocks left", number: true, text: ({ headroom_blocks }) => fixed(headroom_blocks, 1) },
  { name: "waited", number: true, text: (decision) => seconds(waited(decision)) },
  { name: "cached", number: true, text: ({ cached_tokens }) => whole(cached_tokens) },
  {
    name: "stay / go",
    number: true,
    text: ({ stay_s, go_s }) => (stay_s || go_s ? `${seconds(stay_s)} / ${seconds(go_s)}` : "–"),
  },
  { name: "free blocks", number: false, text: ({ free_blocks }) => freeBlocks(free_blocks, "  ") },
];

/**
 * Returns the list of decisions. Those in view are asked for, a page at a time.
 * @param {number} run
 * @param {Placement} placement
 * @param {(decision: Decision) => void} onclick
 */
async function decisions(run, { step, count, page, started_at }, onclick) {
  if (!count) return card("Decisions", noDecisions());
  /** @type {Map<number, Promise<Decision[]>>} */
  const pages = new Map();
  /** @param {number} number */
  const asked = (number) => {
    const known =
      pages.get(number) ??
      ask("decisions", { run, step, page: number }).then(
        ({ decisions }) => decisions,
        (error) => {
          if (error instanceof Problem) return []; // an exported file has the first pages only
          throw error;
        },
      );
    pages.set(number, known);
    return known;
  };
  const first = await asked(0);
  /** @param {HTMLElement} row @param {Decision | undefined} decision */
  const fill = (row, decision) => {
    if (!decision) return;
    row.addEventListener("click", () => onclick(decision));
    row.append(
      ...COLUMNS.map(({ number, text }) =>
        h("span", { class: number ? "number" : null }, text(decision, started_at)),
      ),
    );
  };
  return card(
    "Decisions in their order",
    h(
      "div",
      { class: "columns decisions" },
      COLUMNS.map(({ name, number }) => h("span", { class: number ? "number" : null }, name)),
    ),
    virtualList({
      id: "decisions",
      count,
      height: ROW,
      view: VIEW,
      row: (index) => {
        const row = h("div", { class: "item decisions clickable" });
        const number = Math.floor(index / page);
        if (number === 0) fill(row, first[index]);
        else asked(number).then((all) => fill(row, all[index % page]));
        return row;
      },
    }),
  );
}
