"""The names of a run's metrics, the keys of the rows of metrics.jsonl, each with its unit and meaning.

`*` in a name stands for its variable part: such a name is a family, and `member` makes the names in it. The tables of
recipes/runs.md are made from this file. A run of supervised training has some of these, and names of its own
(recipes/rstar2/sft.py).
"""

from __future__ import annotations

# Rollouts of a step

REWARD = "reward"
"""mean reward of the graded trajectories"""
SCORE = "score/*"
"""mean of a score that the reward reports by name: a part of it, or a monitor"""
SCORE_MISSING = "score_missing/*"
"""number of trajectories in which this score could not be had"""

ROLLOUT_RESPONSE_TOKENS = "rollout/response_tokens"
"""sampled tokens per trajectory"""
ROLLOUT_TRAJECTORIES = "rollout/trajectories"
"""number of trajectories in the step's groups"""
ROLLOUT_TRAJECTORIES_TRAINED = "rollout/trajectories_trained"
"""number of trajectories that were trained"""
ROLLOUT_TRAJECTORIES_FAILED = "rollout/trajectories_failed"
"""number of trajectories that were lost to an infrastructure error, which is never trained"""
ROLLOUT_TRAJECTORIES_RESUMED = "rollout/trajectories_resumed"
"""number of trajectories that a resumed run took from the journal; such a step has no rates"""
ROLLOUT_STALENESS_MEAN = "rollout/staleness_mean"
"""versions by which a trained trajectory's oldest token is behind the weights under training, mean"""
ROLLOUT_STALENESS_MAX = "rollout/staleness_max"
"""versions by which the oldest trained token is behind the weights under training"""
ROLLOUT_PREFIX_HIT_RATE = "rollout/prefix_hit_rate"
"""share of prompt tokens that a replica found in its KV cache"""
ROLLOUT_TAIL_S = "rollout/tail_s"
"""seconds with at most an eighth of the step's peak of running requests, because nearly all trajectories had ended"""

STOP = "stop/*"
"""number of trajectories by why they ended: `answer`, `length`, `turns`, `deadline`, `error`"""

GROUPS_ALL = "groups/all"
"""number of groups of the step"""
GROUPS_SOLVED = "groups/solved"
"""number of flat groups that are solved: at least half of their rewards are the full one (by the median)"""
GROUPS_FLAT = "groups/flat"
"""number of groups that were dropped because the rewards that the selector keeps are all equal"""
GROUPS_ERROR = "groups/error"
"""number of groups that were dropped because nothing could be graded"""
GROUPS_DROPPED = "groups/*"
"""number of groups that a stage of yours dropped, by its reason"""
GROUPS_REFILLED = "groups/refilled"
"""number of prompts that took the place of a dropped group (`refills`)"""

DISTILL_KL = "distill/kl"
"""nats: mean over the sampled tokens of the sampler's log-probability less the teacher's, an estimate of KL(student ||
teacher) before the step's update; the next step's is that after it"""
DISTILL_CLIPPED = "distill/clipped"
"""share of the sampled tokens whose difference from the teacher is beyond `kl_clip`; none with `top_k`, which
clips nothing"""
DISTILL_TOKENS = "distill/tokens"
"""number of sampled tokens that the teacher has scored"""
DISTILL_TEACHER_S = "distill/teacher_s"
"""seconds in which this machine's teacher had something to score; none if all scores came from nodes or the journal"""
DISTILL_OVERLAP = "distill/overlap"
"""share of these seconds in which rollouts were under way too"""

TOKENS_GENERATED = "tokens/generated"
"""tokens that were sampled: those trained and all waste"""
TOKENS_TRAINED = "tokens/trained"
"""sampled tokens that were trained"""
TOKENS_GOODPUT = "tokens/goodput"
"""share of the sampled tokens that were trained"""
TOKENS_PER_S = "tokens/per_s"
"""sampled tokens per second of the whole step"""
WASTE = "waste/*_tokens"
"""sampled tokens that were not trained, by reason: `flat`, `error`, `surplus` (cancelled extra samples),
`not_selected` (by RoC, for example), `superseded`, `forced` (a grammar decided)"""

