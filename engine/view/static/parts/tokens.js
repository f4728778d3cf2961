// Shows the tokens of a trajectory: who wrote each, both log-probabilities, ratio, entropy, whether
// it was clipped, and the weights that sampled it.

import { chart } from "view/parts/charts";
import { color, faded } from "view/parts/colors";
import {
  choice,
  empty,
  h,
  hideTip,
  legend,
  namedCard,
  note,
  spread,
  tip,
  toolbar,
} from "view/parts/dom";
import { fixed, mean, number, signed, whole } from "view/parts/format";

/** @import { Column, Part, Tokens, Trajectory } from "view/answers" */
/** @import { Child } from "view/parts/dom" */
/** @import { Maybe } from "view/parts/format" */

// Tokens are put into blocks of at least this many, which end with a line: the browser lays out
// only the blocks in view.
const CHUNK = 200;
const SCALE = 20_000; // the most values that the scale of the colours is computed from

/**
 * The column that tokens are coloured by.
 * @typedef {"sampled_T" | "ratio_T" | "learner_entropy_T" | "logprobs_T"
 *   | "learner_logprob_gradient_T" | "versions_T"} Mode
 */
/** @type {Record<Mode, string>} */
const MODES = {
  sampled_T: "who wrote it",
  ratio_T: "ratio",
  learner_entropy_T: "entropy",
  logprobs_T: "log-probability",
  learner_logprob_gradient_T: "gradient of the loss",
  versions_T: "weight version",
};

/**
 * @param {Trajectory} trajectory
 * @param {Part} part
 * @param {string | null} asked the mode that the address names
 * @param {(mode: Mode) => void} onchange
 */
export function tokenView(trajectory, { tokens }, asked, onchange) {
  if (!tokens)
    return namedCard(
      "token-view",
      "Tokens",
      empty("The tokens cannot be read", "The record of this step (record/steps) is damaged."),
    );
  const modes = /** @type {Mode[]} */ (Object.keys(MODES)).filter((mode) => tokens[mode]);
  const preferred = modes.includes("ratio_T") && trajectory.kept ? "ratio_T" : "sampled_T";
  const mode = modes.find((name) => name === asked) ?? preferred;
  const clipped = clippedTokens(trajectory, tokens);
  return namedCard(
    "token-view",
    null,
    spread(
      h("h2", {}, "Tokens"),
      toolbar(
        h("label", {}, "coloured by"),
        choice(
          modes.map((name) => [name, MODES[name]]),
          mode,
          onchange,
        ),
      ),
    ),
    figures(tokens, clipped),
    modeLegend(mode, tokens),
    strip(tokens, mode, clipped),
    curves(tokens),
    trajectory.whole ? null : note(NOT_WHOLE),
  );
}

const NOT_WHOLE =
  "Log-probabilities are kept for some groups of a step (record.token_groups), not for this one.";

/**
 * @param {Tokens} tokens
 * @param {Mode} mode
 * @param {Set<number>} clipped
 */
function strip(tokens, mode, clipped) {
  const paint = painter(tokens, mode);
  const place = h("div", { class: "strip", id: "tokens", onmouseleave: hideTip });
  place.addEventListener("mousemove", (event) => {
    const at = event.target instanceof HTMLElement ? event.target.dataset.at : undefined;
    tip(event, at === undefined ? "" : tokenText(tokens, Number(at), clipped));
  });
  let chunk = place.appendChild(h("div", { class: "chunk" }));
  tokens.token_ids_T.forEach((id, at) => {
    if (chunk.childElementCount >= CHUNK && chunk.lastChild?.textContent?.endsWith("\n"))
      chunk = place.appendChild(h("div", { class: "chunk" }));
    const element = document.createElement("span");
    element.textContent = tokens.text_T ? tokens.text_T[at] || "·" : `${id} `;
    element.dataset.at = String(at);
    element.classList.toggle("given", !tokens.sampled_T[at]);
    element.classList.toggle("clipped", clipped.has(at));
    element.classList.add(...uncertainKinds(tokens, at));
    const background = paint(at);
    if (background) element.style.background = background;
    chunk.append(element);
  });
  return place;
}

