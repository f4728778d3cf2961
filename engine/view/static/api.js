// Gets answers from the server, or in an exported file from the answers that it carries.

/** @import { Actions, Answers, Metrics } from "view/answers" */
/** @typedef {Record<string, string | number>} Query */

const carried = document.getElementById("answers")?.textContent;
/** @type {Record<string, any> | null} */
const answers = carried ? JSON.parse(carried) : null;

export const exported = answers !== null;

/** One line that says what is missing and why. */
export class Problem extends Error {}

/**
 * @param {string} name
 * @param {Query} query
 */
function addressOf(name, query) {
  const text = new URLSearchParams(
    Object.entries(query).map(([key, value]) => [key, String(value)]),
  ).toString();
  return text ? `${name}?${text}` : name;
}

/**
 * Returns the answer to a question. Throws Problem where there is none.
 * @template {keyof Answers} Name
 * @param {Name} name
 * @param {Query} query
 * @returns {Promise<Answers[Name]>}
 */
export async function ask(name, query = {}) {
  const address = addressOf(name, query);
  if (answers) {
    if (address in answers) return answers[address];
    throw new Problem("An exported file holds only the newest steps of a run.");
  }
  let response;
  try {
    response = await fetch(`/api/${address}`);
  } catch {
    throw new Problem("The server does not answer. Fix: start the page again.");
  }
  return contentOf(response);
}

/**
 * Has the server run something. Throws Problem where that fails.
 * @template {keyof Actions} Name
 * @param {Name} name
 * @param {Record<string, number>} values
 * @returns {Promise<Actions[Name]>}
 */
export async function request(name, values) {
  if (answers) throw new Problem("An exported file cannot run anything.");
  return contentOf(await fetch(`/api/${name}`, { method: "POST", body: JSON.stringify(values) }));
}

/** @param {Response} response */
async function contentOf(response) {
  const content = await response.json();
  if (!response.ok) throw new Problem(content.problem ?? `The server answers ${response.status}.`);
  return content;
}

/** @type {Map<number, Promise<Metrics>>} the rows so far, by run */
const known = new Map();

/**
 * Returns all rows of a run; asks only for those that have come since the last call. Each call
 * waits for the one before, so that no row comes twice.
 * @param {number} run
 * @returns {Promise<Metrics>}
 */
export function metrics(run) {
  /** @type {Promise<Metrics>} */
  const before = known.get(run) ?? Promise.resolve({ step: [], values: {} });
  const extended = before.then((rows) => withNewRows(run, rows));
  known.set(
    run,
    extended.catch(() => before),
  );
  return extended;
}

/**
 * @param {number} run
 * @param {Metrics} rows
 * @returns {Promise<Metrics>}
 */
async function withNewRows(run, rows) {
  const count = rows.step.length;
  if (answers && count) return rows;
  const fresh = await ask("metrics", answers ? { run } : { run, after: count });
  /** @type {Metrics["values"]} */
  const values = {};
  for (const name of new Set([...Object.keys(rows.values), ...Object.keys(fresh.values)])) {
    const old = rows.values[name] ?? new Array(count).fill(null);
    values[name] = old.concat(fresh.values[name] ?? new Array(fresh.step.length).fill(null));
  }
  return { step: rows.step.concat(fresh.step), values };
}

/**
 * Drops the rows of a run, which a resumed run has written anew.
 * @param {number} run
 */
export const forget = (run) => known.delete(run);

/**
 * Returns the rows that measure a metric, as two columns.
 * @param {Metrics} rows
 * @param {string} name
 * @param {string | null} horizontal a metric for x; the step otherwise
 */
export function column(rows, name, horizontal = null) {
  const axis = horizontal ? (rows.values[horizontal] ?? []) : rows.step;
  /** @type {{ x: number[], y: number[] }} */
  const columns = { x: [], y: [] };
  (rows.values[name] ?? []).forEach((y, row) => {
    const x = axis[row] ?? null;
    if (x === null || y === null) return;
    columns.x.push(x);
    columns.y.push(y);
  });
  return columns;
}

/**
 * Returns a metric as `column` does, with null for each training step that could not measure it: a
 * gap in the curve. An evaluation measures at some steps only, and leaves no gap.
 * @param {Metrics} rows
 * @param {string} name
 * @param {string | null} horizontal
 * @returns {{ x: number[], y: (number | null)[] }}
 */
export function curve(rows, name, horizontal = null) {
  const measured = column(rows, name, horizontal);
  if (!measured.x.length || name.startsWith("eval/")) return measured;
  const axis = horizontal ? (rows.values[horizontal] ?? []) : rows.step;
  const trained = rows.values["time/step_s"] ?? [];
  /** @type {{ x: number[], y: (number | null)[] }} */
  const columns = { x: [], y: [] };
  rows.values[name].forEach((y, row) => {
    const x = axis[row] ?? null;
    if (x === null || (y === null && (trained[row] ?? null) === null)) return;
    columns.x.push(x);
    columns.y.push(y);
  });
  return columns;
}

/**
 * Returns the newest value of a metric; undefined if there is none.
 * @param {Metrics} rows
 * @param {string} name
 */
export const last = (rows, name) => column(rows, name).y.at(-1);