TOOLS_ERROR_SHARE = "tools/error_share"
"""failed tool calls / calls, in all graded trajectories"""
TOOLS_ERROR_SHARE_CORRECT = "tools/error_share_correct"
"""failed tool calls / calls, in correct trajectories"""
TOOLS_RATE = "tools/rate"
"""share of the graded trajectories that call a tool"""
TOOLS_CALLS = "tools/calls"
"""number of executed calls"""
TOOLS_CALLS_REFUSED = "tools/calls_refused"
"""number of calls that were answered without running: malformed, or of an unknown tool"""
TOOLS_CALLS_JAILED = "tools/calls_jailed"
"""number of calls that were executed in the sandbox"""
TOOLS_CALLS_PER_S = "tools/calls_per_s"
"""executed calls per second of the whole step"""
TOOLS_LATENCY_P50_MS = "tools/latency_p50_ms"
"""milliseconds from a call's closing tag to its result, median"""
TOOLS_LATENCY_P99_MS = "tools/latency_p99_ms"
"""milliseconds from a call's closing tag to its result, 99th percentile"""
TOOLS_QUEUE_P50_MS = "tools/queue_p50_ms"
"""milliseconds that a call waits before it runs, for a slot of the sandbox, median; of tools that measure it"""
TOOLS_QUEUE_P99_MS = "tools/queue_p99_ms"
"""milliseconds that a call waits before it runs, for a slot of the sandbox, 99th percentile"""
TOOLS_RUN_P50_MS = "tools/run_p50_ms"
"""milliseconds of a call without its queue, median; of tools that measure it"""
TOOLS_RUN_P99_MS = "tools/run_p99_ms"
"""milliseconds of a call without its queue, 99th percentile"""
TOOLS_OVERLAP_SAVED_MS = "tools/overlap_saved_ms"
"""milliseconds per call that passed while its turn was still being generated"""
TOOLS_WAIT = "tools/wait/*_s"
"""seconds in which trajectories waited for this tool after their turn had ended, summed over them"""
TOOLS_STARVED_S = "tools/starved_s"
"""seconds with at most an eighth of the step's peak of running requests, while at least as many trajectories waited
for tools as ran"""

# Time and machine

TIME_STEP_S = "time/step_s"
"""seconds of the step, from the end of the one before until its weights are live"""
TIME_ROLLOUT_S = "time/rollout_s"
"""seconds until the step's last group was there"""
TIME_LEARN_S = "time/learn_s"
"""seconds in the learner"""
TIME_SYNC_S = "time/sync_s"
"""seconds until the new weights were live on all replicas"""
TIME_TRAIN_TOTAL_S = "time/train_total_s"
"""seconds of training so far, without evaluations"""
TIME_EVAL_S = "time/eval_s"
"""seconds of the evaluation"""
TIME_CHECKPOINT_S = "time/checkpoint_s"
"""seconds in which the step could not be trained, since the checkpoint of the one before was being written"""
TIME_LEASE_WAIT_S = "time/lease_wait_s"
"""seconds in which no group could begin, since `max_staleness` forbade it"""

CANARY_MEAN_ABS = "canary/mean_abs"
"""mean difference between a replica's and the learner's log-probabilities of the canary, of the worst replica; left out
if none was compared"""
CANARY_MAX_ABS = "canary/max_abs"
"""largest difference between a replica's and the learner's log-probabilities of the canary"""

REPLICAS_BUSY_S = "replicas/busy_s"
"""seconds with a running request, summed over the replicas"""
REPLICAS_BUSY_SHARE = "replicas/busy_share"
"""share of the replicas' seconds that had a running request"""
REPLICAS_LIVE = "replicas/live"
"""number of replicas that serve at the end of the step"""
REPLICAS_DEATHS = "replicas/deaths"
"""number of replicas that died in the step"""
REPLICAS_TOKEN_MS = "replicas/token_ms/*"
"""milliseconds for a token of a turn on the replica that is named: one far above the others is slow"""
IDLE = "idle/*_s"
"""seconds without a running request, by cause (see below), summed over the replicas; with `replicas/busy_s` they are
all seconds there were"""

KV_BLOCKED_S = "kv/blocked_s"
"""seconds in which a trajectory waited for KV blocks"""
KV_PREEMPTIONS = "kv/preemptions"
"""number of requests that lost their KV blocks and were computed again"""
KV_PEAK = "kv_peak/replica*"
"""largest share of a replica's KV blocks in use during the step"""

NODES_LIVE = "nodes/live"
"""number of rollout nodes now, on a run over several machines"""
NODES_GROUPS = "nodes/*/groups"
"""number of groups that a node made during the step"""
NODES_LAG = "nodes/*/lag"
"""versions by which a node's weights are behind when the step ends"""
NODES_KV_FREE = "nodes/*/kv_free"
"""share of a node's KV blocks that are free when the step ends"""

