// Formats numbers as text. A missing value is a dash, so that columns stay aligned.

const NONE = "–";

/** @typedef {number | null | undefined} Maybe */

/**
 * @param {unknown} value
 * @returns {value is number}
 */
const isNumber = (value) => typeof value === "number" && !Number.isNaN(value);

/** @param {Maybe} value */
export const fixed = (value, digits = 2) => (isNumber(value) ? value.toFixed(digits) : NONE);

/** @param {Maybe} value */
export const signed = (value, digits = 2) =>
  isNumber(value) ? (value > 0 ? "+" : "") + value.toFixed(digits) : NONE;

/** @param {Maybe} value */
export const whole = (value) =>
  isNumber(value) ? Math.round(value).toLocaleString("en-US") : NONE;

/** @param {Maybe} share */
export const percent = (share, digits = 0) =>
  isNumber(share) ? `${(100 * share).toFixed(digits)} %` : NONE;

/** @param {Maybe} value */
export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size < 1e-3) return `${(1e6 * value).toFixed(0)} µs`;
  if (size < 1) return `${(1e3 * value).toFixed(size < 0.01 ? 1 : 0)} ms`;
  if (size < 120) return `${value.toFixed(size < 10 ? 2 : 1)} s`;
  if (size < 7200) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

/** @param {Maybe} value */
export function bytes(value) {
  if (!isNumber(value)) return NONE;
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} GB`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} MB`;
  if (value >= 1e3) return `${(value / 1e3).toFixed(1)} kB`;
  return `${value} B`;
}

/**
 * Formats a value of any kind; a number gets about four digits.
 * @param {unknown} value
 */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  if (!isNumber(value)) return String(value);
  if (Number.isInteger(value)) return whole(value);
  const size = Math.abs(value);
  if (size >= 1000) return whole(value);
  return size >= 0.001 ? String(Number(value.toPrecision(4))) : value.toExponential(2);
}

/**
 * Returns the name of a metric or a cause as people write it: "tool_wait" is "tool wait".
 * @param {string} name
 */
export const spaced = (name) => name.replaceAll("_", " ");

/** @param {number[]} values */
export const sum = (values) => values.reduce((total, value) => total + value, 0);

/** @param {number[]} values at least one */
export const mean = (values) => sum(values) / values.length;
