// Draws a small curve without axes, for beside a figure.

import { number } from "view/parts/format";

const WIDTH = 120;
const HEIGHT = 30;
const MARGIN = 3;

/**
 * x ascends. A missing value is a gap.
 * @param {{
 *   label: string,
 *   x: number[],
 *   y: (number | null)[],
 *   format?: (value: number) => string,
 * }} curve
 */
export function sparkline({ label, x, y, format = number }) {
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  picture.setAttribute("class", "spark");
  picture.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("role", "img");
  const known = y.filter((value) => value !== null);
  if (known.length < 2) {
    picture.setAttribute("aria-label", `${label}: no curve yet`);
    return picture;
  }
  let low = known[0];
  let high = known[0];
  for (const value of known) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  const last = known[known.length - 1];
  picture.setAttribute(
    "aria-label",
    `${label}, from ${format(known[0])} to ${format(last)}, ` +
      `between ${format(low)} and ${format(high)}`,
  );
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  const attributes = {
    d: pathOf(x, y, low, high),
    fill: "none",
    stroke: "var(--accent)",
    "stroke-width": "1.5",
    "vector-effect": "non-scaling-stroke",
    "stroke-linejoin": "round",
  };
  for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
  picture.append(line);
  return picture;
}

/**
 * @param {number[]} x
 * @param {(number | null)[]} y
 * @param {number} low
 * @param {number} high
 */
function pathOf(x, y, low, high) {
  const first = x[0];
  const span = x[x.length - 1] - first || 1;
  const range = high - low;
  let pen = "M";
  const parts = [];
  for (const [at, value] of y.entries()) {
    if (value === null) {
      pen = "M";
      continue;
    }
    const share = range ? (value - low) / range : 0.5;
    const across = (WIDTH * (x[at] - first)) / span;
    const down = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share;
    parts.push(`${pen}${across.toFixed(1)} ${down.toFixed(1)}`);
    pen = "L";
  }
  return parts.join("");
}
