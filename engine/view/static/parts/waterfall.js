// The pace of two runs as a waterfall: parts of a step that add up to the difference.

import { color } from "view/parts/colors";
import { h, namedCard, note, table } from "view/parts/dom";
import { percent, seconds } from "view/parts/format";

/** @import { Comparison, StepPart } from "view/answers" */

/** @param {number} value */
const signed = (value) => (value > 0 ? "+" : "") + seconds(value);

/**
 * @param {Comparison} comparison
 * @param {string} other name of the run that this one is compared with
 */
export function waterfall(comparison, other) {
  const { sentence, parts, total, a_s, basis } = comparison;
  const bars = placed(parts);
  const low = Math.min(0, ...bars.map(({ from, to }) => Math.min(from, to)));
  const high = Math.max(0, ...bars.map(({ from, to }) => Math.max(from, to)));
  const scale = 100 / (high - low || 1);
  const rows = [...bars, { part: total, from: 0, to: total.seconds }];
  return namedCard(
    "waterfall",
    null,
    h("p", {}, h("b", {}, sentence)),
    h(
      "div",
      { class: "sideways", tabindex: "0" },
      table(
        [
          { name: "part of a step", cell: ({ part }) => part.name },
          { name: `more than ${other}`, number: true, cell: ({ part }) => signed(part.seconds) },
          { name: "of a step", number: true, cell: ({ part }) => percent(part.seconds / a_s, 1) },
          { name: "95 % interval", number: true, cell: ({ part }) => interval(part) },
          { name: "one part after another", cell: (row) => bar(row, low, scale) },
        ],
        rows,
      ),
    ),
    note(
      `The parts add up to the difference of the means of ${basis}. ` +
        "A pale bar is not sure: its interval over the steps contains zero.",
    ),
  );
}

/**
 * Returns where each bar begins and ends: the first at zero, the others where the one before ends.
 * @param {StepPart[]} parts
 */
function placed(parts) {
  let at = 0;
  return parts.map((part) => {
    const from = at;
    at += part.seconds;
    return { part, from, to: at };
  });
}

/** @param {StepPart} part */
const interval = ({ low, high }) =>
  low === null || high === null ? "too few steps" : `${signed(low)} to ${signed(high)}`;

/**
 * @param {{ part: StepPart, from: number, to: number }} row
 * @param {number} low seconds at the left end
 * @param {number} scale percent a second
 */
function bar({ part, from, to }, low, scale) {
  const isSure = part.low !== null && part.high !== null && (part.low > 0 || part.high < 0);
  return h(
    "div",
    { class: "waterfall" },
    h("div", {
      style: {
        marginLeft: `${(Math.min(from, to) - low) * scale}%`,
        width: `${Math.abs(to - from) * scale}%`,
        background: color(part.seconds > 0 ? "bad" : "good"),
        opacity: isSure ? "1" : "0.4",
      },
    }),
  );
}
