"""Makes a step of thousands of trajectories small enough to simulate in seconds.

Groups are drawn evenly over their longest trajectories, the longest group included, since it decides the tail; they
keep their order. The fleet shrinks alike: to fewer replicas, and where one is left over to a smaller one, whose blocks
and requests are fewer while a step of it takes as long as one of the whole replica. bench/LOG.md has the error that
this adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bench.placement.workload import Traced
from bench.simulator.machine import Machine


def sampled(
    trace: Sequence[Traced], machine: Machine, replicas: int, most: int
) -> tuple[Sequence[Traced], Machine, int]:
    """Returns a trace of about `most` trajectories with the machine and the number of replicas that suit it; what came
    in if that is small enough.
    """
    if len(trace) <= most:
        return trace, machine, replicas
    share = most / len(trace)
    fewer = max(1, int(replicas * share))
    groups: dict[int, list[Traced]] = {}
    for row in trace:
        groups.setdefault(row.group, []).append(row)
    count = max(1, round(len(groups) * share))
    by_length = sorted(groups, key=lambda group: -max(row.total_tokens for row in groups[group]))
    chosen = sorted(by_length[at * len(groups) // count] for at in range(count))
    rows = [row for group in chosen for row in groups[group]]
    renumbered = [replace(row, traj=number) for number, row in enumerate(rows)]
    return renumbered, _shrunk(machine, replicas / fewer * len(rows) / len(trace), renumbered), fewer


def _shrunk(machine: Machine, share: float, trace: Sequence[Traced]) -> Machine:
    """Returns a machine that holds a share of the blocks and requests, and at least the longest trajectory."""
    cost = machine.cost
    longest_blocks = max(-(-row.total_tokens // machine.block_size) for row in trace)
    return replace(
        machine,
        blocks=max(longest_blocks + 1, round(machine.blocks * share)),
        max_num_seqs=max(1, round(machine.max_num_seqs * share)),
        cost=replace(
            cost,
            per_request_s=cost.per_request_s / share,
            per_token_s=cost.per_token_s / share,
            per_kv_token_s=cost.per_kv_token_s / share,
            per_attended_s=cost.per_attended_s / share,
        ),
    )
