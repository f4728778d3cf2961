// Trajectory: the conversation with its tool calls and where each turn was generated, and its
// tokens one by one.

import { ask, request } from "view/api";
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
import { chosenStep, freeBlocks, groupSteps } from "view/parts/recorded";
import { tokenView } from "view/parts/tokens";

/** @import { Call, Groups, Placed, Sequence, Trajectory, Turn } from "view/answers" */
/** @import { Replay, Told } from "view/answers" */
/** @import { Context } from "view/main" */
/** @import { Child } from "view/parts/dom" */

/**
 * Where a trajectory is: what a replay of it is asked with.
 * @typedef {{ run: number, step: number, group: number, sample: number }} Place
 */

/** @param {Context} context */
export async function trajectory({ run, runs, query, set, go }) {
  const steps = groupSteps(runs[run]);
  if (!steps.length)
    return empty(
      "No trajectories are kept of this run",
      "They come from the recording (record/) or from rollouts/*.jsonl.",
    );
  const step = chosenStep(steps, query.step);
  const groups = await ask("groups", { run, step });
  const all = groups.groups.flatMap(({ group, trajectories }) =>
    trajectories.map(({ sample }) => ({ group, sample })),
  );
  const at = query.group === undefined ? interesting(groups) : indexOf(all, query);
  const { group, sample } = all[at];
  const answer = await ask("trajectory", { run, step, group, sample });
  const chosen = Math.min(Number(query.sequence ?? 0), answer.sequences.length - 1);
  const sequence = answer.sequences[chosen];
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
        h("span", { class: "mono" }, `${answer.prompt_id} #${sample}`),
        answer.kept ? badge("trained", "good") : badge(answer.drop ?? "not chosen"),
        answer.error ? badge(`${answer.error[0]}: ${answer.error[1]}`, "bad") : null,
        answer.sequences.length > 1
          ? [
              h("label", {}, "sequence"),
              choice(
                answer.sequences.map((_, index) => [index, String(index)]),
                chosen,
                (value) => set({ ...query, step, group, sample, sequence: value }),
              ),
            ]
          : null,
      ),
    ),
    facts(answer),
    namedCard(
      "conversation",
      "Conversation",
      conversation(answer, sequence, chosen === 0 ? { run, step, group, sample } : null),
    ),
    tokenView(answer, sequence, query.color ?? null, (value) =>
      set({ ...query, step, group, sample, color: value }),
    ),
  ];
}

/**
 * @param {{ group: number, sample: number }[]} all
 * @param {Record<string, string>} query
 */
function indexOf(all, { group, sample }) {
  const index = all.findIndex(
    (one) => one.group === Number(group) && one.sample === Number(sample),
  );
  return Math.max(0, index);
}

/**
 * Returns the trajectory to show where the address names none: the first that was trained in
 * several turns and has the numbers of its tokens, else the first that was trained.
 * @param {Groups} groups
 */
function interesting({ groups }) {
  const all = groups.flatMap(({ whole, trajectories }) =>
    trajectories.map(({ kept, turns }) => ({ whole, kept, turns: turns.length })),
  );
  const best = all.findIndex(({ whole, kept, turns }) => whole && kept && turns > 1);
  return Math.max(0, best >= 0 ? best : all.findIndex(({ kept }) => kept));
}

/** @param {Trajectory} trajectory */
function facts(trajectory) {
  const { error, reward, advantage, kept, reasons, scores, stop, seed } = trajectory;
  const { prompt_tokens, sampled_tokens, wall_s, temperature } = trajectory;
  const others = Object.entries(reasons)
    .filter(([name]) => name !== "probability")
    .map(([name, value]) => `${name} ${number(value)}`);
  const after = prompt_tokens === undefined ? "" : `, after ${whole(prompt_tokens)} of the prompt`;
  /** @type {[name: string, value: string, note: string][]} */
  const named = Object.entries(scores).map(([name, value]) => [name, number(value), "score"]);
  return figures([
    ["Reward", error ? "–" : fixed(reward), `expected ${trajectory.expected || "–"}`],
    ["Advantage", signed(advantage, 3), kept ? "trained" : "not trained"],
    ["Chosen with", percent(reasons.probability), others.join(", ") || "no reasons recorded"],
    ["Tokens", whole(sampled_tokens), `sampled${after}`],
    ["End", stop, wall_s === undefined ? "" : `after ${seconds(wall_s)}`],
    ["Seed", seed ?? "–", temperature === undefined ? "" : `temperature ${number(temperature)}`],
    ...named,
  ]);
}

/**
 * @param {Trajectory} trajectory
 * @param {Sequence} sequence
 * @param {Place | null} place
 * @returns {Child[]}
 */
