// What the server answers (engine/view/questions.py and answers/), by the names of its Python.
// Names that end in _s are seconds, those that end in _at moments in seconds since 1970. Columns of
// one answer have the same length; those whose names end in _T have one value a token.

/**
 * @typedef {{
 *   "runs": Runs,
 *   "metrics": MetricsAnswer,
 *   "now": Now,
 *   "groups": Groups,
 *   "trajectory": Trajectory,
 *   "timeline": Timeline,
 *   "placement": Placement,
 *   "tool-calls": ToolCalls,
 *   "tokens": TokenFigures,
 *   "about": About,
 *   "changes": Change[],
 *   "comparison": Comparison,
 * }} Answers
 */

/**
 * @typedef {{
 *   "run-again": RunAgain,
 *   "rivals": Rivals,
 *   "replay": Replay,
 *   "reverify": Reverified,
 * }} Actions
 */

/** @typedef {{ follow: boolean, now: number, runs: Run[] }} Runs */

/**
 * @typedef {{
 *   name: string,
 *   path: string,
 *   state: "running" | "finished" | "stopped",
 *   epoch: number,
 *   rows: number,
 *   last: number,
 *   steps: number | null,
 *   family: string,
 *   recorded: number[],
 *   timeline: number[],
 *   problems: string[],
 *   changed_at: number,
 *   step_s: number | null,
 * }} Run
 */

/**
 * A metric has null in the rows that do not measure it.
 * @typedef {{ step: number[], values: Record<string, (number | null)[]> }} Metrics
 */
/** @typedef {Metrics & { after: number }} MetricsAnswer */

/**
 * @typedef {{
 *   sentence: string,
 *   limit: string,
 *   alarms: Finding[],
 *   advice: Finding[],
 *   lost: Record<string, number>,
 *   steps: [number, number] | null,
 *   figures: Record<string, number | null>,
 *   measured: boolean,
 *   pace: Pace,
 * }} Now
 */

/** @typedef {{ step_s: number | null, age_s: number, stalled: boolean, sentence: string }} Pace */

/**
 * @typedef {{
 *   text: string,
 *   figures: Record<string, number>,
 *   option: string,
 *   value: unknown,
 * }} Finding
 */

/** @typedef {{ step: number, started_at: number, groups: Group[] }} Groups */

/**
 * @typedef {{
 *   number: number,
 *   node: string,
 *   whole: boolean,
 *   drop: string | null,
 *   waste: Record<string, number>,
 *   refills: number,
 *   prompt_id: string,
 *   question: string,
 *   trajectories: Member[],
 * }} Group
 */

/**
 * @typedef {{
 *   kept: boolean,
 *   advantage: number | null,
 *   reasons: Record<string, number>,
 * }} Selection
 */

/** @typedef {{ boundary: string, message: string }} RolloutError */

/**
 * @typedef {Selection & {
 *   sample: number,
 *   reward: number | null,
 *   stop: string,
 *   error: RolloutError | null,
 *   turns: Outline[],
 * }} Member
 */

/**
 * The part of a turn that shows its length and its times.
 * @typedef {{
 *   start: number,
 *   end: number,
 *   replica: number,
 *   queued_at: number,
 *   started_at: number,
 *   finished_at: number,
 *   tool_uses: Pick<ToolUse, "outcome" | "dispatched_at" | "finished_at">[],
 * }} Outline
 */

/**
 * @typedef {{
 *   id: string,
 *   messages: { role: string, content: string }[],
 *   answer: string,
 *   tools: string[] | null,
 *   reward: string,
 *   source: string,
 *   metadata: Record<string, unknown>,
 *   limits: Record<string, unknown> | null,
 * }} Prompt
 */

/**
 * @typedef {Selection & {
 *   step: number,
 *   group: number,
 *   node: string,
 *   whole: boolean,
 *   drop: string | null,
 *   prompt: Prompt,
 *   sample: number,
 *   temperature: number,
 *   stop: string,
 *   error: RolloutError | null,
 *   reward: number | null,
 *   scores: Record<string, number | null>,
 *   answer: string | null,
 *   started_at: number,
 *   finished_at: number,
 *   seed: string,
 *   parts: Part[],
 * }} Trajectory
 */

/**
 * A token sequence: the main one first, then those of an agent that did not only append.
 * @typedef {{ turns: Turn[], tokens: Tokens | null }} Part
 */

/**
 * @typedef {Omit<Outline, "tool_uses"> & {
 *   text: string | null,
 *   tool_uses: ToolUse[],
 *   cached_tokens: number,
 *   truncated: boolean,
 *   placed: Placed[],
 * }} Turn
 */

/**
 * @typedef {{
 *   name: string,
 *   arguments: string,
 *   outcome: string,
 *   response: string,
 *   closed_at: number,
 *   dispatched_at: number,
 *   finished_at: number,
 *   overlap_s: number,
 *   executed: boolean,
 *   jailed: boolean,
 * }} ToolUse
 */

/**
 * @typedef {{
 *   at: number,
 *   replica: number,
 *   rule: string,
 *   headroom_blocks: number,
 *   stay_s: number,
 *   go_s: number,
 *   free_blocks: Record<string, number>,
 * }} Placed
 */

/** @typedef {(number | null)[] | null} Column null for a token, or for all, without a value */

