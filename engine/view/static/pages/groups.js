// Groups: the rollouts of each prompt, what they were worth, and which of them were chosen for
// training.

import { ask } from "view/api";
import { color } from "view/parts/colors";
import {
  badge,
  card,
  choice,
  empty,
  figures,
  h,
  legend,
  note,
  spread,
  stepChooser,
  toolbar,
  withTip,
} from "view/parts/dom";
import { fixed, mean, percent, seconds, signed, sum, whole } from "view/parts/format";
import { virtualList } from "view/parts/list";
import { chosenStep, groupSteps, RECORDS } from "view/parts/recorded";

/** @import { Group, Groups, Member } from "view/answers" */
/** @import { Context } from "view/main" */

/** @typedef {"tokens" | "seconds"} Scale */

const ROW = 24; // pixels
const VIEW = 680;

/** @type {Record<string, { text: string, fits: (member: Member) => boolean }>} */
const FILTERS = {
  all: { text: "all", fits: () => true },
  kept: { text: "trained", fits: ({ kept }) => kept },
  dropped: { text: "not trained", fits: ({ kept }) => !kept },
  wrong: {
    text: "with a tool error",
    fits: ({ turns }) => turns.some(({ calls }) => calls.some(([outcome]) => outcome !== "ok")),
  },
  cut: { text: "cut off", fits: ({ stop }) => stop !== "answer" },
  failed: { text: "failed", fits: ({ error }) => error !== null },
};

/** @param {Context} context */
export async function groups({ run, runs, query, set, go }) {
  const steps = groupSteps(runs[run]);
  if (!steps.length)
    return empty(
      "No groups are kept of this run",
      `They come from the recording (record/) or from rollouts/*.jsonl. ${RECORDS}`,
    );
  const step = chosenStep(steps, query.step);
  const answer = await ask("groups", { run, step });
  const filter = query.filter in FILTERS ? query.filter : "all";
  const hasTimes = answer.source === "recording";
  const scale = query.scale === "seconds" && hasTimes ? "seconds" : "tokens";
  const chooser = card(
    null,
    toolbar(
      stepChooser(steps, step, (value) => set({ ...query, step: value })),
      h("label", {}, "show"),
      choice(
        Object.entries(FILTERS).map(([name, { text }]) => [name, text]),
        filter,
        (value) => set({ ...query, filter: value }),
      ),
      h("label", {}, "bars in"),
      choice(
        hasTimes ? ["tokens", "seconds"].map((name) => [name, name]) : [["tokens", "tokens"]],
        scale,
        (value) => set({ ...query, scale: value }),
      ),
    ),
  );
  /** @param {Group} group @param {Member} member */
  const open = (group, member) =>
    go("trajectory", { step, group: group.group, sample: member.sample });
  return [chooser, overview(answer), memberList(answer, FILTERS[filter].fits, scale, open)];
}

/** @param {Groups} answer */
function overview({ groups }) {
  const everyone = groups.flatMap(({ trajectories }) => trajectories);
  const kept = everyone.filter((member) => member.kept);
  /** @param {Member[]} members */
  const meanReward = (members) => {
    const rewards = members.map(({ reward }) => reward).filter((reward) => reward !== null);
    return fixed(rewards.length ? mean(rewards) : null, 3);
  };
  /** @param {Member[]} members */
  const tokens = (members) => whole(sum(members.map((member) => member.tokens)));
  /** @param {string} reason */
  const dropped = (reason) => whole(groups.filter(({ drop }) => drop === reason).length);
  /** @type {Record<string, number>} */
  const waste = {};
  for (const group of groups)
    for (const [reason, count] of Object.entries(group.waste))
      waste[reason] = (waste[reason] ?? 0) + count;
  const reasons = Object.entries(waste).map(([reason, count]) => `${reason} ${whole(count)}`);
  return figures([
    ["Groups", whole(groups.length), `${dropped("flat")} flat, ${dropped("error")} failed`],
    ["Trained", whole(kept.length), `of ${whole(everyone.length)} trajectories`],
    ["Mean reward", meanReward(everyone), `${meanReward(kept)} of the trained`],
    ["Trained tokens", tokens(kept), `of ${tokens(everyone)} sampled`],
    [
      "Cancelled or refilled",
      whole(sum(Object.values(waste))),
      reasons.length ? reasons.join(", ") : "tokens",
    ],
  ]);
}

/**
 * @param {Groups} answer
 * @param {(member: Member) => boolean} fits
 * @param {Scale} scale
 * @param {(group: Group, member: Member) => void} open
 */