function conversation({ messages, sequences, text }, sequence, place) {
  const given = messages.map(({ role, content }) =>
    h("div", { class: "message given" }, h("div", { class: "who" }, role), h("pre", {}, content)),
  );
  if (text && sequences.every(({ turns }) => !turns.length))
    return [...given, h("div", { class: "message" }, h("pre", {}, text))];
  return [...given, ...sequence.turns.map((turn, index) => turnView(turn, index, place))];
}

/**
 * @param {Turn} turn
 * @param {number} index
 * @param {Place | null} place
 */
function turnView(turn, index, place) {
  return h(
    "div",
    { class: "message", "data-turn": index },
    h(
      "div",
      { class: "who" },
      h("b", {}, `turn ${index}`),
      h("span", {}, `${whole(turn.end - turn.start)} tokens`),
      turnTimes(turn),
      turn.truncated ? badge("cut off", "warn") : null,
    ),
    h("pre", {}, turn.text ?? "The text needs the run's tokenizer, which is missing."),
    turn.calls.map((call) => callView(call, turn)),
    h("div", { class: "placed" }, turn.placed.map(placedText)),
    place && turn.placed.length ? replayFrom(index, place) : null,
  );
}

/** @param {Turn} turn */
function turnTimes({ start, end, queued_s, started_s, finished_s, replica, cached_tokens }) {
  if (started_s === undefined || finished_s === undefined || queued_s === undefined) return null;
  const rate = (end - start) / Math.max(1e-9, finished_s - started_s);
  return [
    h("span", {}, `${seconds(started_s)} to ${seconds(finished_s)}, ${whole(rate)} tokens/s`),
    badge(`replica ${replica}`, "accent"),
    h("span", {}, `waited ${seconds(started_s - queued_s)}`),
    h("span", {}, `${whole(cached_tokens)} of ${whole(start)} tokens from the prefix cache`),
  ];
}

/**
 * Returns buttons that run the trajectory again from a turn on, and the result beside what was
 * recorded.
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
      { text: "with the first weights", act: () => replay({ start: 1 }) },
    ],
    waiting: "An engine starts, which takes some ten seconds ...",
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
  /** @param {string} name @param {Told} told */
  const side = (name, { error, stop, tokens, turns }) =>
    h(
      "div",
      {},
      h("b", {}, name),
      h("span", { class: "muted" }, ` ${error ?? stop}, ${whole(tokens)} tokens`),
      turns.map(({ text, calls }) => [
        h("pre", {}, text),
        calls.map(({ name, outcome, reply }) =>
          h("pre", { class: "muted" }, `${name} (${outcome}): ${reply}`),
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
    stay_s || go_s ? `, ${seconds(stay_s)} to stay against ${seconds(go_s)} to go` : "",
    free ? `; free blocks ${free}` : "",
  ];
  return h("div", {}, `placed on replica ${replica} by rule `, h("b", {}, rule), parts.join(""));
}

/**
 * @param {Call} call
 * @param {Turn} turn
 */
function callView(call, turn) {
  return h(
    "details",
    { class: call.outcome === "ok" ? "call" : "call wrong" },
    h(
      "summary",
      {},
      h("b", {}, call.name),
      " ",
      outcomeBadge(call.outcome),
      callTimes(call),
      call.executed === false ? " refused" : null,
    ),
    overlap(call, turn),
    h("h3", {}, "call"),
    h("pre", {}, programOf(call.arguments)),
    h("h3", {}, "what the model read"),
    h("pre", {}, call.reply),
  );
}

/** @param {Call} call */
function callTimes({ dispatched_s, finished_s, overlap_s }) {
  if (dispatched_s === undefined || finished_s === undefined) return null;
  return ` ${seconds(finished_s - dispatched_s)}, ${seconds(overlap_s)} during the turn`;
}

/**
 * Returns the turn and the call on one axis: what of the call ran while the model still wrote.
 * @param {Call} call
 * @param {Turn} turn
 */
function overlap({ dispatched_s, finished_s }, turn) {
  if (dispatched_s === undefined || finished_s === undefined) return null;
  if (turn.started_s === undefined || turn.finished_s === undefined) return null;
  const from = Math.min(turn.started_s, dispatched_s);
  const length = Math.max(turn.finished_s, finished_s) - from || 1;
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
    `turn ${seconds(turn.started_s)} to ${seconds(turn.finished_s)}\n` +
    `call ${seconds(dispatched_s)} to ${seconds(finished_s)}`;
  return h(
    "div",
    { class: "overlap", title: "above: the turn, below: the call", ...withTip(text) },
    bar("turn", turn.started_s, turn.finished_s),
    bar("tool", dispatched_s, finished_s),
  );
}