HOST_LOOP_BLOCKED_S = "host/loop_blocked_s"
"""seconds for which the node's event loop was blocked, in stalls over 20 ms"""
HOST_LOOP_LAG_MAX_MS = "host/loop_lag_max_ms"
"""milliseconds of the longest stall"""
HOST_BLOCKED_AT = "host/blocked_at/*"
"""seconds for which the line that is named blocked the event loop: the worst line of the step, if over 0.1 s"""
HOST_LOOP_CPU_SHARE = "host/loop_cpu_share"
"""share of one core that the event loop's thread used; at 1 it has no time left"""
HOST_MACHINE_CPU_SHARE = "host/machine_cpu_share"
"""share of the machine's cores that were in use by anybody"""
HOST_OTHERS_CPU_SHARE = "host/others_cpu_share"
"""share of the machine's cores that processes of others used; missing where it cannot be seen"""
GPU_USE = "gpu/use/*"
"""share of the time in which the GPU that is named computed, by NVML or AMD SMI"""
GPU_CLOCK = "gpu/clock/*"
"""its clock / the highest that it has; below 1 under load it is held back, by power or heat"""
GPU_MEMORY = "gpu/memory/*"
"""share of its memory in use by anybody"""
GPU_POWER_W = "gpu/power_w/*"
"""watts that it draws"""
GPU_OTHERS_BYTES = "gpu/others_bytes/*"
"""bytes of its memory that processes of others hold; missing where they cannot be seen"""

STAGE_BUSY_S = "stage/*/busy_s"
"""seconds of the step in which a stage worked, summed over its workers; a wait for a lease is no work"""
STAGE_BLOCKED_IN_S = "stage/*/blocked_in_s"
"""seconds of the step in which a stage waited for an item, summed over its workers"""
STAGE_BLOCKED_OUT_S = "stage/*/blocked_out_s"
"""seconds of the step in which a stage waited for room behind it, summed over its workers"""
STAGE_ITEMS = "stage/*/items"
"""number of items that a stage took in the step; of the first stage, those that it put out"""
STAGE_QUEUE = "stage/*/queue"
"""number of items that wait for a stage when the step ends"""

# Learner

LEARNER = "learner/*"
"""a number that the loss reports under this name, per trained token; the largest if the name ends in `_max`"""
LEARNER_LOSS = "learner/loss"
"""loss per token"""
LEARNER_GRAD_NORM = "learner/grad_norm"
"""gradient norm before clipping, largest of the step's updates"""
LEARNER_LR = "learner/lr"
"""learning rate"""
LEARNER_ENTROPY = "learner/entropy"
"""nats: mean entropy of the policy at the trained tokens"""
LEARNER_TOKENS = "learner/tokens"
"""trained tokens"""
LEARNER_TRAJECTORIES = "learner/trajectories"
"""number of trained trajectories"""
LEARNER_RATIO_MEAN = "learner/ratio_mean"
"""probability of a token under the learner / under the sampler, mean"""
LEARNER_RATIO_MAX = "learner/ratio_max"
"""probability of a token under the learner / under the sampler, largest"""
LEARNER_KL = "learner/kl"
"""nats per token: estimate of KL(sampler, learner) (k3)"""
LEARNER_CLIP_LOW = "learner/clip_low"
"""share of tokens that were clipped below, for losses that clip"""
LEARNER_CLIP_HIGH = "learner/clip_high"
"""share of tokens that were clipped above"""
LEARNER_WEIGHT = "learner/weight"
"""mean weight of the sampler correction"""
LEARNER_REJECTED = "learner/rejected"
"""share of tokens that the sampler correction rejects"""
LEARNER_REFERENCE_KL = "learner/reference_kl"
"""nats per token: divergence from the reference model, with `LearnerConfig(reference_kl_coef=...)`"""
LEARNER_MISMATCH_MAX = "learner/mismatch_max"
"""largest difference of sampler and learner log-probabilities before the first update"""
LEARNER_MISMATCH_FRESH_MAX = "learner/mismatch_fresh_max"
"""largest such difference in fresh trajectories: those that the very weights under training sampled"""
LEARNER_MISMATCH_FRESH_MEAN = "learner/mismatch_fresh_mean"
"""mean difference in fresh trajectories, which `mismatch_tolerance` judges; left out if there are none"""
LEARNER_MISMATCH_CHECKED = "learner/mismatch_checked"
"""share of the step's tokens in fresh trajectories: at staleness 0 the first minibatch, about 1 / `minibatches`"""
LEARNER_STALENESS_MEAN = "learner/staleness_mean"
"""versions between a token's weights and those under training, mean"""
LEARNER_STALENESS_MAX = "learner/staleness_max"
"""versions between a token's weights and those under training, largest"""
LEARNER_LOAD_BALANCING = "learner/load_balancing"
"""load-balancing value of a mixture of experts, mean of the minibatches; an even load gives the experts per token"""
LEARNER_EXPERT_SHARE_MAX = "learner/expert_share_max"
"""share of a layer's tokens that one expert got in a minibatch, largest"""
LEARNER_EXPERTS_UNUSED = "learner/experts_unused"
"""experts, of all layers, that no token was sent to in a minibatch, mean of the minibatches"""
LEARNER_ROUTING_DIFFERS = "learner/routing_differs"
"""share of the positions with a known route that the learner would send to other experts than the sampler in some layer
of a mixture, before the first update; left out if the replicas report no routes"""
LEARNER_ROUTING_UNKNOWN = "learner/routing_unknown"
"""share of the learner's input positions whose route is not known, in a mixture; they are routed freely"""
LEARNER_ROUTE_BYTES = "learner/route_bytes"
"""bytes of routes per token of the batch, prompts and tools' responses too"""
LEARNER_PADDING_WASTE = "learner/padding_waste"
"""share of the ranks that is idle in a pass, because rows differ in cost"""
LEARNER_TRAIN_S = "learner/train_s"
"""seconds of training"""
LEARNER_PUBLISH_S = "learner/publish_s"
"""seconds of publishing the weights"""
LEARNER_CANARY_S = "learner/canary_s"
"""seconds of scoring the canary"""
LEARNER_CANARY_UNREACHED = "learner/canary_unreached"
"""experts of a mixture that no compared token of the canary is sent to, in all layers; left out for a dense model"""
LEARNER_TOKENS_PER_S = "learner/tokens_per_s"
"""tokens through the model per second"""
LEARNER_MFU = "learner/mfu"
"""share of the device's peak FLOP/s that the model uses (MFU), if the peak is known"""
LEARNER_PEAK_BYTES = "learner/peak_bytes"
"""bytes of a rank's memory at its peak: resident set on the CPU, allocated memory on a GPU"""

