"""A simulated engine's limits and costs, and what a workload takes on it at least.

Steps cost what `engine.balancing.step_cost.StepCost` says; its legend holds here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from bench.placement.workload import Traced
from engine.balancing.step_cost import StepCost
from sandbox.require import at_least, require, require_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One engine: its KV blocks, vLLM's limits and its costs."""

    blocks: int
    block_size: int
    cost: StepCost
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "blocks", "block_size", "max_num_seqs", "max_num_batched_tokens")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(f"max_num_batched_tokens must hold max_num_seqs, got {self.max_num_batched_tokens}")
        for name, seconds in asdict(self.cost).items():
            require(f"cost.{name}", seconds, at_least(0))
        if self.shortest_step_s <= 0:
            raise ValueError("cost.fixed_s + cost.weights_s must be positive: a step takes time")

    @property
    def kv_tokens(self) -> int:
        return self.blocks * self.block_size

    @property
    def shortest_step_s(self) -> float:
        return self.cost.step_s(0)


# First principles, not a measurement: a 14B model in bf16 (29.5 GB, 160 KiB of KV a token) on one H200 (141 GB, 3.84
# TB/s, 650 TFLOP/s reached). KV gets 0.9 of the memory less the weights and 5 GB. A request costs 10 us and its token.
H200 = Machine(
    blocks=35_200,
    block_size=16,
    cost=StepCost(
        fixed_s=1e-3,
        per_request_s=55e-6,
        per_token_s=45e-6,
        per_kv_token_s=163_840 / 3.84e12,
        per_attended_s=2e-9,
        weights_s=7.7e-3,
    ),
)


def lower_bound_s(trace: Sequence[Traced], machine: Machine, replicas: int) -> float:
    """Returns seconds that no schedule beats: the larger of all work at full KV without recomputing, spread evenly, and
    of the longest trajectory alone on an engine with its tools.

    Tool-waiting KV costs nothing here, so that the bound is loose where tools are slow.
    """
    chain_s = max(_alone_s(row, machine.cost) for row in trace)
    return max(_work_s(trace, machine) / replicas, chain_s)


def _alone_s(row: Traced, cost: StepCost) -> float:
    """Returns the seconds of a trajectory alone. Another one of its group may have computed its first prompt."""
    tokens, total_s = 0, 0.0
    for number, turn in enumerate(row.turns):
        tokens += turn.prompt_new_tokens
        total_s += cost.step_s(0, prompt_tokens=turn.prompt_new_tokens if number else 0)
        decoded = turn.gen_tokens - 1  # a turn's first token comes with its prompt
        total_s += decoded * cost.step_s(1, kv_tokens=tokens + turn.gen_tokens / 2) + turn.tool_latency_s
        tokens += turn.gen_tokens
    return total_s


def _work_s(trace: Iterable[Traced], machine: Machine) -> float:
    """Returns engine seconds. max(0, w - x) >= w - x and >= 0: each alternative is a bound of its own.

    A token of a trajectory that holds L tokens of its own has at least the share max(L / C, 1 / max_num_seqs) of what a
    step costs regardless of its size (C tokens of KV; the group's prompt is shared).
    """
    cost = machine.cost
    samples: dict[int, int] = {}
    rows = list(trace)
    for row in rows:
        samples[row.group] = samples.get(row.group, 0) + 1
    steps = requests_s = computed = 0.0
    for row in rows:
        shared = row.turns[0].prompt_new_tokens
        length = 0
        for number, turn in enumerate(row.turns):
            prompt = turn.prompt_new_tokens if number else shared / samples[row.group]
            length += turn.prompt_new_tokens
            mean = length + turn.gen_tokens / 2
            own = mean - shared * (1 - 1 / samples[row.group])
            decoded = turn.gen_tokens - 1
            steps += decoded * max(own / machine.kv_tokens, 1 / machine.max_num_seqs)
            requests_s += decoded * (cost.per_request_s + cost.per_kv_token_s * mean) + prompt * cost.per_token_s
            computed += decoded + prompt
            length += turn.gen_tokens
    hidden_s = max(0.0, steps * cost.weights_s - computed * cost.per_token_s)
    return requests_s + steps * cost.fixed_s + hidden_s
