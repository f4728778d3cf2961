// Asks the server, or in an exported file its own answers.

const held = document.getElementById("answers");
const answers = held ? JSON.parse(held.textContent) : null;

export const exported = answers !== null;

export class Problem extends Error {}

function address(name, words) {
  const query = new URLSearchParams(words).toString();
  return query ? `${name}?${query}` : name;
}

/** The answer. Raises Problem with a line that says what is missing and why. */
export async function ask(name, words = {}) {
  const where = address(name, words);
  if (answers) {
    if (where in answers) return answers[where];
    throw new Problem(
      "this is not in the exported file, which holds the newest steps of the run only",
    );
  }
  let response;
  try {
    response = await fetch(`/api/${where}`);
  } catch {
    throw new Problem(
      "the server does not answer. Fix: start python -m engine.programs.view again",
    );
  }
  return read(response);
}

/** Asks for something to be done. */
export async function request(name, words) {
  if (answers) throw new Problem("an exported file runs nothing");
  return read(await fetch(`/api/${name}`, { method: "POST", body: JSON.stringify(words) }));
}

async function read(response) {
  const content = await response.json();
  if (!response.ok) throw new Problem(content.problem ?? `the server answers ${response.status}`);
  return content;
}

const kept = new Map(); // run -> the metrics so far

/** All rows of a run as { step, values: { name: [...] } }; asks only for those that have come since. */
export async function metrics(run) {
  const old = kept.get(run);
  const after = answers ? {} : { after: old?.step.length ?? 0 };
  if (answers && old) return old;
  const found = await ask("metrics", { run, ...after });
  const all = old ?? { step: [], values: {} };
  for (const name of new Set([...Object.keys(all.values), ...Object.keys(found.values)])) {
    const before = all.values[name] ?? new Array(all.step.length).fill(null);
    all.values[name] = before.concat(found.values[name] ?? new Array(found.step.length).fill(null));
  }
  all.step = all.step.concat(found.step);
  kept.set(run, all);
  return all;
}

/** A resumed run wrote its rows anew. */
export const forget = (run) => kept.delete(run);

/** The rows in which a metric is there: { step, value }, as two columns. */
export function column(found, name, horizontal = null) {
  const values = found.values[name] ?? [];
  const axis = horizontal ? (found.values[horizontal] ?? []) : found.step;
  const rows = values
    .map((value, row) => [axis[row], value])
    .filter(([x, value]) => value !== null && x !== null && x !== undefined);
  return { x: rows.map((row) => row[0]), y: rows.map((row) => row[1]) };
}

/** As `column`, with null where a step was trained of which it could not be measured: a gap of the curve. */
export function curve(found, name, horizontal = null) {
  const whole = column(found, name, horizontal);
  if (!whole.x.length || name.startsWith("eval/")) return whole; // measured at some steps only
  const trained = found.values["time/step_s"] ?? [];
  const values = found.values[name].map((value, row) =>
    value === null && (trained[row] ?? null) !== null ? undefined : value,
  );
  const rows = column({ ...found, values: { ...found.values, [name]: values } }, name, horizontal);
  return { x: rows.x, y: rows.y.map((value) => value ?? null) };
}

/** The newest value of a metric; undefined where there is none. */
export const last = (found, name) => column(found, name).y.at(-1);