# Evaluation

EVAL_ACCURACY = "eval/accuracy"
"""avg@k on the held-out problems"""
EVAL_ACCURACY_LOW = "eval/accuracy_low"
"""lower end of the 95 % interval of `eval/accuracy`"""
EVAL_ACCURACY_HIGH = "eval/accuracy_high"
"""upper end of the 95 % interval of `eval/accuracy`"""
EVAL_N = "eval/n"
"""number of graded trajectories"""
EVAL_K = "eval/k"
"""number of samples per problem"""
EVAL_SCORE = "eval/score/*"
"""as `score/*`, on held-out problems"""
EVAL_SCORE_MISSING = "eval/score_missing/*"
"""as `score_missing/*`, on held-out problems"""
EVAL_TOOL_ERROR_SHARE_CORRECT = "eval/tool_error_share_correct"
"""failed tool calls / calls, in correct trajectories"""
EVAL_TOOL_RATE = "eval/tool_rate"
"""share of the graded trajectories that call a tool"""
EVAL_TOKENS = "eval/tokens"
"""sampled tokens of the evaluation"""
EVAL_TURNS = "eval/turns"
"""turns of the evaluation's trajectories together"""
EVAL_TOOL_CALLS = "eval/tool_calls"
"""number of executed calls"""
EVAL_TOOL_CALLS_JAILED = "eval/tool_calls_jailed"
"""number of calls that were executed in the sandbox"""

BY_SOURCE = (
    REWARD,
    ROLLOUT_RESPONSE_TOKENS,
    GROUPS_ALL,
    GROUPS_SOLVED,
    GROUPS_FLAT,
    TOKENS_GOODPUT,
    TOOLS_ERROR_SHARE,
    EVAL_ACCURACY,
)
"""The metrics that are also there for each data set (`of_source`)."""

OWN_STAGES = frozenset({"admit", "groups", "batch", "learn"})
"""The stages of `engine.assembly.training`; the others of a pipeline are the user's."""


def of_source(name: str, source: str) -> str:
    """Returns the name of a metric of BY_SOURCE for one data set.

    >>> of_source(REWARD, "gsm8k")
    'reward/gsm8k'
    """
    return f"{name}/{source}"


def member(family: str, part: object) -> str:
    """Returns the name of a family's metric for one tool, cause, stage or the like.

    >>> member(TOOLS_WAIT, "python")
    'tools/wait/python_s'
    """
    return family.replace("*", str(part))


def part_of(family: str, name: str) -> str | None:
    """Returns the variable part of a name that belongs to a family, None for any other name.

    >>> part_of(TOOLS_WAIT, "tools/wait/python_s"), part_of(TOOLS_WAIT, "tools/rate")
    ('python', None)
    """
    before, _, after = family.partition("*")
    if not name.startswith(before) or not name.endswith(after) or len(name) <= len(before) + len(after):
        return None
    return name[len(before) : len(name) - len(after)]
