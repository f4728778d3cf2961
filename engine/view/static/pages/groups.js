// The page Groups: the rollouts of each prompt, their rewards, and which of them were selected for
// training.

import { ask, Problem } from "view/api";
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
import { chosenStep, damage, RECORDS, sampledTokens } from "view/parts/recorded";
import { otherSelections } from "view/parts/selections";

/** @import { Group, Groups, Member, Outline } from "view/answers" */
/** @import { Context } from "view/main" */

/** @typedef {"tokens" | "seconds"} Scale */

const ROW = 24; // pixels
const VIEW = 680;
const TYPING_MS = 200; // after a letter, before the list is drawn anew
const FIRST = 40; // rows whose trajectories are there when the page is drawn

/**
 * fits: returns the indices of the trajectories of a group that are shown.
 * @type {Record<string, { text: string, fits: (group: Group) => number[] }>}
 */
const FILTERS = {
  all: { text: "all", fits: ({ samples }) => samples.map((_, index) => index) },
  kept: { text: "trained", fits: ({ kept }) => [...kept].sort((a, b) => a - b) },
  dropped: {
    text: "not trained",
    fits: ({ samples, kept }) =>
      samples.flatMap((_, index) => (kept.includes(index) ? [] : [index])),
  },
  wrong: { text: "with a tool error", fits: ({ wrong }) => wrong },
  cut: { text: "cut off", fits: ({ cut }) => cut },
  failed: { text: "failed", fits: ({ failed }) => failed },
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
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let typing;
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
      h("input", {
        id: "prompt",
        type: "search",
        "aria-label": "prompt",
        placeholder: "prompt",
        value: query.prompt ?? "",
        oninput: ({ target }) => {
          query.prompt = target.value; // a redrawn page has it too
          history.replaceState(null, "", `#/groups?${new URLSearchParams({ ...query })}`);
          clearTimeout(typing);
          typing = setTimeout(show, TYPING_MS);
        },
      }),
      h("label", {}, "bars in"),
      choice(
        ["tokens", "seconds"].map((name) => [name, name]),
        scale,
        (value) => set({ ...query, scale: value }),
      ),
    ),
  );
  /** @param {Group} group @param {number} index */
  const open = ({ number, samples }, index) =>
    go("trajectory", { step, group: number, sample: samples[index] });
  const members = membersOf(run, step);
  const list = h("div");
  let newest = 0;
  const show = async () => {
    const showing = ++newest;
    const wanted = (query.prompt ?? "").toLowerCase();
    /** @param {Group} group */
    const isWanted = ({ prompt_id, question }) =>
      `${prompt_id} ${question}`.toLowerCase().includes(wanted);
    const shown = rowsOf(answer.groups.filter(isWanted), FILTERS[filter].fits);
    await Promise.all(shown.slice(0, FIRST).map(({ group }) => members(group)));
    if (showing === newest) list.replaceChildren(memberList(answer, shown, scale, members, open));
  };
  await show();
  return [chooser, overview(answer), list, otherSelections(run, step)];
}

/** @typedef {{ group: Group, index: number | null }} ListRow index: null for the group's own row */
/** @typedef {(group: Group) => Member[] | Promise<Member[]>} MembersOf */

/**
 * Returns a row for each group and each of its trajectories that fit.
 * @param {Group[]} groups
 * @param {(group: Group) => number[]} fits
 * @returns {ListRow[]}
 */
function rowsOf(groups, fits) {
  return groups.flatMap((group) => {
    const fitting = fits(group);
    return fitting.length ? [null, ...fitting].map((index) => ({ group, index })) : [];
  });
}

/**
 * Returns a function that asks for the trajectories of a group once; what has come is there at
 * once. It returns none for a group that an exported file leaves out.
 * @param {number} run
 * @param {number} step
 * @returns {MembersOf}
 */
function membersOf(run, step) {
  /** @type {Map<number, Member[] | Promise<Member[]>>} */
  const known = new Map();
  return ({ number }) => {
    const before = known.get(number);
    if (before) return before;
    const asked = ask("members", { run, step, group: number }).then(
      ({ trajectories }) => trajectories,
      (error) => {
        if (error instanceof Problem) return [];
        throw error;
      },
    );
    known.set(number, asked);
    asked.then((members) => known.set(number, members));
    return asked;
  };
}

/** @param {Groups} answer */
function overview({ groups, groups_written }) {
  const rewards = groups.flatMap((group) => group.rewards);
  const ofKept = groups.flatMap(({ kept, rewards }) => kept.map((index) => rewards[index]));
  /** @param {(number | null)[]} all */
  const meanReward = (all) => {
    const graded = all.filter((reward) => reward !== null);
    return fixed(graded.length ? mean(graded) : null, 3);
  };
  const sampled = sum(groups.map(({ tokens }) => sum(tokens)));
  const trained = sum(groups.map(({ kept, tokens }) => sum(kept.map((index) => tokens[index]))));
  /** @param {string} reason */
  const dropped = (reason) => whole(groups.filter(({ drop }) => drop === reason).length);
  /** @type {Record<string, number>} */
  const waste = {};
  for (const group of groups)
    for (const [reason, count] of Object.entries(group.waste))
      waste[reason] = (waste[reason] ?? 0) + count;
  const reasons = Object.entries(waste).map(([reason, count]) => `${reason} ${whole(count)}`);
  const isTorn = groups.length < groups_written;
  return [
    damage(groups.length, groups_written),
    figures([
      [
        "Groups",
        isTorn ? `${whole(groups.length)} of ${whole(groups_written)}` : whole(groups.length),
        `${dropped("flat")} flat, ${dropped("error")} failed`,
      ],
      ["Trained", whole(ofKept.length), `of ${whole(rewards.length)} trajectories`],
      ["Mean reward", meanReward(rewards), `${meanReward(ofKept)} of the trained`],
      ["Trained tokens", whole(trained), `of ${whole(sampled)} sampled`],
      [
        "Cancelled or refilled",
        whole(sum(Object.values(waste))),
        reasons.length ? reasons.join(", ") : "tokens",
      ],
    ]),
  ];
}