/**
 * Returns the trained tokens whose gradient the loss clipped to 0.
 * @param {Trajectory} trajectory
 * @param {Tokens} tokens
 */
function clippedTokens({ advantage }, { learner_logprob_gradient_T }) {
  return positions(
    advantage === 0 ? [] : (learner_logprob_gradient_T ?? []),
    (value) => value === 0,
  );
}

/**
 * Returns the kinds of a token of high entropy: with it the model doubts or checks itself
 * (forking), or responds to a tool's reply (reflection).
 * @param {Tokens} tokens
 * @param {number} at
 */
const uncertainKinds = ({ forking_T, reflection_T }, at) => [
  ...(forking_T?.[at] ? ["forking"] : []),
  ...(reflection_T?.[at] ? ["reflection"] : []),
];

/**
 * @param {(number | null)[]} values
 * @param {(value: number | null, at: number) => boolean} isWanted
 */
function positions(values, isWanted) {
  /** @type {Set<number>} */
  const wanted = new Set();
  values.forEach((value, at) => {
    if (isWanted(value, at)) wanted.add(at);
  });
  return wanted;
}

/**
 * Returns a function from a token to its background, which is null if the token has no value.
 * @param {Tokens} tokens
 * @param {Mode} mode
 * @returns {(at: number) => string | null}
 */
function painter(tokens, mode) {
  if (mode === "sampled_T") return (at) => (tokens.sampled_T[at] ? faded("accent", 22) : null);
  if (mode === "versions_T") {
    const version = tokens.versions_T ?? [];
    const known = versions(tokens);
    return (at) => (version[at] < 0 ? null : faded(`run-${known.indexOf(version[at]) % 6}`, 30));
  }
  const values = tokens[mode] ?? [];
  const neutral = mode === "ratio_T" ? 1 : 0;
  /** @param {number} value */
  const size = (value) =>
    mode === "ratio_T" ? Math.abs(Math.log(Math.max(1e-9, value))) : Math.abs(value);
  const most = Math.max(1e-9, ...sample(values.filter(isValue).map(size)));
  /** @param {number} value */
  const paint = (value) => {
    if (mode === "learner_entropy_T" || mode === "logprobs_T") return "tool_wait";
    return value > neutral ? "good" : "bad";
  };
  return (at) => {
    const value = values[at];
    if (!isValue(value) || !tokens.sampled_T[at]) return null;
    return faded(paint(value), 70 * Math.min(1, size(value) / most));
  };
}

/**
 * @param {Maybe} value
 * @returns {value is number}
 */
const isValue = (value) => value !== null && value !== undefined;

/** Thins values out: Math.max takes no more than the stack holds. @param {number[]} values */
const sample = (values) =>
  values.length <= SCALE
    ? values
    : values.filter((_, at) => at % Math.ceil(values.length / SCALE) === 0);

/** Returns the versions of the weights that sampled tokens, in order. @param {Tokens} tokens */
const versions = ({ versions_T }) =>
  [...new Set((versions_T ?? []).filter((one) => one >= 0))].sort((a, b) => a - b);

/**
 * @param {Tokens} tokens
 * @param {number} at
 * @param {Set<number>} clipped
 */
function tokenText(tokens, at, clipped) {
  const lines = [
    `${JSON.stringify(tokens.text_T?.[at] ?? "")}  id ${tokens.token_ids_T[at]}, position ${at}`,
  ];
  if (!tokens.sampled_T[at]) return [...lines, "given, not sampled"].join("\n");
  if (tokens.logprobs_T) lines.push(`sampler ${fixed(tokens.logprobs_T[at], 4)}`);
  if (isValue(tokens.learner_logprobs_T?.[at])) {
    lines.push(
      `learner ${fixed(tokens.learner_logprobs_T?.[at], 4)}`,
      `ratio ${fixed(tokens.ratio_T?.[at], 4)}${clipped.has(at) ? ", clipped" : ""}`,
      ["entropy", fixed(tokens.learner_entropy_T?.[at], 4), ...uncertainKinds(tokens, at)].join(
        " ",
      ),
      `gradient ${signed(tokens.learner_logprob_gradient_T?.[at], 4)}`,
    );
  }
  if (tokens.versions_T) lines.push(`weight version ${tokens.versions_T[at]}`);
  return lines.join("\n");
}

