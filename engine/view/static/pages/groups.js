// Groups: the rollouts of each prompt, what they were worth, and which of them were chosen for training.

import { ask } from "view/api";
import {
  badge,
  card,
  choice,
  color,
  empty,
  fixed,
  h,
  legend,
  percent,
  seconds,
  signed,
  stepChooser,
  tip,
  whole,
} from "view/parts/dom";
import { virtualList } from "view/parts/list";

const FILTERS = {
  all: ["all", () => true],
  kept: ["trained", (member) => member.kept],
  dropped: ["not trained", (member) => !member.kept],
  wrong: [
    "with a tool error",
    (member) => member.turns.some((turn) => turn.calls.some(([outcome]) => outcome !== "ok")),
  ],
  cut: ["cut off", (member) => member.stop !== "answer"],
  failed: ["failed", (member) => member.error !== null],
};

export async function groups({ run, runs, words, set, go }) {
  const steps = [...new Set([...runs[run].recorded, ...runs[run].rollouts])].sort((a, b) => a - b);
  if (!steps.length)
    return [
      empty(
        "No groups are kept of this run",
        "They come from the recording (record/) or from rollouts/*.jsonl. A run records itself unless record.max_mb=0.",
      ),
    ];
  const step = steps.includes(Number(words.step)) ? Number(words.step) : steps.at(-1);
  const found = await ask("groups", { run, step });
  const filter = words.filter in FILTERS ? words.filter : "all";
  const scale = words.scale === "seconds" && found.source === "recording" ? "seconds" : "tokens";
  const rows = [];
  for (const group of found.groups) {
    const members = group.trajectories.filter(FILTERS[filter][1]);
    if (members.length) rows.push({ group }, ...members.map((member) => ({ group, member })));
  }
  const everyone = found.groups.flatMap((group) => group.trajectories);
  const longest = Math.max(1, ...everyone.map((member) => extent(member, scale)));
  const shown = virtualList({
    id: "groups",
    count: rows.length,
    height: 24,
    view: 680,
    row: (index) =>
      rows[index].member
        ? memberRow(rows[index], { scale, longest, go, step })
        : groupRow(rows[index].group),
  });
  return [
    card(
      null,
      h(
        "div",
        { class: "toolbar" },
        stepChooser(steps, step, (value) => set({ ...words, step: value })),
        h("label", {}, "show"),
        choice(
          Object.entries(FILTERS).map(([name, [text]]) => [name, text]),
          filter,
          (value) => set({ ...words, filter: value }),
        ),
        h("label", {}, "bars in"),
        choice(
          found.source === "recording"
            ? [
                ["tokens", "tokens"],
                ["seconds", "seconds"],
              ]
            : [["tokens", "tokens"]],
          scale,
          (value) => set({ ...words, scale: value }),
        ),
      ),
    ),
    overview(found, everyone),
    h(
      "section",
      { class: "card" },
      h(
        "div",
        { class: "toolbar", style: { justifyContent: "space-between" } },
        h(
          "h2",
          {},
          `${whole(rows.filter((row) => row.member).length)} trajectories in ${whole(rows.filter((row) => !row.member).length)} groups`,
        ),
        legend([
          ["turn", color("staleness_gate")],
          ["tool call", color("good")],
          ["tool error", color("bad")],
          ...(scale === "seconds" ? [["waits for a tool", color("tool_wait")]] : []),
        ]),
      ),
      h(
        "div",
        { class: "columns members" },
        [
          "#",
          `length, ${scale} (longest ${scale === "tokens" ? whole(longest) : seconds(longest)})`,
          "tokens",
          "reward",
          "",
          "p_err",
          "p_format",
          "probability",
          "advantage",
          "end",
        ].map((name, at) =>
          h("span", { class: at >= 2 && at !== 4 && at !== 9 ? "number" : null }, name),
        ),
      ),
      rows.length ? shown : empty("None here", "No trajectory of this step fits the filter."),
      found.source === "rollouts"
        ? h(
            "p",
            { class: "muted", style: { marginTop: "8px" } },
            "From rollouts/*.jsonl: times and the selector's reasons are in a recording (record/) only.",
          )
        : null,
    ),
  ];
}

