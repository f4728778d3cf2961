// The tokens of a trajectory: who wrote each, both log-probabilities, ratio, entropy, what was clipped, and its weights.

import { chart } from "view/parts/charts";
import {
  card,
  choice,
  color,
  empty,
  fixed,
  h,
  legend,
  number,
  signed,
  tip,
  whole,
} from "view/parts/dom";

const CHUNK = 200; // tokens of a block of text, at least: it ends with a line. Blocks out of view are not laid out

const MODES = {
  mask: "who wrote it",
  ratio: "ratio",
  entropy: "entropy",
  logprob: "log-probability",
  push: "push of the loss",
  version: "weight version",
};

export function tokenView(one, sequence, asked, onchange) {
  const tokens = sequence?.tokens;
  if (!tokens)
    return card(
      "Tokens",
      empty(
        "The tokens of this trajectory are not kept",
        "They are in a recording (record/steps), or as token_ids in rollouts/*.jsonl.",
      ),
    );
  const there = Object.keys(MODES).filter(
    (mode) => mode === "mask" || (tokens[mode] ?? null) !== null,
  );
  const mode = there.includes(asked)
    ? asked
    : there.includes("ratio") && one.kept
      ? "ratio"
      : "mask";
  const clipped = (at) =>
    tokens.push?.[at] === 0 && one.advantage !== 0 && tokens.learner_logprob?.[at] !== null;
  const paint = painter(tokens, mode);
  const strip = h("div", { class: "strip", id: "tokens", onmouseleave: (event) => tip(event, "") });
  strip.addEventListener("mousemove", (event) => {
    const at = event.target.dataset?.at;
    tip(event, at === undefined ? "" : tokenText(tokens, Number(at), clipped));
  });
  let chunk = strip.appendChild(h("div", { class: "chunk" }));
  tokens.ids.forEach((id, at) => {
    if (chunk.childElementCount >= CHUNK && chunk.lastChild.textContent.endsWith("\n"))
      chunk = strip.appendChild(h("div", { class: "chunk" }));
    const element = document.createElement("span");
    element.textContent = tokens.text ? tokens.text[at] || "·" : `${id} `;
    element.dataset.at = at;
    const kinds = [
      ...uncertain(tokens, at),
      clipped(at) && "clipped",
      !tokens.sampled[at] && "given",
    ];
    element.className = kinds.filter(Boolean).join(" ");
    const background = paint(at);
    if (background) element.style.background = background;
    chunk.append(element);
  });
  return h(
    "section",
    { class: "card", id: "token-view" },
    h(
      "div",
      { class: "toolbar", style: { justifyContent: "space-between" } },
      h("h2", {}, "Tokens"),
      h(
        "span",
        { class: "toolbar" },
        h("label", {}, "coloured by"),
        choice(
          there.map((name) => [name, MODES[name]]),
          mode,
          onchange,
        ),
      ),
    ),
    figures(tokens, clipped),
    modeLegend(mode, tokens),
    strip,
    curves(tokens),
    one.whole
      ? null
      : h(
          "p",
          { class: "muted", style: { marginTop: "8px" } },
          one.source === "recording"
            ? "Log-probabilities are kept for some groups of each step (record.token_groups); this is none of them."
            : "Log-probabilities are in a recording (record/) only.",
        ),
  );
}

/** What an uncertain token is: with it the model doubts or checks itself, or responds to a tool's reply. */
const uncertain = (tokens, at) =>
  ["forking", "reflection"].filter((kind) => tokens[kind]?.[at] === 1);

/** A background for each token; none where there is no value. */
function painter(tokens, mode) {
  if (mode === "mask")
    return (at) =>
      tokens.sampled[at] ? "color-mix(in srgb, var(--accent) 22%, transparent)" : null;
  const values = tokens[mode];
  if (mode === "version") {
    const versions = [...new Set(values.filter((version) => version >= 0))].sort((a, b) => a - b);
    return (at) =>
      values[at] < 0
        ? null
        : `color-mix(in srgb, var(--run-${versions.indexOf(values[at]) % 6}) 30%, transparent)`;
  }
  const neutral = mode === "ratio" ? 1 : 0;
  const size = (value) =>
    mode === "ratio" ? Math.abs(Math.log(Math.max(1e-9, value))) : Math.abs(value - neutral);
  const most = Math.max(1e-9, ...sample(values.filter((value) => value !== null).map(size)));
  const side = (value) =>
    mode === "ratio" || mode === "push" ? (value > neutral ? "good" : "bad") : "tool_wait";
  return (at) => {
    const value = values[at];
    if (value === null || !tokens.sampled[at]) return null;
    return `color-mix(in srgb, var(--${side(value)}) ${Math.round(70 * Math.min(1, size(value) / most))}%, transparent)`;
  };
}

