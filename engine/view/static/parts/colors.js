// Gives causes and limits their texts and the colours of style.css, the same on every page.

import { spaced } from "view/parts/format";

/** @param {string} name */
export const color = (name) =>
  getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** @param {number} run */
export const runColor = (run) => color(`run-${run % 6}`);

/** Returns a colour through which text can be read. @param {string} name */
export const faded = (name, share = 60) =>
  `color-mix(in srgb, var(--${name}) ${Math.round(share)}%, transparent)`;

/** What a replica does or waits for, in the order in which columns are stacked. */
export const CAUSES = [
  "busy",
  "evaluation",
  "tool_wait",
  "long_tail",
  "kv_blocked",
  "staleness_gate",
  "reward",
  "stage",
  "weight_sync",
  "host",
  "down",
];

/** @type {Record<string, string>} */
const TEXTS = {
  busy: "sampling",
  evaluation: "evaluates",
  tool_wait: "waits for tools",
  long_tail: "waits for the last rollouts",
  kv_blocked: "waits for KV blocks",
  staleness_gate: "waits for the learner",
  reward: "waits for grading",
  stage: "waits for a stage of yours",
  weight_sync: "loads weights",
  host: "waits for the node",
  down: "dead",
};

/** @param {string} cause */
export const causeText = (cause) => TEXTS[cause] ?? spaced(cause);

/** @param {string} cause */
export const causeColor = (cause) => color(cause) || color("other");

/**
 * The cause whose colour a limit of the run has (engine.diagnosis.step_window.Limit).
 * @type {Record<string, string>}
 */
const LIMITS = {
  "dead replica": "down",
  machine: "down",
  "slow replica": "down",
  stage: "stage",
  host: "host",
  checkpoint: "other",
  evaluation: "other",
  tool: "tool_wait",
  kv: "kv_blocked",
  tail: "long_tail",
  reward: "reward",
  learner: "staleness_gate",
  sync: "weight_sync",
  staleness: "staleness_gate",
  none: "busy",
};

/** @param {string} limit */
export const limitColor = (limit) => causeColor(LIMITS[limit] ?? "other");

/**
 * What the time of a step goes to under each limit. A limit may hold while replicas sample, so
 * these are other words than those for what an idle replica waits for.
 */
const LIMIT_TEXTS = {
  "dead replica": "a dead replica",
  "slow replica": "a slow replica",
  machine: "other processes",
  stage: "a stage of yours",
  host: "the event loop, the node",
  checkpoint: "checkpoints",
  evaluation: "evaluations",
  tool: "tools",
  kv: "KV blocks",
  tail: "the last rollouts",
  reward: "grading",
  learner: "the learner",
  sync: "weight transfer",
  staleness: "more staleness would save",
  none: "sampling at full width",
};

/** @param {string} limit */
export const limitText = (limit) =>
  /** @type {Record<string, string>} */ (LIMIT_TEXTS)[limit] ?? limit;

/** The parts of a step in metrics.jsonl: label, metric, colour. */
export const STEP_PARTS = [
  { label: "rollout", metric: "time/rollout_s", paint: "busy" },
  { label: "learner", metric: "time/learn_s", paint: "staleness_gate" },
  { label: "weights", metric: "time/sync_s", paint: "weight_sync" },
];
