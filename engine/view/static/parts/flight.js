// The rollouts that are under way now and those that ended last, for any page to place:
// await flight(run). It asks again by itself while it is on the page and the run goes on.

import { ask, exported, Problem } from "view/api";
import { color } from "view/parts/colors";
import { badge, empty, h, legend, namedCard, nodes, note, table } from "view/parts/dom";
import { fixed, seconds, sum, whole } from "view/parts/format";
import { keepingPlace } from "view/parts/keep";

/** @import { InFlight, RolloutEnded, RolloutUnderWay } from "view/answers" */
/** @import { Column } from "view/parts/dom" */

const AGAIN_MS = 2000;
const LATE_S = 10; // the run writes every two seconds

/**
 * The states of a rollout: the text, and the colour of the cause for which its replica may idle.
 * @type {Record<string, [text: string, paint: string]>}
 */
const STATES = {
  sampling: ["samples", "busy"],
  queued: ["waits for a replica", "kv_blocked"],
  "tool call": ["waits for a tool", "tool_wait"],
  agent: ["its agent works", "host"],
  grading: ["is graded", "reward"],
  starting: ["starts", "other"],
};

/**
 * Returns the panel of a run; null in an exported file, which has no rollouts in flight.
 * @param {number} run
 * @param {number[]} recorded steps of which trajectories can be opened
 */
export async function flight(run, recorded = []) {
  if (exported) return null;
  const panel = namedCard("flight", "Rollouts in flight");
  const place = h("div");
  panel.append(place);
  let asked = false;
  const look = async () => {
    if (asked && !panel.isConnected) return; // another page is open
    asked = true;
    let goesOn = true;
    if (!document.hidden) {
      try {
        const answer = await ask("in-flight", { run });
        goesOn = answer.state === "running";
        keepingPlace(place, () => place.replaceChildren(...nodes(content(answer, run, recorded))));
      } catch (error) {
        if (!(error instanceof Problem)) throw error;
        place.replaceChildren(empty("Nothing is known of rollouts in flight", error.message));
      }
    }
    if (goesOn) setTimeout(look, AGAIN_MS);
  };
  await look();
  return panel;
}

/**
 * @param {InFlight} answer
 * @param {number} run
 * @param {number[]} recorded
 */
function content(answer, run, recorded) {
  if (!answer.written)
    return [
      empty(
        "No rollout is known",
        answer.state === "running"
          ? "The run writes them once its training begins."
          : "The run has ended and wrote none: its training did not begin, or the file is gone.",
      ),
    ];
  const { state, age_s, counts, under_way, ended, now_at, elsewhere } = answer;
  const total = sum(Object.values(counts));
  const isLate = state === "running" && age_s > LATE_S;
  const states = Object.keys(STATES).filter((name) => counts[name]);
  return [
    h(
      "p",
      { id: "flight-total" },
      total
        ? h("b", {}, `${whole(total)} ${total === 1 ? "rollout" : "rollouts"}`)
        : "No rollout is under way.",
      state === "running" || !total ? null : " when the run ended",
      total > under_way.length ? `, of which the newest ${whole(under_way.length)} are listed` : "",
      isLate ? badge(`as of ${seconds(age_s)} ago: the run does not write`, "warn") : null,
    ),
    total
      ? [
          h(
            "div",
            { class: "flight-states", role: "img", "aria-label": statesText(states, counts) },
            states.map((name) =>
              h("i", { style: { flexGrow: String(counts[name]), background: paint(name) } }),
            ),
          ),
          legend(states.map((name) => [`${STATES[name][0]}: ${whole(counts[name])}`, paint(name)])),
        ]
      : null,
    elsewhere ? note("Rollouts on other machines of the run are not listed here.") : null,
    under_way.length
      ? scrolled("under way", table(underWay(now_at), under_way, "under-way"))
      : null,
    ended.length
      ? [
          h("h3", {}, "Ended last"),
          scrolled("ended last", table(justEnded(run, recorded), ended, "ended")),
        ]
      : null,
  ];
}

/** @param {string} label @param {HTMLElement} list */
const scrolled = (label, list) =>
  h(
    "div",
    {
      id: `${list.id}-list`,
      class: "scroll wide flight-list",
      tabindex: "0",
      role: "region",
      "aria-label": label,
    },
    list,
  );

/** @param {string} state */
const paint = (state) => color(STATES[state][1]) || color("other");

/** @param {string[]} states @param {Record<string, number>} counts */
const statesText = (states, counts) =>
  states.map((name) => `${STATES[name][0]}: ${whole(counts[name])}`).join(", ");

/** @param {{ step: number | null, group: number | null, sample: number }} rollout */
const place = ({ step, group, sample }) =>
  step === null ? `evaluation #${sample}` : `step ${step}, group ${group} #${sample}`;

/**
 * @param {number} now
 * @returns {Column<RolloutUnderWay>[]}
 */
const underWay = (now) => [
  { name: "rollout", cell: place },
  { name: "prompt", mono: true, cell: ({ prompt }) => prompt },
  {
    name: "state",
    key: ({ state }) => paint(state),
    cell: ({ state, since }) => `${STATES[state][0]}, ${seconds(Math.max(0, now - since))}`,
  },
  { name: "turn", number: true, cell: ({ turn }) => (turn ? whole(turn) : "–") },
  { name: "tokens", number: true, cell: ({ tokens }) => whole(tokens) },
  { name: "replica", number: true, cell: ({ replica }) => (replica < 0 ? "–" : String(replica)) },
  { name: "in all", number: true, cell: ({ began }) => seconds(Math.max(0, now - began)) },
];

/**
 * @param {number} run
 * @param {number[]} recorded
 * @returns {Column<RolloutEnded>[]}
 */
const justEnded = (run, recorded) => [
  {
    name: "rollout",
    cell: (rollout) => {
      const { step, group, sample } = rollout;
      if (step === null || !recorded.includes(step)) return place(rollout);
      const address = `#/trajectory?run=${run}&step=${step}&group=${group}&sample=${sample}`;
      return h("a", { href: address }, place(rollout));
    },
  },
  { name: "prompt", mono: true, cell: ({ prompt }) => prompt },
  { name: "ended by", cell: ({ stop }) => stop },
  {
    name: "reward",
    number: true,
    cell: ({ reward }) => fixed(reward, Number.isInteger(reward) ? 0 : 2),
  },
  { name: "turns", number: true, cell: ({ turns }) => whole(turns) },
  { name: "tokens", number: true, cell: ({ tokens }) => whole(tokens) },
  { name: "took", number: true, cell: ({ began, ended }) => seconds(ended - began) },
];