/** Math.max takes no more arguments than the stack holds. */
const sample = (values) =>
  values.length <= 20000
    ? values
    : values.filter((_, at) => at % Math.ceil(values.length / 20000) === 0);

function tokenText(tokens, at, clipped) {
  const lines = [
    `${JSON.stringify(tokens.text?.[at] ?? "")}  id ${tokens.ids[at]}, position ${at}`,
  ];
  if (!tokens.sampled[at]) return [...lines, "given, not sampled"].join("\n");
  const add = (name, text) => lines.push(`${name} ${text}`);
  if (tokens.logprob) add("sampler", fixed(tokens.logprob[at], 4));
  if (tokens.learner_logprob?.[at] != null) {
    add("learner", fixed(tokens.learner_logprob[at], 4));
    add("ratio", fixed(tokens.ratio[at], 4) + (clipped(at) ? ", clipped" : ""));
    add("entropy", [fixed(tokens.entropy?.[at], 4), ...uncertain(tokens, at)].join(", "));
    add("push", signed(tokens.push?.[at], 4));
  }
  if (tokens.version) add("weights of version", String(tokens.version[at]));
  return lines.join("\n");
}

function figures(tokens, clipped) {
  const trained = tokens.ids
    .map((_, at) => at)
    .filter((at) => tokens.learner_logprob?.[at] != null);
  const sampled = tokens.sampled.reduce((sum, one) => sum + one, 0);
  const versions = tokens.version
    ? [...new Set(tokens.version.filter((version) => version >= 0))]
    : [];
  const mean = (values) =>
    values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
  const parts = [
    `${whole(tokens.ids.length)} tokens, ${whole(sampled)} sampled`,
    trained.length ? `${whole(trained.length)} trained` : null,
    trained.length ? `${whole(trained.filter(clipped).length)} clipped` : null,
    trained.length ? `mean ratio ${fixed(mean(trained.map((at) => tokens.ratio[at])), 4)}` : null,
    trained.length && tokens.entropy
      ? `mean entropy ${number(mean(trained.map((at) => tokens.entropy[at])))}`
      : null,
    versions.length ? `weights of version ${versions.sort((a, b) => a - b).join(", ")}` : null,
  ];
  return h(
    "p",
    { class: "muted number", style: { textAlign: "left" } },
    parts.filter(Boolean).join("   ·   "),
  );
}

function modeLegend(mode, tokens) {
  const soft = (paint, share = 60) => `color-mix(in srgb, var(--${paint}) ${share}%, transparent)`;
  const entries = {
    mask: [
      ["sampled by the policy (trained on)", soft("accent", 22)],
      ["given: prompt and tool replies", "transparent"],
    ],
    ratio: [
      ["learner likelier than sampler", soft("good")],
      ["less likely", soft("bad")],
    ],
    entropy: [["high entropy", soft("tool_wait")]],
    logprob: [["unlikely under the sampler", soft("tool_wait")]],
    push: [
      ["made likelier by the loss", soft("good")],
      ["made less likely", soft("bad")],
    ],
    version: [...new Set((tokens.version ?? []).filter((version) => version >= 0))]
      .sort((a, b) => a - b)
      .map((version, at) => [`version ${version}`, soft(`run-${at % 6}`, 30)]),
  }[mode];
  const marks = tokens.push
    ? [
        ["underlined: clipped", color("bad")],
        ["forking: doubts or checks itself, of high entropy", color("tool_wait")],
        ["reflection: after a tool's reply, of high entropy", color("weight_sync")],
      ]
    : [];
  return h("div", { style: { margin: "0 0 8px" } }, legend([...entries, ...marks]));
}

function curves(tokens) {
  if (!tokens.learner_logprob) return null;
  const of = (values) => {
    const rows = values
      .map((value, at) => [at, value])
      .filter(([at, value]) => value !== null && tokens.sampled[at]);
    return { x: rows.map((row) => row[0]), y: rows.map((row) => row[1]) };
  };
  return h(
    "div",
    { class: "two", style: { marginTop: "14px" } },
    chart({
      title: "Log-probability",
      unit: "by position",
      horizontal: "position",
      height: 170,
      cursor: "tokens",
      series: [
        { label: "sampler", ...of(tokens.logprob), paint: color("run-0") },
        { label: "learner", ...of(tokens.learner_logprob), paint: color("run-1"), dash: [4, 3] },
      ],
    }),
    chart({
      title: "Ratio",
      unit: "learner to sampler, by position",
      horizontal: "position",
      height: 170,
      cursor: "tokens",
      series: [{ label: "ratio", ...of(tokens.ratio), paint: color("run-2") }],
    }),
  );
}
