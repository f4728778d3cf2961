// Placement: how full each replica was, where each turn went and why, and what other policies would have done.

import { ask, exported, Problem, request } from "view/api";
import { chart } from "view/parts/charts";
import {
  card,
  empty,
  fixed,
  h,
  runColor,
  seconds,
  stepChooser,
  table,
  whole,
} from "view/parts/dom";
import { virtualList } from "view/parts/list";

export async function placement({ run, runs, words, set, go }) {
  const steps = runs[run].recorded;
  if (!steps.length)
    return [
      empty(
        "No placement is recorded of this run",
        "The decisions lie in record/steps. A run records itself unless record.max_mb=0.",
      ),
    ];
  const step = steps.includes(Number(words.step)) ? Number(words.step) : steps.at(-1);
  const found = await ask("placement", { run, step });
  const chooser = card(
    null,
    h(
      "div",
      { class: "toolbar" },
      stepChooser(steps, step, (value) => set({ ...words, step: value })),
      h("span", { class: "muted" }, `${whole(found.decisions.length)} decisions`),
    ),
  );
  return [
    chooser,
    await kvUse(run, runs, step, found),
    h("div", { class: "two" }, rules(found), counterfactual(run, step)),
    decisions(found, (one) => go("trajectory", { step, group: one.group, sample: one.sample })),
  ];
}

async function kvUse(run, runs, step, found) {
  if (!runs[run].timeline.includes(step))
    return card(
      "KV cache",
      empty("The timeline of this step is not kept", "KV use over time lies in record/timeline."),
    );
  const timeline = await ask("timeline", { run, first: step, last: step });
  const shift = timeline.started_at - found.started_at;
  const name = (replica) => `replica ${replica.node ? `${replica.node} ` : ""}${replica.replica}`;
  const engines = timeline.replicas.filter((replica) => replica.engine.at?.length);
  const curve = (column) =>
    engines.map((replica, number) => ({
      label: name(replica),
      x: replica.engine.at.map((at) => at + shift),
      y: replica.engine[column],
      paint: runColor(number),
      stepped: true,
    }));
  return h(
    "section",
    { class: "card", id: "kv" },
    h(
      "div",
      { class: "two" },
      chart({
        title: "KV blocks in use",
        unit: "seconds of the step",
        series: curve("used_blocks"),
        horizontal: "seconds",
        from0: true,
        cursor: "placement",
      }),
      chart({
        title: "Requests that run",
        unit: "largest of each moment",
        series: curve("running"),
        horizontal: "seconds",
        from0: true,
        cursor: "placement",
      }),
    ),
  );
}

function rules(found) {
  const rows = Object.entries(found.rules).map(([rule, count]) => {
    const theirs = found.decisions.filter((one) => one.rule === rule);
    const mean = (pick) => theirs.reduce((sum, one) => sum + pick(one), 0) / theirs.length;
    return {
      rule,
      count,
      headroom: mean((one) => one.headroom_blocks),
      waited: mean((one) => one.waited_s),
      cached: mean((one) => (one.input_tokens ? one.cached_tokens / one.input_tokens : 0)),
    };
  });
  return h(
    "section",
    { class: "card", id: "rules" },
    h("h2", {}, "By rule"),
    rows.length
      ? table(
          [
            { name: "rule", cell: (row) => row.rule },
            { name: "decisions", number: true, cell: (row) => whole(row.count) },
            { name: "blocks left, mean", number: true, cell: (row) => fixed(row.headroom, 1) },
            { name: "wait, mean", number: true, cell: (row) => seconds(row.waited) },
            {
              name: "input from cache",
              number: true,
              cell: (row) => `${fixed(100 * row.cached, 0)} %`,
            },
          ],
          rows,
        )
      : empty("No decisions", "The policy of this run recorded none."),
  );
}

function counterfactual(run, step) {
  const result = h(
    "div",
    { id: "rivals" },
    h(
      "p",
      { class: "muted" },
      "Runs the trajectories of this step, with their lengths and tool times, through the simulator under each policy.",
    ),
  );
  const button = h(
    "button",
    { disabled: exported, onclick: () => compare() },
    "run this step under other policies",
  );
  async function compare() {
    button.disabled = true;
    result.replaceChildren(h("p", { class: "muted" }, "simulating ..."));
    try {
      const found = await request("rivals", { run, step });
      result.replaceChildren(
        h("p", {}, h("b", {}, found.sentence)),
        h("p", {}, found.lever),
        table(
          [
            { name: "policy", cell: (row) => row.policy },
            { name: "seconds", number: true, cell: (row) => seconds(row.makespan_s) },
            { name: "to this run's", number: true, cell: (row) => `${fixed(row.ratio, 2)}x` },
            { name: "preemptions", number: true, cell: (row) => whole(row.preemptions) },
            {
              name: "tokens computed again",
              number: true,
              cell: (row) => whole(row.recomputed_tokens),
            },
          ],
          found.rows,
        ),
      );
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      result.replaceChildren(empty("No comparison", error.message));
    }
    button.disabled = false;
  }
  return h(
    "section",
    { class: "card", id: "counterfactual" },
    h("h2", {}, "Under other policies"),
    button,
    h("div", { style: { height: "8px" } }),
    result,
  );
}

const COLUMNS = "76px 150px 46px 66px 120px 96px 86px 86px 150px minmax(90px, 1fr)";

function decisions(found, onclick) {
  if (!found.decisions.length)
    return card("Decisions", empty("No decisions", "The policy of this run recorded none."));
  const names = [
    "at",
    "trajectory",
    "turn",
    "replica",
    "rule",
    "blocks left",
    "waited",
    "cached",
    "stay / go",
    "free blocks",
  ];
  const text = (one) => [
    [seconds(one.at_s), 1],
    [`group ${one.group} #${one.sample}`, 0],
    [String(one.turn), 1],
    [String(one.replica), 1],
    [one.rule, 0],
    [fixed(one.headroom_blocks, 1), 1],
    [seconds(one.waited_s), 1],
    [whole(one.cached_tokens), 1],
    [one.stay_s || one.go_s ? `${seconds(one.stay_s)} / ${seconds(one.go_s)}` : "–", 1],
    [
      Object.entries(one.free_blocks)
        .map(([replica, free]) => `${replica}: ${whole(free)}`)
        .join("  "),
      0,
    ],
  ];
  return h(
    "section",
    { class: "card" },
    h("h2", {}, "Decisions in their order"),
    h(
      "div",
      {
        class: "columns",
        style: { gridTemplateColumns: COLUMNS, padding: "0 6px 4px", gap: "18px" },
      },
      names.map((name, at) =>
        h("span", { class: [0, 2, 3, 5, 6, 7, 8].includes(at) ? "number" : null }, name),
      ),
    ),
    virtualList({
      id: "decisions",
      count: found.decisions.length,
      height: 23,
      view: 460,
      row: (index) =>
        h(
          "div",
          {
            class: "item clickable",
            style: { gridTemplateColumns: COLUMNS, padding: "0 6px", gap: "18px" },
            onclick: () => onclick(found.decisions[index]),
          },
          text(found.decisions[index]).map(([value, right]) =>
            h("span", { class: right ? "number" : null }, value),
          ),
        ),
    }),
  );
}
