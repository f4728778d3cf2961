// What the server answers (engine/view/questions.py and answers/), by the names of its Python.
// Names that end in _s are seconds, those that end in _at moments in seconds since 1970. Columns of
// one answer have the same length; those whose names end in _T have one value a token.

/**
 * @typedef {{
 *   "runs": Runs,
 *   "metrics": MetricsAnswer,
 *   "now": Now,
 *   "groups": Groups,
 *   "members": Members,
 *   "trajectory": Trajectory,
 *   "timeline": Timeline,
 *   "placement": Placement,
 *   "decisions": Decisions,
 *   "tool-calls": ToolCalls,
 *   "tokens": TokenFigures,
 *   "about": About,
 *   "owner": Owner,
 *   "in-flight": InFlight,
 *   "run-list": RunList,
 *   "open": { number: number },
 *   "meanings": Meanings,
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

/**
 * listed: whether the page was opened for folders with runs in them.
 * @typedef {{ follow: boolean, now: number, listed: boolean, runs: Run[] }} Runs
 */

/**
 * A run that was found. number: its number among those that are open.
 * @typedef {{
 *   path: string,
 *   name: string,
 *   state: Run["state"],
 *   age_s: number,
 *   step: number,
 *   steps: number | null,
 *   accuracy: number | null,
 *   recipe: string,
 *   number: number | null,
 *   fault: string,
 * }} FoundRun
 */

/** @typedef {{ below: string[], runs: FoundRun[] }} RunList */

/**
 * The unit and meaning of each metric of a run; null for those of the recipe's own.
 * @typedef {Record<string, string | null>} Meanings
 */

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

/**
 * step, group: null in an evaluation. replica: -1 for none. began, since: moments.
 * @typedef {{
 *   prompt: string,
 *   step: number | null,
 *   group: number | null,
 *   sample: number,
 *   state: "starting" | "queued" | "sampling" | "tool call" | "agent" | "grading",
 *   turn: number,
 *   tokens: number,
 *   replica: number,
 *   began: number,
 *   since: number,
 * }} RolloutUnderWay
 */

/**
 * @typedef {{
 *   prompt: string,
 *   step: number | null,
 *   group: number | null,
 *   sample: number,
 *   stop: string,
 *   turns: number,
 *   tokens: number,
 *   reward: number | null,
 *   began: number,
 *   ended: number,
 * }} RolloutEnded
 */

/**
 * written: whether the run wrote any of it. counts: of all rollouts under way, by
 * state. elsewhere: whether other machines have rollouts too.
 * @typedef {{
 *   state: Run["state"],
 *   written: boolean,
 *   age_s: number,
 *   now_at: number,
 *   elsewhere: boolean,
 *   counts: Record<string, number>,
 *   under_way: RolloutUnderWay[],
 *   ended: RolloutEnded[],
 * }} InFlight
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

/**
 * longest_s: since the step began. first: the trajectory to show if none is named.
 * @typedef {{
 *   step: number,
 *   started_at: number,
 *   groups_written: number,
 *   longest_tokens: number,
 *   longest_s: number,
 *   first: { group: number, sample: number } | null,
 *   groups: Group[],
 * }} Groups
 */

/**
 * samples, rewards and tokens have a value for each trajectory; kept, wrong, cut and failed are
 * indices of trajectories.
 * @typedef {{
 *   number: number,
 *   node: string,
 *   whole: boolean,
 *   drop: string | null,
 *   waste: Record<string, number>,
 *   refills: number,
 *   prompt_id: string,
 *   question: string,
 *   samples: number[],
 *   rewards: (number | null)[],
 *   tokens: number[],
 *   kept: number[],
 *   wrong: number[],
 *   cut: number[],
 *   failed: number[],
 * }} Group
 */

/** @typedef {{ step: number, group: number, trajectories: Member[] }} Members */

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
 *   queue_s: number | null,
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
 *   from: number,
 *   to: number,
 *   replicas: ReplicaLane[],
 *   replica_count: number,
 *   tracks: Track[],
 *   lag: [at_s: number, lag_s: number][],
 *   steps: [step: number, from_s: number, to_s: number][],
 * }} Timeline
 */

/**
 * A track has spans, or a density if too many of its lanes are busy. lanes: how many are busy.
 * picked: which of its trajectories are shown; null for all.
 * @typedef {{
 *   node: string,
 *   track: string,
 *   lanes: number,
 *   picked: string | null,
 *   spans: Spans | null,
 *   density: Density | null,
 * }} Track
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
 *   count: number,
 *   merged: number,
 * }} Spans
 */

/** @typedef {{ step: number, group: number, sample: number }} Owner */

/**
 * page: how many decisions a page of them has. groups: how many can be read, of groups_written.
 * @typedef {{
 *   step: number,
 *   started_at: number,
 *   count: number,
 *   page: number,
 *   groups: number,
 *   groups_written: number,
 *   rules: Rule[],
 * }} Placement
 */

/**
 * headroom_blocks, waited_s, cached: means.
 * @typedef {{
 *   rule: string,
 *   count: number,
 *   headroom_blocks: number,
 *   waited_s: number,
 *   cached: number,
 * }} Rule
 */

/** @typedef {{ step: number, page: number, decisions: Decision[] }} Decisions */

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
 * asked: how many recorded steps were asked for; steps: those that were counted; damage: what of
 * them cannot be read.
 * @typedef {{
 *   asked: number,
 *   steps: number[],
 *   damage: string[],
 *   count: number,
 *   kinds: CallKind[],
 *   histogram: { counts: number[], edges_s: number[] } | null,
 *   slowest: SlowCall[],
 * }} ToolCalls
 */

/**
 * queue_s, run_s: medians; null where that was not measured.
 * @typedef {{
 *   name: string,
 *   outcome: string,
 *   executed: boolean,
 *   count: number,
 *   p50_s: number,
 *   p90_s: number,
 *   p99_s: number,
 *   queue_s: number | null,
 *   run_s: number | null,
 * }} CallKind
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
 *   summary_fault: string | null,
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
 *   basis: string,
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