function overview(found, everyone) {
  const graded = everyone.filter((member) => member.reward !== null);
  const kept = everyone.filter((member) => member.kept);
  const flat = found.groups.filter((group) => group.drop === "flat").length;
  const waste = {};
  for (const group of found.groups)
    for (const [reason, tokens] of Object.entries(group.waste))
      waste[reason] = (waste[reason] ?? 0) + tokens;
  const figures = [
    [
      "Groups",
      whole(found.groups.length),
      `${whole(flat)} flat, ${whole(found.groups.filter((group) => group.drop === "error").length)} failed`,
    ],
    ["Trained", whole(kept.length), `of ${whole(everyone.length)} trajectories`],
    [
      "Mean reward",
      fixed(
        graded.length
          ? graded.reduce((sum, member) => sum + member.reward, 0) / graded.length
          : null,
        3,
      ),
      `${fixed(kept.length ? kept.reduce((sum, member) => sum + (member.reward ?? 0), 0) / kept.length : null, 3)} of the trained`,
    ],
    [
      "Trained tokens",
      whole(kept.reduce((sum, member) => sum + member.tokens, 0)),
      `of ${whole(everyone.reduce((sum, member) => sum + member.tokens, 0))} sampled`,
    ],
    [
      "Cancelled or refilled",
      whole(Object.values(waste).reduce((sum, tokens) => sum + tokens, 0)),
      Object.entries(waste)
        .map(([reason, tokens]) => `${reason} ${whole(tokens)}`)
        .join(", ") || "tokens",
    ],
  ];
  return h(
    "div",
    { class: "figures" },
    figures.map(([name, value, note]) =>
      h(
        "div",
        { class: "figure" },
        h("div", { class: "name" }, name),
        h("div", { class: "value" }, value),
        h("div", { class: "note" }, note),
      ),
    ),
  );
}

const extent = (member, scale) =>
  scale === "tokens"
    ? member.tokens
    : Math.max(
        0,
        ...member.turns.map((turn) =>
          Math.max(turn.finished_s, ...turn.calls.map((call) => call[2])),
        ),
      );

function groupRow(group) {
  const rewards = group.trajectories
    .map((member) => member.reward)
    .filter((reward) => reward !== null);
  const mean = rewards.length
    ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length
    : null;
  const kept = group.trajectories.filter((member) => member.kept).length;
  return h(
    "div",
    {
      class: "item head",
      "data-group": group.group,
      style: {
        gridTemplateColumns: "max-content minmax(0, 1fr) max-content max-content max-content",
      },
    },
    h("span", { class: "mono" }, group.prompt_id),
    h("span", { class: "muted", title: group.question }, group.question),
    h("span", { class: "number" }, `mean reward ${fixed(mean)}`),
    h("span", { class: "number" }, `${kept} of ${group.trajectories.length} trained`),
    h(
      "span",
      {},
      group.drop ? badge(group.drop, "warn") : badge("trained", "good"),
      group.node ? badge(group.node) : null,
    ),
  );
}

function memberRow({ group, member }, { scale, longest, go, step }) {
  return h(
    "div",
    {
      class: `item members clickable${member.kept ? "" : " dim"}`,
      "data-sample": member.sample,
      onclick: () => go("trajectory", { step, group: group.group, sample: member.sample }),
    },
    h("span", { class: "muted number" }, String(member.sample)),
    lengthBar(member, scale, longest),
    h("span", { class: "number" }, whole(member.tokens)),
    h("span", { class: "number" }, member.error ? "–" : fixed(member.reward)),
    h(
      "span",
      {},
      member.error
        ? badge("failed", "bad")
        : member.kept
          ? badge("trained", "good")
          : badge(group.drop ?? "not chosen"),
    ),
    h("span", { class: "number" }, fixed(member.reasons.p_err)),
    h("span", { class: "number" }, fixed(member.reasons.p_format)),
    h("span", { class: "number" }, percent(member.reasons.probability)),
    h("span", { class: "number" }, signed(member.advantage)),
    h("span", { class: "muted" }, member.stop),
  );
}

function lengthBar(member, scale, longest) {
  const parts = [];
  let at = 0;
  member.turns.forEach((turn, number) => {
    const [from, to] =
      scale === "tokens" ? [at, at + turn.tokens] : [turn.started_s, turn.finished_s];
    at += turn.tokens;
    parts.push(h("i", { class: number % 2 ? "odd" : null, style: place(from, to, longest) }));
    for (const [outcome, dispatched, finished] of turn.calls) {
      if (scale === "seconds")
        parts.push(h("i", { class: "wait", style: place(dispatched, finished, longest) }));
      parts.push(
        h("i", {
          class: `tool${outcome === "ok" ? "" : " wrong"}`,
          style: { left: `${(100 * (scale === "seconds" ? finished : to)) / longest}%` },
        }),
      );
    }
  });
  const calls = member.turns.flatMap((turn) => turn.calls.map((call) => call[0]));
  const text = `${member.turns.length} turns of ${member.turns.map((turn) => turn.tokens).join(" + ")} tokens${calls.length ? `\ncalls: ${calls.join(", ")}` : ""}`;
  return h(
    "div",
    {
      class: "length",
      onmousemove: (event) => tip(event, text),
      onmouseleave: (event) => tip(event, ""),
    },
    parts,
  );
}

const place = (from, to, longest) => ({
  left: `${(100 * from) / longest}%`,
  width: `max(1px, calc(${(100 * (to - from)) / longest}% - 1px))`,
});