/**
 * @param {Groups} answer
 * @param {ListRow[]} rows
 * @param {Scale} scale
 * @param {MembersOf} membersOf
 * @param {(group: Group, index: number) => void} open
 */
function memberList(answer, rows, scale, membersOf, open) {
  const axis = scale === "tokens" ? inTokens(answer) : inSeconds(answer);
  const heads = rows.filter(({ index }) => index === null).length;
  const length = scale === "tokens" ? whole(axis.longest) : seconds(axis.longest);
  /** @type {[name: string, isNumber: boolean, meaning?: string][]} */
  const columns = [
    ["#", false],
    [`length, ${scale} (longest ${length})`, false],
    ["tokens", true],
    ["reward", true],
    ["", false],
    ["p_err", true, "RoC's penalty for tool errors: failed calls / calls, 0.5 without a call"],
    ["p_format", true, "RoC's penalty for the form of the answer"],
    ["probability", true, "with which a trajectory like this one is chosen in its group"],
    ["advantage", true, "its reward relative to the group's, by which its tokens are weighted"],
    ["end", false],
  ];
  return card(
    null,
    spread(
      h("h2", {}, `${whole(rows.length - heads)} trajectories in ${whole(heads)} groups`),
      legend([
        ["turn", color("staleness_gate")],
        ["tool call", color("call")],
        ["tool error", color("bad")],
        ...(scale === "seconds" ? [waiting()] : []),
      ]),
    ),
    h(
      "div",
      { class: "columns members" },
      columns.map(([name, isNumber, meaning]) =>
        h("span", { class: isNumber ? "number" : null, title: meaning }, name),
      ),
    ),
    rows.length
      ? virtualList({
          id: "groups",
          count: rows.length,
          height: ROW,
          view: VIEW,
          row: (at) => {
            const { group, index } = rows[at];
            if (index === null) return groupRow(group);
            return memberRow(group, index, axis, membersOf(group), () => open(group, index));
          },
        })
      : empty("None here", "No trajectory of this step fits the filter and the prompt."),
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
 * @param {Groups} groups
 * @returns {Axis}
 */
function inTokens({ longest_tokens }) {
  return {
    longest: Math.max(1, longest_tokens),
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
 * @param {Groups} groups
 * @returns {Axis}
 */
function inSeconds({ started_at: startedAt, longest_s }) {
  return {
    longest: Math.max(1e-9, longest_s),
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

/**
 * Returns what became of a group; of a flat one with different rewards, why it is flat.
 * @param {string | null} drop
 * @param {number[]} rewards
 */
function fate(drop, rewards) {
  if (!drop) return badge("trained", "good");
  const differ = drop === "flat" && rewards.some((reward) => reward !== rewards[0]);
  const text = "flat among those that the selector kept: it left the ones with another reward out";
  return h("span", { class: "badge warn", ...(differ ? withTip(text) : {}) }, drop);
}

/** @param {Group} group */
function groupRow({ number, prompt_id, question, rewards, samples, kept, drop, node }) {
  const graded = rewards.filter((reward) => reward !== null);
  return h(
    "div",
    { class: "item head group", "data-group": number },
    h("span", { class: "mono" }, prompt_id),
    h("span", { class: "muted", title: question }, question),
    h("span", { class: "number" }, `mean reward ${fixed(graded.length ? mean(graded) : null)}`),
    h("span", { class: "number" }, `${kept.length} of ${samples.length} trained`),
    h("span", {}, fate(drop, graded), node ? badge(node) : null),
  );
}

/**
 * Returns the row of a trajectory; it is filled once the members have come.
 * @param {Group} group
 * @param {number} index
 * @param {Axis} axis
 * @param {Member[] | Promise<Member[]>} members
 * @param {() => void} onclick
 */
function memberRow(group, index, axis, members, onclick) {
  const sample = group.samples[index];
  const dim = group.kept.includes(index) ? "" : " dim";
  const row = h(
    "div",
    { class: `item members clickable${dim}`, "data-sample": sample, onclick },
    h("span", { class: "muted number" }, String(sample)),
  );
  /** @param {Member[]} all */
  const fill = (all) => {
    if (index in all) row.append(...memberCells(group, all[index], axis));
  };
  if (Array.isArray(members)) fill(members);
  else members.then(fill);
  return row;
}

/**
 * @param {Group} group
 * @param {Member} member
 * @param {Axis} axis
 */
function memberCells(group, { turns, reward, kept, error, reasons, advantage, stop }, axis) {
  const outcome = error
    ? badge("failed", "bad")
    : kept
      ? badge("trained", "good")
      : badge(group.drop ?? "not selected");
  /** @param {string} text */
  const figure = (text) => h("span", { class: "number" }, text);
  return [
    lengthBar(turns, axis),
    figure(whole(sampledTokens(turns))),
    figure(error ? "–" : fixed(reward)),
    h("span", {}, outcome),
    figure(fixed(reasons.p_err)),
    figure(fixed(reasons.p_format)),
    figure(group.drop ? "–" : percent(reasons.probability)), // nothing is chosen in such a group
    figure(signed(advantage)),
    h("span", { class: "muted" }, stop),
  ];
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
