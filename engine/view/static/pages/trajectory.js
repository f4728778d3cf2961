// Trajectory: the conversation with its tool calls and where each turn was generated; and its tokens, one by one.

import { ask, exported, Problem, request } from "view/api";
import {
  badge,
  card,
  choice,
  empty,
  fixed,
  h,
  number,
  percent,
  seconds,
  signed,
  tip,
  whole,
} from "view/parts/dom";
import { tokenView } from "view/parts/tokens";

export async function trajectory({ run, runs, words, set, go }) {
  const steps = [...new Set([...runs[run].recorded, ...runs[run].rollouts])].sort((a, b) => a - b);
  if (!steps.length)
    return [
      empty(
        "No trajectories are kept of this run",
        "They come from the recording (record/) or from rollouts/*.jsonl.",
      ),
    ];
  const step = steps.includes(Number(words.step)) ? Number(words.step) : steps.at(-1);
  const found = await ask("groups", { run, step });
  const all = found.groups.flatMap((group) =>
    group.trajectories.map((member) => [group.group, member.sample]),
  );
  const at =
    words.group === undefined
      ? interesting(found)
      : Math.max(
          0,
          all.findIndex(
            ([group, sample]) => group === Number(words.group) && sample === Number(words.sample),
          ),
        );
  const [group, sample] = all[at];
  const one = await ask("trajectory", { run, step, group, sample });
  const to = (index) => set({ step, group: all[index][0], sample: all[index][1] });
  const lineage = Math.min(Number(words.sequence ?? 0), one.sequences.length - 1);
  return [
    card(
      null,
      h(
        "div",
        { class: "toolbar" },
        h("button", { onclick: () => go("groups", { step }) }, "‹ groups of step ", String(step)),
        h(
          "button",
          { disabled: at === 0, onclick: () => to(at - 1), "aria-label": "trajectory before" },
          "‹",
        ),
        h("span", { class: "number" }, `${at + 1} of ${all.length}`),
        h(
          "button",
          {
            disabled: at === all.length - 1,
            onclick: () => to(at + 1),
            "aria-label": "trajectory after",
          },
          "›",
        ),
        h("span", { class: "mono" }, `${one.prompt_id} #${one.sample}`),
        one.kept ? badge("trained", "good") : badge(one.drop ?? "not chosen"),
        one.error ? badge(`${one.error[0]}: ${one.error[1]}`, "bad") : null,
        one.sequences.length > 1
          ? [
              h("label", {}, "sequence"),
              choice(
                one.sequences.map((_, index) => [index, String(index)]),
                lineage,
                (value) => set({ ...words, step, group, sample, sequence: value }),
              ),
            ]
          : null,
      ),
    ),
    facts(one),
    h(
      "section",
      { class: "card", id: "conversation" },
      h("h2", {}, "Conversation"),
      conversation(one, one.sequences[lineage], { run, step, group, sample, lineage }),
    ),
    tokenView(one, one.sequences[lineage], words.color ?? null, (value) =>
      set({ ...words, step, group, sample, color: value }),
    ),
  ];
}

/** Where nobody asked for one: the first that was trained and has the numbers of its tokens, else the first trained. */
function interesting(found) {
  const all = found.groups.flatMap((group) => group.trajectories.map((member) => [group, member]));
  const whole = all.findIndex(
    ([group, member]) => group.whole && member.kept && member.turns.length > 1,
  );
  return Math.max(0, whole >= 0 ? whole : all.findIndex(([, member]) => member.kept));
}

