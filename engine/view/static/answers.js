// What the server answers (engine/view/questions.py and answers/), by the names of its Python.
// Times end in _s and are seconds; columns of one answer have the same length.

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
 * }} Answers
 */

/**
 * @typedef {{
 *   "run-again": RunAgain,
 *   "rivals": Rivals,
 *   "replay": Replay,
 * }} Actions
 */

/** @typedef {{ follow: boolean, runs: Run[] }} Runs */

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
 *   rollouts: number[],
 *   problems: string[],
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
 *   measured: boolean,
 * }} Now
 */

/**
 * @typedef {{
 *   text: string,
 *   figures: Record<string, number>,
 *   option: string,
 *   value: unknown,
 * }} Finding
 */

/**
 * @typedef {{
 *   step: number,
 *   source: "recording" | "rollouts",
 *   started_at: number | null,
 *   groups: Group[],
 * }} Groups
 */

/**
 * @typedef {{
 *   group: number,
 *   prompt_id: string,
 *   question: string,
 *   answer: string,
 *   source: string,
 *   drop: string | null,
 *   waste: Record<string, number>,
 *   refills: number,
 *   node: string,
 *   whole: boolean,
 *   trajectories: Member[],
 * }} Group
 */

/**
 * @typedef {{
 *   sample: number,
 *   reward: number | null,
 *   kept: boolean,
 *   advantage: number | null,
 *   reasons: Record<string, number>,
 *   stop: string,
 *   error: [string, string] | null,
 *   tokens: number,
 *   turns: Bar[],
 * }} Member
 */

/**
 * The length of a turn. Times and replica are null where only rollouts are kept.
 * @typedef {{
 *   tokens: number,
 *   replica: number | null,
 *   queued_s: number | null,
 *   started_s: number | null,
 *   finished_s: number | null,
 *   calls: [outcome: string, dispatched_s: number | null, finished_s: number | null][],
 * }} Bar
 */

/**
 * @typedef {{
 *   source: "recording" | "rollouts",
 *   step: number,
 *   group: number,
 *   prompt_id: string,
 *   messages: { role: string, content: string }[],
 *   expected: string,
 *   drop: string | null,
 *   whole: boolean,
 *   started_at?: number,
 *   wall_s?: number,
 *   seed?: string,
 *   sample: number,
 *   temperature?: number,
 *   stop: string,
 *   error: [string, string] | null,
 *   reward: number | null,
 *   scores: Record<string, number>,
 *   kept: boolean,
 *   advantage: number | null,
 *   answer?: string | null,
 *   reasons: Record<string, number>,
 *   prompt_tokens?: number,
 *   sampled_tokens: number,
 *   text?: string,
 *   sequences: Sequence[],
 * }} Trajectory
 */

/** @typedef {{ turns: Turn[], tokens: Tokens | null }} Sequence */

/**
 * @typedef {{
 *   start: number,
 *   end: number,
 *   text: string | null,
 *   replica?: number,
 *   cached_tokens?: number,
 *   queued_s?: number,
 *   started_s?: number,
 *   finished_s?: number,
 *   truncated?: boolean,
 *   calls: Call[],
 *   placed: Placed[],
 * }} Turn
 */

/**
 * @typedef {{
 *   name: string,
 *   arguments: string,
 *   outcome: string,
 *   reply: string,
 *   closed_s?: number,
 *   dispatched_s?: number,
 *   finished_s?: number,
 *   overlap_s?: number,
 *   executed?: boolean,
 *   jailed?: boolean,
 * }} Call
 */

/**
 * @typedef {{
 *   at_s: number,
 *   replica: number,
 *   rule: string,
 *   headroom_blocks: number,
 *   stay_s: number,
 *   go_s: number,
 *   free_blocks: Record<string, number>,
 * }} Placed
 */

/**
 * One value a token; null where it was not recorded, which for whole columns holds too.
 * @typedef {{
 *   ids: number[],
 *   text: string[] | null,
 *   sampled: number[],
 *   logprob?: (number | null)[] | null,
 *   learner_logprob?: (number | null)[] | null,
 *   ratio?: (number | null)[] | null,
 *   entropy?: (number | null)[] | null,
 *   push?: (number | null)[] | null,
 *   version?: number[] | null,
 *   forking?: number[],
 *   reflection?: number[],
 * }} Tokens
 */

/**
 * @typedef {{
 *   first: number,
 *   last: number,
 *   started_at: number,
 *   seconds: number,
 *   left_out: number,
 *   replicas: ReplicaLane[],
 *   tracks: { node: string, track: string, spans: Spans }[],
 *   instants: [track: string, at_s: number, name: string, args: Record<string, unknown>][],
 *   lag: [at_s: number, lag_s: number][],
 *   steps: [step: number, from_s: number, to_s: number][],
 * }} Timeline
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
 *   waited_s: number,
 *   cached_tokens: number,
 *   input_tokens: number,
 * }} Decision
 */

/**
 * @typedef {{
 *   steps: number[],
 *   at: number[],
 *   latency_s: number[],
 *   overlap_s: number[],
 *   tool: string[],
 *   outcome: string[],
 *   executed: boolean[],
 *   slowest: SlowCall[],
 * }} ToolCalls
 */

/**
 * @typedef {{
 *   step: number,
 *   group: number,
 *   sample: number,
 *   call: number,
 *   tool: string,
 *   outcome: string,
 *   latency_s: number,
 *   arguments: string,
 *   reply: string,
 * }} SlowCall
 */

/**
 * @typedef {{
 *   step: number,
 *   ages: Record<string, number>,
 *   positions: { position: number[], mismatch: number[], entropy: number[] },
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
 *   recorded: { outcome: string, reply: string, latency_s: number },
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
 *     preemptions: number,
 *     recomputed_tokens: number,
 *   }[],
 * }} Rivals
 */

/**
 * @typedef {{
 *   recorded: Told,
 *   again: Told,
 *   first_difference: number | null,
 *   weights: string,
 * }} Replay
 */

/**
 * @typedef {{
 *   turns: {
 *     text: string,
 *     tokens: number,
 *     calls: { name: string, outcome: string, reply: string }[],
 *   }[],
 *   stop: string,
 *   tokens: number,
 *   error: string | null,
 *   reward: number | null,
 * }} Told
 */

export {};
