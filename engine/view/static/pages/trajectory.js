// The page Trajectory: the conversation with its tool calls, where each turn was generated, and
// each token.

import { ask, Problem, request } from "view/api";
import { actions } from "view/parts/action";
import {
  badge,
  card,
  choice,
  empty,
  figures,
  h,
  namedCard,
  outcomeBadge,
  toolbar,
  withTip,
} from "view/parts/dom";
import { fixed, number, percent, seconds, signed, whole } from "view/parts/format";
import { programOf } from "view/parts/program";
import {
  chosenStep,
  damage,
  freeBlocks,
  listed,
  RECORDS,
  sampledTokens,
} from "view/parts/recorded";
import { tokenView } from "view/parts/tokens";

/** @import { Part, Placed, ToolUse, Trajectory, Turn } from "view/answers" */
/** @import { Replay, ReplaySide } from "view/answers" */
/** @import { Context } from "view/main" */
/** @import { Child } from "view/parts/dom" */

/**
 * The position of a trajectory, with which a replay of it is asked for.
 * @typedef {{ run: number, step: number, group: number, sample: number }} Place
 */

/** @param {Context} context */
export async function trajectory({ run, runs, query, set, go }) {
  const steps = runs[run].recorded;
  if (!steps.length)
    return empty(
      "No trajectories of this run are recorded",
      `They would be in record/steps. ${RECORDS}`,
    );
  const step = chosenStep(steps, query.step);
  const groups = await ask("groups", { run, step });
  const all = groups.groups.flatMap(({ number, samples }) =>
    samples.map((sample) => ({ group: number, sample })),
  );
  const at = indexOf(all, query.group === undefined ? { ...groups.first, ...query } : query);
  const { group, sample } = all[at];
  const answer = await ask("trajectory", { run, step, group, sample });
  const chosen = Math.min(Number(query.part ?? 0), answer.parts.length - 1);
  const part = answer.parts[chosen];
  /** @param {number} index @param {string} label @param {string} text */
  const neighbour = (index, label, text) =>
    h(
      "button",
      {
        "aria-label": label,
        disabled: !(index in all),
        onclick: () => set({ step, ...all[index] }),
      },
      text,
    );
  return [
    card(
      null,
      toolbar(
        h("button", { onclick: () => go("groups", { step }) }, `‹ groups of step ${step}`),
        neighbour(at - 1, "trajectory before", "‹"),
        h("span", { class: "number" }, `${at + 1} of ${all.length}`),
        neighbour(at + 1, "trajectory after", "›"),
        h("span", { class: "mono" }, `${answer.prompt.id} #${sample}`),
        answer.kept ? badge("trained", "good") : badge(answer.drop ?? "not selected"),
        answer.error ? badge(`${answer.error.boundary}: ${answer.error.message}`, "bad") : null,
        answer.parts.length > 1
          ? [
              h("label", {}, "token sequence"),
              choice(
                answer.parts.map((_, index) => [index, String(index)]),
                chosen,
                (value) => set({ ...query, step, group, sample, part: value }),
              ),
            ]
          : null,
      ),
    ),
    damage(groups.groups.length, groups.groups_written),
    facts(answer),
    namedCard(
      "conversation",
      "Conversation",
      conversation(answer, part, chosen === 0 ? { run, step, group, sample } : null),
    ),
    tokenView(answer, part, query.color ?? null, (value) =>
      set({ ...query, step, group, sample, color: value }),
    ),
  ];
}

/**
 * Returns the index of the wanted trajectory, the first of its group if no sample is named, and the
 * first of all if nothing is. Throws Problem if it is not there.
 * @param {{ group: number, sample: number }[]} all
 * @param {{ group?: string | number, sample?: string | number }} wanted
 */
function indexOf(all, wanted) {
  if (wanted.group === undefined) return 0;
  const members = all.filter(({ group }) => group === Number(wanted.group));
  if (!members.length) {
    const groups = listed([...new Set(all.map(({ group }) => group))]);
    throw new Problem(`The step has no group ${wanted.group}. Its groups are: ${groups}.`);
  }
  const found =
    wanted.sample === undefined
      ? members[0]
      : members.find(({ sample }) => sample === Number(wanted.sample));
  if (!found) {
    const samples = listed(members.map(({ sample }) => sample));
    throw new Problem(
      `Group ${wanted.group} has no sample ${wanted.sample}. Its samples are: ${samples}.`,
    );
  }
  return all.indexOf(found);
}