function facts(one) {
  const shown = [
    ["Reward", one.error ? "–" : fixed(one.reward), `expected ${one.expected || "–"}`],
    ["Advantage", signed(one.advantage, 3), one.kept ? "trained" : "not trained"],
    [
      "Chosen with",
      percent(one.reasons.probability),
      Object.entries(one.reasons)
        .filter(([name]) => name !== "probability")
        .map(([name, value]) => `${name} ${number(value)}`)
        .join(", ") || "no reasons recorded",
    ],
    [
      "Tokens",
      whole(one.sampled_tokens),
      one.prompt_tokens === undefined
        ? "sampled"
        : `sampled, after ${whole(one.prompt_tokens)} of the prompt`,
    ],
    ["End", one.stop, one.wall_s === undefined ? "" : `after ${seconds(one.wall_s)}`],
    [
      "Seed",
      one.seed === undefined ? "–" : String(one.seed),
      one.temperature === undefined ? "" : `temperature ${number(one.temperature)}`,
    ],
    ...Object.entries(one.scores).map(([name, value]) => [name, number(value), "score"]),
  ];
  return h(
    "div",
    { class: "figures" },
    shown.map(([name, value, note]) =>
      h(
        "div",
        { class: "figure" },
        h("div", { class: "name" }, name),
        h(
          "div",
          { class: "value", style: { fontSize: String(value).length > 12 ? "14px" : null } },
          value,
        ),
        h("div", { class: "note" }, note),
      ),
    ),
  );
}

function conversation(one, sequence, where) {
  const given = one.messages.map((message) =>
    h(
      "div",
      { class: "message given" },
      h("div", { class: "who" }, message.role),
      h("pre", {}, message.content),
    ),
  );
  if (one.sequences.every((other) => other.turns.length === 0) && one.text)
    return [...given, h("div", { class: "message" }, h("pre", {}, one.text))];
  return [...given, ...sequence.turns.map((turn, index) => turnView(turn, index, where))];
}

function turnView(turn, index, where) {
  const timed = turn.started_s !== undefined && turn.started_s !== null;
  const rate = timed
    ? (turn.end - turn.start) / Math.max(1e-9, turn.finished_s - turn.started_s)
    : null;
  return h(
    "div",
    { class: "message", "data-turn": index },
    h(
      "div",
      { class: "who" },
      h("b", {}, `turn ${index}`),
      h("span", {}, `${whole(turn.end - turn.start)} tokens`),
      timed
        ? h(
            "span",
            {},
            `${seconds(turn.started_s)} to ${seconds(turn.finished_s)}, ${whole(rate)} tokens/s`,
          )
        : null,
      timed ? badge(`replica ${turn.replica}`, "accent") : null,
      timed ? h("span", {}, `waited ${seconds(turn.started_s - turn.queued_s)}`) : null,
      timed
        ? h(
            "span",
            {},
            `${whole(turn.cached_tokens)} of ${whole(turn.start)} tokens from the prefix cache`,
          )
        : null,
      turn.truncated ? badge("cut off", "warn") : null,
    ),
    h("pre", {}, turn.text ?? "the text needs the run's tokenizer, which is not there"),
    turn.calls.map((call) => callView(call, turn)),
    turn.placed.length
      ? h(
          "div",
          { class: "muted", style: { marginTop: "8px", fontSize: "12.5px" } },
          turn.placed.map(placedText),
        )
      : null,
    where.lineage === 0 && turn.placed.length ? goOn(index, where) : null,
  );
}

/** Buttons that run the trajectory on from this turn, and what came of it beside what was recorded. */
function goOn(turn, where) {
  const result = h("div", { class: "go-on-result" });
  const buttons = [
    ["go on from here", {}],
    ["with another seed", { seed: 1 + Math.floor(Math.random() * 1e6) }],
    ["with the first weights", { start: 1 }],
  ].map(([name, words]) => h("button", { disabled: exported, onclick: () => run(words) }, name));
  async function run(words) {
    buttons.forEach((button) => {
      button.disabled = true;
    });
    result.replaceChildren(
      h("p", { class: "muted" }, "starting an engine, which takes some ten seconds ..."),
    );
    try {
      const { run, step, group, sample } = where;
      result.replaceChildren(
        beside(await request("go-on", { run, step, group, sample, turn, ...words })),
      );
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      result.replaceChildren(empty("It does not go on", error.message));
    }
    buttons.forEach((button) => {
      button.disabled = false;
    });
  }
  return h(
    "div",
    { class: "turn-actions", "data-actions-of-turn": turn },
    h("div", { class: "toolbar" }, buttons),
    result,
  );
}