/**
 * @typedef {{
 *   token_ids_T: number[],
 *   text_T: string[] | null,
 *   sampled_T: boolean[],
 *   versions_T: number[] | null,
 *   logprobs_T: Column,
 *   learner_logprobs_T: Column,
 *   learner_entropy_T: Column,
 *   learner_logprob_gradient_T: Column,
 *   ratio_T: Column,
 *   forking_T?: boolean[],
 *   reflection_T?: boolean[],
 * }} Tokens
 */

/**
 * @typedef {{
 *   first: number,
 *   last: number,
 *   started_at: number,
 *   seconds: number,
 *   replicas: ReplicaLane[],
 *   tracks: Track[],
 *   lag: [at_s: number, lag_s: number][],
 *   steps: [step: number, from_s: number, to_s: number][],
 * }} Timeline
 */

/**
 * A track has spans, or a density if it has too many lanes.
 * @typedef {{ node: string, track: string, spans: Spans | null, density: Density | null }} Track
 */

/**
 * How many lanes are busy in each of equal parts of the time, by the names of spans.
 * @typedef {{ lanes: number, busy: Record<string, number[]> }} Density
 */

/**
 * @typedef {{
 *   node: string,
 *   replica: number,
 *   idle: [cause: string, from_s: number, to_s: number][],
 *   engine: Partial<EngineSteps>,
 * }} ReplicaLane
 */

/**
 * @typedef {{
 *   at: number[],
 *   used_blocks: number[],
 *   running: number[],
 *   waiting: number[],
 *   preempted: number[],
 *   prefilled: number[],
 * }} EngineSteps
 */

/**
 * @typedef {{
 *   lane: number[],
 *   name: string[],
 *   start: number[],
 *   end: number[],
 *   args: Record<string, unknown>[],
 *   merged: number,
 * }} Spans
 */

/**
 * @typedef {{
 *   step: number,
 *   started_at: number,
 *   decisions: Decision[],
 *   rules: Record<string, number>,
 *   replicas: Record<string, number>,
 * }} Placement
 */

/**
 * @typedef {Placed & {
 *   group: number,
 *   sample: number,
 *   turn: number,
 *   start: number,
 *   cached_tokens: number,
 *   queued_at: number,
 *   started_at: number,
 * }} Decision
 */

/**
 * @typedef {{
 *   steps: number[],
 *   name: string[],
 *   outcome: string[],
 *   executed: boolean[],
 *   latency_s: number[],
 *   slowest: SlowCall[],
 * }} ToolCalls
 */

/**
 * @typedef {ToolUse & {
 *   step: number,
 *   group: number,
 *   sample: number,
 *   call: number,
 * }} SlowCall
 */

/**
 * @typedef {{
 *   step: number,
 *   ages: Record<string, number>,
 *   positions: { position: number[], mismatch: (number | null)[], entropy: number[] },
 * }} TokenFigures
 */

/**
 * @typedef {{
 *   path: string,
 *   state: Run["state"],
 *   config: Record<string, unknown>,
 *   given: string[],
 *   argv: string[],
 *   versions: Record<string, string>,
 *   summary: Record<string, any> | null,
 *   checkpoints: { step: number, bytes: number, written_at: number }[],
 *   journal_steps: number[],
 *   recording: Index | null,
 *   waste: Record<string, number>,
 *   notes: string[],
 *   learner_log: string[],
 *   problems: string[],
 * }} About
 */

/**
 * @typedef {{
 *   step: number,
 *   before: [first: number, last: number],
 *   after: [first: number, last: number],
 *   before_s: number,
 *   after_s: number,
 *   parts: Record<string, number>,
 *   reasons: { metric: string, before: number, after: number, text: string }[],
 *   resumed: boolean,
 *   sentence: string,
 * }} Change
 */

/**
 * @typedef {{
 *   name: string,
 *   seconds: number,
 *   low: number | null,
 *   high: number | null,
 * }} StepPart
 */

/**
 * @typedef {{
 *   steps: number,
 *   a_s: number,
 *   b_s: number,
 *   total: StepPart,
 *   parts: StepPart[],
 *   tokens: number | null,
 *   unlike: string[],
 *   differs: string[],
 *   sentence: string,
 * }} Comparison
 */

/**
 * @typedef {{
 *   format: number,
 *   newest: number,
 *   every: number,
 *   max_mb: number,
 *   last: number,
 *   whole: number[],
 *   total_bytes: number,
 *   problems: string[],
 * }} Index
 */

/**
 * @typedef {{
 *   code: string,
 *   outcome: string,
 *   stdout: string,
 *   stderr: string,
 *   display: string,
 *   wall_s: number,
 *   cpu_s: number,
 *   peak_memory_bytes: number,
 *   recorded: ToolUse,
 * }} RunAgain
 */

/**
 * @typedef {{
 *   sentence: string,
 *   lever: string,
 *   rows: {
 *     policy: string,
 *     makespan_s: number,
 *     ratio: number,
 *     verdict: string,
 *     preemptions: number,
 *     recomputed_tokens: number,
 *   }[],
 * }} Rivals
 */

/** @typedef {{ sentence: string, notes: string[] }} Reverified */

/**
 * @typedef {{
 *   recorded: ReplaySide,
 *   again: ReplaySide,
 *   first_difference: number | null,
 *   weights: string,
 * }} Replay
 */

/**
 * @typedef {{
 *   turns: {
 *     text: string,
 *     tokens: number,
 *     tool_uses: Pick<ToolUse, "name" | "outcome" | "response">[],
 *   }[],
 *   stop: string,
 *   tokens: number,
 *   error: string | null,
 *   reward: number | null,
 * }} ReplaySide
 */

export {};