/** @param {Trajectory} trajectory */
function facts(trajectory) {
  const { prompt, error, reward, advantage, kept, drop, reasons, scores, stop } = trajectory;
  const { started_at, finished_at, seed, temperature, parts } = trajectory;
  const others = Object.entries(reasons)
    .filter(([name]) => name !== "probability")
    .map(([name, value]) => `${name} ${number(value)}`);
  const [first] = parts[0].turns;
  const after = first ? `, after ${whole(first.start)} of the prompt` : "";
  /** @type {[name: string, value: string, note: string][]} */
  const named = Object.entries(scores).map(([name, value]) => [name, number(value), "score"]);
  return figures([
    ["Reward", error ? "–" : fixed(reward), `expected ${prompt.answer || "–"}`],
    ["Advantage", signed(advantage, 3), kept ? "trained" : "not trained"],
    [
      "Selection probability",
      drop ? "–" : percent(reasons.probability), // nothing is chosen in a dropped group
      others.join(", ") || "no reasons recorded",
    ],
    ["Tokens", whole(sampledTokens(parts.flatMap(({ turns }) => turns))), `sampled${after}`],
    ["End", stop, `after ${seconds(finished_at - started_at)}`],
    ["Seed", seed, `temperature ${number(temperature)}`],
    ...named,
  ]);
}

/**
 * @param {Trajectory} trajectory
 * @param {Part} part
 * @param {Place | null} place
 * @returns {Child[]}
 */
function conversation({ prompt, started_at }, part, place) {
  const given = prompt.messages.map(({ role, content }) =>
    h("div", { class: "message given" }, h("div", { class: "who" }, role), h("pre", {}, content)),
  );
  return [...given, ...part.turns.map((turn, index) => turnView(turn, index, started_at, place))];
}

/**
 * Returns "0.1 s to 0.4 s" for what happened between two moments of a trajectory.
 * @param {number} startedAt of the trajectory
 * @param {number} from
 * @param {number} to
 */
const between = (startedAt, from, to) =>
  `${seconds(from - startedAt)} to ${seconds(to - startedAt)}`;

/**
 * @param {Turn} turn
 * @param {number} index
 * @param {number} startedAt of the trajectory
 * @param {Place | null} place
 */
function turnView(turn, index, startedAt, place) {
  return h(
    "div",
    { class: "message", "data-turn": index },
    h(
      "div",
      { class: "who" },
      h("b", {}, `turn ${index}`),
      h("span", {}, `${whole(turn.end - turn.start)} tokens`),
      turnTimes(turn, startedAt),
      turn.truncated ? badge("cut off", "warn") : null,
    ),
    h("pre", {}, turn.text ?? "The text needs the run's tokenizer, which is missing."),
    turn.tool_uses.map((use) => useView(use, turn, startedAt)),
    h("div", { class: "placed" }, turn.placed.map(placedText)),
    place && turn.placed.length ? replayFrom(index, place) : null,
  );
}

/** @param {Turn} turn @param {number} startedAt */
function turnTimes(turn, startedAt) {
  const { start, end, queued_at, started_at, finished_at, replica, cached_tokens } = turn;
  const rate = (end - start) / Math.max(1e-9, finished_at - started_at);
  const times = between(startedAt, started_at, finished_at);
  return [
    h("span", {}, `${times}, ${whole(rate)} tokens/s`),
    badge(`replica ${replica}`, "accent"),
    h("span", {}, `waited ${seconds(started_at - queued_at)}`),
    h("span", {}, `${whole(cached_tokens)} of ${whole(start)} tokens from the prefix cache`),
  ];
}

/**
 * Returns buttons that sample the trajectory again from a turn on, and show the result beside the
 * recorded turns.
 * @param {number} turn
 * @param {Place} place
 */