function beside(found) {
  const same =
    found.first_difference === null
      ? "every token is the same"
      : `the same up to token ${whole(found.first_difference)}`;
  const side = (name, one) =>
    h(
      "div",
      {},
      h("b", {}, name),
      h("span", { class: "muted" }, ` ${one.error ?? one.stop}, ${whole(one.tokens)} tokens`),
      one.turns.map((turn) => [
        h("pre", {}, turn.text),
        turn.calls.map((call) =>
          h("pre", { class: "muted" }, `${call.name} (${call.outcome}): ${call.reply}`),
        ),
      ]),
    );
  return h(
    "div",
    {},
    h("p", {}, `${same}; weights ${found.weights}`),
    h(
      "div",
      { style: { display: "grid", gridTemplateColumns: "1fr 1fr", gap: "18px" } },
      side("recorded", found.recorded),
      side("now", found.again),
    ),
  );
}

function placedText(placed) {
  const free = Object.entries(placed.free_blocks)
    .map(([replica, blocks]) => `${replica}: ${whole(blocks)}`)
    .join(", ");
  const moved =
    placed.stay_s || placed.go_s
      ? `, ${seconds(placed.stay_s)} to stay against ${seconds(placed.go_s)} to go`
      : "";
  return h(
    "div",
    {},
    `placed on replica ${placed.replica} by rule `,
    h("b", {}, placed.rule),
    `, which would have ${whole(placed.headroom_blocks)} blocks left${moved}${free ? `; free blocks ${free}` : ""}`,
  );
}

function callView(call, turn) {
  const timed = call.dispatched_s !== undefined;
  const wrong = call.outcome !== "ok";
  return h(
    "details",
    { class: `call${wrong ? " wrong" : ""}` },
    h(
      "summary",
      {},
      h("b", {}, call.name),
      " ",
      badge(call.outcome, wrong ? "bad" : "good"),
      " ",
      timed
        ? `${seconds(call.finished_s - call.dispatched_s)}, ${seconds(call.overlap_s)} of it while the turn went on`
        : null,
      call.executed === false ? " refused" : null,
    ),
    timed ? overlap(call, turn) : null,
    h("h3", {}, "call"),
    h("pre", {}, program(call.arguments)),
    h("h3", {}, "what the model read"),
    h("pre", {}, call.reply),
  );
}

/** The turn and the call on one axis: what of the call ran while the model still wrote. */
function overlap(call, turn) {
  const from = Math.min(turn.started_s, call.dispatched_s);
  const length = Math.max(turn.finished_s, call.finished_s) - from || 1;
  const bar = (begin, end, paint, top) =>
    h("i", {
      style: {
        left: `${(100 * (begin - from)) / length}%`,
        width: `${(100 * (end - begin)) / length}%`,
        background: `var(--${paint})`,
        top,
        bottom: top === "0" ? "50%" : "0",
      },
    });
  const text = `turn ${seconds(turn.started_s)} to ${seconds(turn.finished_s)}\ncall ${seconds(call.dispatched_s)} to ${seconds(call.finished_s)}`;
  return h(
    "div",
    {
      class: "overlap",
      title: "above: the turn, below: the call",
      onmousemove: (event) => tip(event, text),
      onmouseleave: (event) => tip(event, ""),
    },
    bar(turn.started_s, turn.finished_s, "staleness_gate", "0"),
    bar(call.dispatched_s, call.finished_s, "tool_wait", "50%"),
  );
}

/** The code of a call of Python, else the arguments as they are. */
export function program(text) {
  try {
    const parsed = JSON.parse(text);
    if (typeof parsed?.code === "string")
      return parsed.input ? `${parsed.code}\n\n# input\n${parsed.input}` : parsed.code;
    return JSON.stringify(parsed, null, 2);
  } catch {
    return text;
  }
}