/**
 * @param {Tokens} tokens
 * @param {Set<number>} clipped
 */
function figures(tokens, clipped) {
  const trained = [...positions(tokens.learner_logprobs_T ?? [], isValue)];
  /** @param {Column} values */
  const meanOf = (values) => {
    const known = trained.map((at) => values?.[at]).filter(isValue);
    return known.length ? mean(known) : null;
  };
  const sampled = tokens.sampled_T.filter(Boolean).length;
  const parts = [`${whole(tokens.token_ids_T.length)} tokens, ${whole(sampled)} sampled`];
  if (trained.length) {
    parts.push(`${whole(trained.length)} trained`, `${whole(clipped.size)} clipped`);
    parts.push(`mean ratio ${fixed(meanOf(tokens.ratio_T), 4)}`);
    parts.push(`mean entropy ${number(meanOf(tokens.learner_entropy_T))}`);
  }
  const known = versions(tokens);
  if (known.length) parts.push(`weight version ${known.join(", ")}`);
  return note(parts.join("   ·   "));
}

/**
 * @param {Mode} mode
 * @param {Tokens} tokens
 */
function modeLegend(mode, tokens) {
  /** @type {Record<Mode, [text: string, paint: string][]>} */
  const entries = {
    sampled_T: [
      ["sampled by the policy (trained on)", faded("accent", 22)],
      ["given: prompt, tool replies, what a grammar decided", "transparent"],
    ],
    ratio_T: [
      ["more likely under the learner than under the sampler", faded("good")],
      ["less likely", faded("bad")],
    ],
    learner_entropy_T: [["high entropy", faded("tool_wait")]],
    logprobs_T: [["unlikely under the sampler", faded("tool_wait")]],
    learner_logprob_gradient_T: [
      ["the loss raises its probability", faded("good")],
      ["the loss lowers it", faded("bad")],
    ],
    versions_T: versions(tokens).map((version, at) => [
      `version ${version}`,
      faded(`run-${at % 6}`, 30),
    ]),
  };
  /** @type {[text: string, paint: string][]} */
  const marks = tokens.learner_logprob_gradient_T
    ? [
        ["underlined: clipped", color("bad")],
        ["forking: high entropy, the model doubts or checks itself", color("tool_wait")],
        ["reflection: high entropy, after a tool's reply", color("weight_sync")],
      ]
    : [];
  return legend([...entries[mode], ...marks]);
}

/**
 * @param {Tokens} tokens
 * @returns {Child}
 */
function curves(tokens) {
  if (!tokens.learner_logprobs_T) return null;
  /** @param {Column} values */
  const sampled = (values) => {
    const at = [...positions(values ?? [], (value, at) => isValue(value) && tokens.sampled_T[at])];
    return { x: at, y: at.map((one) => values?.[one] ?? null) };
  };
  const options = { horizontal: "position", height: 170, cursor: "tokens" };
  return h(
    "div",
    { class: "two" },
    chart({
      ...options,
      title: "Log-probability",
      unit: "by position",
      series: [
        { label: "sampler", ...sampled(tokens.logprobs_T), paint: color("run-0") },
        {
          label: "learner",
          ...sampled(tokens.learner_logprobs_T),
          paint: color("run-1"),
          dash: [4, 3],
        },
      ],
    }),
    chart({
      ...options,
      title: "Ratio",
      unit: "learner / sampler, by position",
      series: [{ label: "ratio", ...sampled(tokens.ratio_T), paint: color("run-2") }],
    }),
  );
}