function replayFrom(turn, place) {
  /** @param {Record<string, number>} options */
  const replay = async (options = {}) =>
    beside(await request("replay", { ...place, turn, ...options }));
  const { buttons, result } = actions({
    choices: [
      { text: "replay from here", act: () => replay() },
      {
        text: "with another seed",
        act: () => replay({ seed: 1 + Math.floor(Math.random() * 1e6) }),
      },
      { text: "with the initial weights", act: () => replay({ start: 1 }) },
    ],
    waiting: "Starting an engine, which takes about ten seconds ...",
    failed: "Replay failed",
  });
  return h(
    "div",
    { class: "turn-actions", "data-actions-of-turn": turn },
    toolbar(buttons),
    result,
  );
}

/** @param {Replay} replay */
function beside({ first_difference, weights, recorded, again }) {
  const same =
    first_difference === null
      ? "Every token is the same"
      : `The tokens differ from number ${whole(first_difference)} on`;
  /** @param {string} name @param {ReplaySide} replayed */
  const side = (name, { error, stop, tokens, turns }) =>
    h(
      "div",
      {},
      h("b", {}, name),
      h("span", { class: "muted" }, ` ${error ?? stop}, ${whole(tokens)} tokens`),
      turns.map(({ text, tool_uses }) => [
        h("pre", {}, text),
        tool_uses.map(({ name, outcome, response }) =>
          h("pre", { class: "muted" }, `${name} (${outcome}): ${response}`),
        ),
      ]),
    );
  return [
    h("p", {}, `${same}; weights: ${weights}`),
    h("div", { class: "two" }, side("recorded", recorded), side("replayed", again)),
  ];
}

/** @param {Placed} placed */
function placedText({ replica, rule, headroom_blocks, stay_s, go_s, free_blocks }) {
  const free = freeBlocks(free_blocks);
  const parts = [
    `, which would have ${whole(headroom_blocks)} blocks left`,
    stay_s || go_s ? `; estimated rest ${seconds(go_s)}, without the move ${seconds(stay_s)}` : "",
    free ? `; free blocks ${free}` : "",
  ];
  return h("div", {}, `placed on replica ${replica} by rule `, h("b", {}, rule), parts.join(""));
}

/**
 * @param {ToolUse} use
 * @param {Turn} turn
 * @param {number} startedAt of the trajectory
 */
function useView(use, turn, startedAt) {
  const took = seconds(use.finished_at - use.dispatched_at);
  return h(
    "details",
    { class: use.outcome === "ok" ? "call" : "call wrong" },
    h(
      "summary",
      {},
      h("b", {}, use.name),
      " ",
      outcomeBadge(use.outcome),
      ` ${took}${queueText(use)}, ${seconds(use.overlap_s)} during the turn`,
      use.executed ? null : " refused",
    ),
    overlap(use, turn, startedAt),
    h("h3", {}, "call"),
    h("pre", {}, programOf(use.arguments)),
    h("h3", {}, "what the model read"),
    h("pre", {}, use.response),
  );
}

/** Returns ", 40 ms of it in the queue" for a call that measured it. @param {ToolUse} use */
const queueText = ({ queue_s }) =>
  queue_s === null ? "" : `, ${seconds(queue_s)} of it in the queue`;

/**
 * Shows the turn and the call on one axis, and so how much of the call ran while the model wrote.
 * @param {ToolUse} use
 * @param {Turn} turn
 * @param {number} startedAt of the trajectory
 */
function overlap({ dispatched_at, finished_at }, turn, startedAt) {
  const from = Math.min(turn.started_at, dispatched_at);
  const length = Math.max(turn.finished_at, finished_at) - from || 1;
  /** @param {string} kind @param {number} begin @param {number} end */
  const bar = (kind, begin, end) =>
    h("i", {
      class: kind,
      style: {
        left: `${(100 * (begin - from)) / length}%`,
        width: `${(100 * (end - begin)) / length}%`,
      },
    });
  const text =
    `turn ${between(startedAt, turn.started_at, turn.finished_at)}\n` +
    `call ${between(startedAt, dispatched_at, finished_at)}`;
  return h(
    "div",
    { class: "overlap", title: "above: the turn, below: the call", ...withTip(text) },
    bar("turn", turn.started_at, turn.finished_at),
    bar("tool", dispatched_at, finished_at),
  );
}
