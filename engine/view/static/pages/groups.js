// The page Groups: the rollouts of each prompt, their rewards, and which of them were selected for
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
  spread,
  stepChooser,
  toolbar,
  withTip,
} from "view/parts/dom";
import { fixed, mean, percent, seconds, signed, sum, whole } from "view/parts/format";
import { virtualList } from "view/parts/list";
import { chosenStep, RECORDS, sampledTokens } from "view/parts/recorded";
import { otherSelections } from "view/parts/selections";

/** @import { Group, Groups, Member, Outline } from "view/answers" */
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
    fits: ({ turns }) =>
      turns.some(({ tool_uses }) => tool_uses.some(({ outcome }) => outcome !== "ok")),
  },
  cut: { text: "cut off", fits: ({ stop }) => stop !== "answer" },
  failed: { text: "failed", fits: ({ error }) => error !== null },
};

/** @param {Context} context */
export async function groups({ run, runs, query, set, go }) {
  const steps = runs[run].recorded;
  if (!steps.length)
    return empty("No groups of this run are recorded", `They would be in record/steps. ${RECORDS}`);
  const step = chosenStep(steps, query.step);
  const answer = await ask("groups", { run, step });
  const filter = query.filter in FILTERS ? query.filter : "all";
  const scale = query.scale === "seconds" ? "seconds" : "tokens";
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
        ["tokens", "seconds"].map((name) => [name, name]),
        scale,
        (value) => set({ ...query, scale: value }),
      ),
    ),
  );
  /** @param {Group} group @param {Member} member */
  const open = (group, member) =>
    go("trajectory", { step, group: group.number, sample: member.sample });
  return [
    chooser,
    overview(answer),
    memberList(answer, FILTERS[filter].fits, scale, open),
    otherSelections(run, step),
  ];
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
  const tokens = (members) => whole(sum(members.map(({ turns }) => sampledTokens(turns))));
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
function memberList({ groups, started_at }, fits, scale, open) {
  const axis = scale === "tokens" ? inTokens(groups) : inSeconds(groups, started_at);
  const filled = groups
    .map((group) => ({ group, members: group.trajectories.filter(fits) }))
    .filter(({ members }) => members.length);
  const rows = filled.flatMap(({ group, members }) => [
    () => groupRow(group),
    ...members.map((member) => () => memberRow(group, member, axis, () => open(group, member))),
  ]);
  const length = scale === "tokens" ? whole(axis.longest) : seconds(axis.longest);
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
  );
}

/** @returns {[text: string, paint: string]} */
const waiting = () => ["waits for a tool", color("tool_wait")];

/** @typedef {{ from: number, to: number, outcome: string }} UseSpan */

/**
 * Where a turn and its tool uses begin and end on the bar of a trajectory.
 * @typedef {{ from: number, to: number, uses: UseSpan[] }} Span
 */

/**
 * How the bars are drawn. longest: the end of the bar that reaches furthest.
 * @typedef {{ longest: number, waits: boolean, spans: (turns: Outline[]) => Span[] }} Axis
 */

/**
 * Returns an axis of sampled tokens, on which a tool use has no length.
 * @param {Group[]} groups
 * @returns {Axis}
 */
function inTokens(groups) {
  const turns = groups.flatMap(({ trajectories }) => trajectories.map(({ turns }) => turns));
  return {
    longest: Math.max(1, ...turns.map(sampledTokens)),
    waits: false,
    spans(turns) {
      let to = 0;
      return turns.map(({ start, end, tool_uses }) => {
        const from = to;
        to += end - start;
        const at = to;
        return { from, to, uses: tool_uses.map(({ outcome }) => ({ from: at, to: at, outcome })) };
      });
    },
  };
}

/**
 * Returns an axis of seconds since the step began.
 * @param {Group[]} groups
 * @param {number} startedAt
 * @returns {Axis}
 */
function inSeconds(groups, startedAt) {
  const turns = groups.flatMap(({ trajectories }) => trajectories.flatMap(({ turns }) => turns));
  const ends = turns.flatMap((turn) => [turn, ...turn.tool_uses].map((one) => one.finished_at));
  return {
    longest: ends.reduce((latest, at) => Math.max(latest, at - startedAt), 1e-9),
    waits: true,
    spans: (turns) =>
      turns.map(({ started_at, finished_at, tool_uses }) => ({
        from: started_at - startedAt,
        to: finished_at - startedAt,
        uses: tool_uses.map(({ dispatched_at, finished_at, outcome }) => ({
          from: dispatched_at - startedAt,
          to: finished_at - startedAt,
          outcome,
        })),
      })),
  };
}

/** @param {Group} group */
function groupRow({ number, prompt_id, question, trajectories, drop, node }) {
  const rewards = trajectories.map(({ reward }) => reward).filter((reward) => reward !== null);
  const kept = trajectories.filter((member) => member.kept).length;
  return h(
    "div",
    { class: "item head group", "data-group": number },
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
 * @param {Axis} axis
 * @param {() => void} onclick
 */
function memberRow(group, member, axis, onclick) {
  const { sample, turns, reward, kept, error, reasons, advantage, stop } = member;
  const outcome = error
    ? badge("failed", "bad")
    : kept
      ? badge("trained", "good")
      : badge(group.drop ?? "not selected");
  /** @param {string} text */
  const figure = (text) => h("span", { class: "number" }, text);
  return h(
    "div",
    { class: `item members clickable${kept ? "" : " dim"}`, "data-sample": sample, onclick },
    h("span", { class: "muted number" }, String(sample)),
    lengthBar(turns, axis),
    figure(whole(sampledTokens(turns))),
    figure(error ? "–" : fixed(reward)),
    h("span", {}, outcome),
    figure(fixed(reasons.p_err)),
    figure(fixed(reasons.p_format)),
    figure(percent(reasons.probability)),
    figure(signed(advantage)),
    h("span", { class: "muted" }, stop),
  );
}

/**
 * @param {Outline[]} turns
 * @param {Axis} axis
 */
function lengthBar(turns, { longest, waits, spans }) {
  /** @param {number} value */
  const share = (value) => `${(100 * value) / longest}%`;
  /** @param {number} from @param {number} to */
  const placed = (from, to) => ({
    left: share(from),
    width: `max(1px, calc(${share(to - from)} - 1px))`,
  });
  const parts = spans(turns).flatMap(({ from, to, uses }, turn) => [
    h("i", { class: turn % 2 ? "odd" : null, style: placed(from, to) }),
    ...uses.flatMap((use) => [
      waits ? h("i", { class: "wait", style: placed(use.from, use.to) }) : null,
      h("i", {
        class: use.outcome === "ok" ? "tool" : "tool wrong",
        style: { left: share(use.to) },
      }),
    ]),
  ]);
  const outcomes = turns.flatMap((turn) => turn.tool_uses.map(({ outcome }) => outcome));
  const lengths = turns.map(({ start, end }) => end - start).join(" + ");
  const text = `${turns.length} turns of ${lengths} tokens`;
  const calls = outcomes.length ? `\ncalls: ${outcomes.join(", ")}` : "";
  return h("div", { class: "length", ...withTip(text + calls) }, parts);
}