function memberList({ groups, source }, fits, scale, open) {
  const longest = Math.max(
    1,
    ...groups.flatMap(({ trajectories }) => trajectories.map((member) => extent(member, scale))),
  );
  const filled = groups
    .map((group) => ({ group, members: group.trajectories.filter(fits) }))
    .filter(({ members }) => members.length);
  const rows = filled.flatMap(({ group, members }) => [
    () => groupRow(group),
    ...members.map(
      (member) => () => memberRow(group, member, scale, longest, () => open(group, member)),
    ),
  ]);
  const length = scale === "tokens" ? whole(longest) : seconds(longest);
  /** @type {[name: string, isNumber: boolean][]} */
  const columns = [
    ["#", false],
    [`length, ${scale} (longest ${length})`, false],
    ["tokens", true],
    ["reward", true],
    ["", false],
    ["p_err", true],
    ["p_format", true],
    ["probability", true],
    ["advantage", true],
    ["end", false],
  ];
  return card(
    null,
    spread(
      h(
        "h2",
        {},
        `${whole(rows.length - filled.length)} trajectories in ${whole(filled.length)} groups`,
      ),
      legend([
        ["turn", color("staleness_gate")],
        ["tool call", color("good")],
        ["tool error", color("bad")],
        ...(scale === "seconds" ? [waiting()] : []),
      ]),
    ),
    h(
      "div",
      { class: "columns members" },
      columns.map(([name, isNumber]) => h("span", { class: isNumber ? "number" : null }, name)),
    ),
    rows.length
      ? virtualList({
          id: "groups",
          count: rows.length,
          height: ROW,
          view: VIEW,
          row: (index) => rows[index](),
        })
      : empty("None here", "No trajectory of this step fits the filter."),
    source === "rollouts"
      ? note("Times and the selector's reasons are in a recording (record/) only.")
      : null,
  );
}

/** @returns {[text: string, paint: string]} */
const waiting = () => ["waits for a tool", color("tool_wait")];

/**
 * @param {Member} member
 * @param {Scale} scale
 */
function extent({ tokens, turns }, scale) {
  if (scale === "tokens") return tokens;
  return Math.max(
    0,
    ...turns.flatMap(({ finished_s, calls }) => [
      finished_s ?? 0,
      ...calls.map(([, , finished_s]) => finished_s ?? 0),
    ]),
  );
}

/** @param {Group} group */
function groupRow({ group, prompt_id, question, trajectories, drop, node }) {
  const rewards = trajectories.map(({ reward }) => reward).filter((reward) => reward !== null);
  const kept = trajectories.filter((member) => member.kept).length;
  return h(
    "div",
    { class: "item head group", "data-group": group },
    h("span", { class: "mono" }, prompt_id),
    h("span", { class: "muted", title: question }, question),
    h("span", { class: "number" }, `mean reward ${fixed(rewards.length ? mean(rewards) : null)}`),
    h("span", { class: "number" }, `${kept} of ${trajectories.length} trained`),
    h("span", {}, drop ? badge(drop, "warn") : badge("trained", "good"), node ? badge(node) : null),
  );
}

/**
 * @param {Group} group
 * @param {Member} member
 * @param {Scale} scale
 * @param {number} longest
 * @param {() => void} onclick
 */
function memberRow(group, member, scale, longest, onclick) {
  const { sample, tokens, reward, kept, error, reasons, advantage, stop } = member;
  const fate = error
    ? badge("failed", "bad")
    : kept
      ? badge("trained", "good")
      : badge(group.drop ?? "not chosen");
  /** @param {string} text */
  const figure = (text) => h("span", { class: "number" }, text);
  return h(
    "div",
    { class: `item members clickable${kept ? "" : " dim"}`, "data-sample": sample, onclick },
    h("span", { class: "muted number" }, String(sample)),
    lengthBar(member, scale, longest),
    figure(whole(tokens)),
    figure(error ? "–" : fixed(reward)),
    h("span", {}, fate),
    figure(fixed(reasons.p_err)),
    figure(fixed(reasons.p_format)),
    figure(percent(reasons.probability)),
    figure(signed(advantage)),
    h("span", { class: "muted" }, stop),
  );
}

/**
 * @param {Member} member
 * @param {Scale} scale
 * @param {number} longest
 */
function lengthBar({ turns }, scale, longest) {
  /** @param {number} value */
  const share = (value) => `${(100 * value) / longest}%`;
  /** @param {number} from @param {number} to */
  const placed = (from, to) => ({
    left: share(from),
    width: `max(1px, calc(${share(to - from)} - 1px))`,
  });
  let before = 0;
  const parts = turns.flatMap(({ tokens, started_s, finished_s, calls }, turn) => {
    const inTokens = scale === "tokens";
    const from = inTokens ? before : (started_s ?? 0);
    const to = inTokens ? before + tokens : (finished_s ?? 0);
    before += tokens;
    return [
      h("i", { class: turn % 2 ? "odd" : null, style: placed(from, to) }),
      ...calls.flatMap(([outcome, dispatched_s, finished_s]) => [
        inTokens
          ? null
          : h("i", { class: "wait", style: placed(dispatched_s ?? 0, finished_s ?? 0) }),
        h("i", {
          class: outcome === "ok" ? "tool" : "tool wrong",
          style: { left: share(inTokens ? to : (finished_s ?? 0)) },
        }),
      ]),
    ];
  });
  const calls = turns.flatMap((turn) => turn.calls.map(([outcome]) => outcome));
  const lengths = turns.map(({ tokens }) => tokens).join(" + ");
  const text = `${turns.length} turns of ${lengths} tokens`;
  const outcomes = calls.length ? `\ncalls: ${calls.join(", ")}` : "";
  return h("div", { class: "length", ...withTip(text + outcomes) }, parts);
}
