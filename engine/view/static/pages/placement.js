// The page Placement: how full each replica was, where each turn went and why, and what other
// policies would have done.

import { ask, request } from "view/api";
import { actions } from "view/parts/action";
import { chart } from "view/parts/charts";
import { runColor } from "view/parts/colors";
import { card, empty, h, namedCard, note, stepChooser, table, toolbar } from "view/parts/dom";
import { fixed, mean, percent, seconds, whole } from "view/parts/format";
import { virtualList } from "view/parts/list";
import { chosenStep, freeBlocks, RECORDS, replicaName } from "view/parts/recorded";

/** @import { Decision, EngineSteps, Placement, Rivals, Run } from "view/answers" */
/** @import { Context } from "view/main" */

const ROW = 23; // pixels
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
      h("span", { class: "muted" }, `${whole(answer.decisions.length)} decisions`),
    ),
  );
  return [
    chooser,
    await kvUse(run, runs[run], answer),
    h("div", { class: "two" }, rules(answer), counterfactual(run, step)),
    decisions(answer, ({ group, sample }) => go("trajectory", { step, group, sample })),
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
  /** @param {keyof EngineSteps} column */
  const curves = (column) =>
    timeline.replicas.map((replica, index) => ({
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
        unit: "seconds of the step",
        series: curves("used_blocks"),
        ...options,
      }),
      chart({
        title: "Running requests",
        unit: "largest of each moment",
        series: curves("running"),
        ...options,
      }),
    ),
  );
}

/** @param {Placement} placement */
function rules({ rules, decisions }) {
  const rows = Object.entries(rules).map(([rule, count]) => {
    const own = decisions.filter((decision) => decision.rule === rule);
    return {
      rule,
      count,
      headroom: mean(own.map(({ headroom_blocks }) => headroom_blocks)),
      waited: mean(own.map(waited)),
      cached: mean(own.map(({ cached_tokens, start }) => cached_tokens / Math.max(1, start))),
    };
  });
  return namedCard(
    "rules",
    "By rule",
    rows.length
      ? table(
          [
            { name: "rule", cell: ({ rule }) => rule },
            { name: "decisions", number: true, cell: ({ count }) => whole(count) },
            { name: "blocks left, mean", number: true, cell: ({ headroom }) => fixed(headroom, 1) },
            { name: "wait, mean", number: true, cell: ({ waited }) => seconds(waited) },
            { name: "input from cache", number: true, cell: ({ cached }) => percent(cached) },
          ],
          rows,
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
 * @param {Placement} placement
 * @param {(decision: Decision) => void} onclick
 */
function decisions({ decisions, started_at }, onclick) {
  if (!decisions.length) return card("Decisions", noDecisions());
  return card(
    "Decisions in their order",
    h(
      "div",
      { class: "columns decisions" },
      COLUMNS.map(({ name, number }) => h("span", { class: number ? "number" : null }, name)),
    ),
    virtualList({
      id: "decisions",
      count: decisions.length,
      height: ROW,
      view: VIEW,
      row: (index) =>
        h(
          "div",
          { class: "item decisions clickable", onclick: () => onclick(decisions[index]) },
          COLUMNS.map(({ number, text }) =>
            h("span", { class: number ? "number" : null }, text(decisions[index], started_at)),
          ),
        ),
    }),
  );
}
