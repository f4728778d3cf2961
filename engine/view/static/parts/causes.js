// What a replica may do or wait for: colours and words, the same on every page.

import { color } from "view/parts/dom";

export const CAUSES = [
  "busy",
  "tool_wait",
  "long_tail",
  "kv_blocked",
  "staleness_gate",
  "reward",
  "weight_sync",
  "host",
  "down",
];

const TEXTS = {
  busy: "sampling",
  tool_wait: "waits for tools",
  long_tail: "waits for the last rollouts",
  kv_blocked: "waits for KV blocks",
  staleness_gate: "waits for the learner",
  reward: "waits for grading",
  weight_sync: "loads weights",
  host: "waits for the node",
  down: "dead",
};

export const causeText = (cause) => TEXTS[cause] ?? cause.replaceAll("_", " ");
export const causeColor = (cause) => color(cause) || color("other");

// What limits a run (engine.diagnosis.limit.Limit), by the cause whose colour it has.
const LIMITS = {
  "dead replica": "down",
  host: "host",
  tool: "tool_wait",
  kv: "kv_blocked",
  tail: "long_tail",
  reward: "reward",
  learner: "staleness_gate",
  sync: "weight_sync",
  staleness: "staleness_gate",
  none: "busy",
};

export const limitColor = (limit) => causeColor(LIMITS[limit] ?? "other");
export const limitText = (limit) => (limit === "none" ? "sampling at full width" : limit);
