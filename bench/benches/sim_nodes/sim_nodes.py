"""Where does one lead saturate? A run over 1 to 64 simulated nodes of 8 replicas each.

    rocstar bench sim_nodes [rounds=3] [nodes=1,2,4,8,16,32] [kinds=math8k,agentic] [staleness=0,1]

Each node has a simulated fleet (`bench.simulator`) with its own balancer; the lead grants groups by the ledger of the
engine and pays for each message what `bench nodes` measured. The groups of a step grow with the nodes. Engines, the
lead's link (100 Gbit/s), the weights (29.5 GB, 14B in bf16) and a step of the learner (a minute) are assumed. A round
is a seed of the workloads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, product
from typing import Annotated, Literal

from bench.benches.sim_nodes.cluster import Cluster, Outcome, Setting
from bench.measuring.bench import Bench, Keep
from bench.measuring.metric import Kind, Metric, count, rate, seconds, share
from bench.measuring.terminal import say
from bench.placement import workload
from bench.placement.workload import Size, Traced
from bench.simulator.machine import H200
from engine.balancing.kv_aware import KvAware
from sandbox.require import Rule, at_least, require_fields

REPLICAS = 8
GROUPS = 32  # groups per step and node
SEED = 7100


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: Annotated[int, "seeds of the workloads"] = 3
    nodes: Annotated[tuple[int, ...], "numbers of nodes"] = (1, 2, 4, 8, 16, 32)
    kinds: Annotated[tuple[Literal["math8k", "agentic"], ...], "workloads"] = ("math8k", "agentic")
    staleness: Annotated[tuple[int, ...], "bounds of the staleness"] = (0, 1)
    steps: Annotated[int, "steps of a run"] = 4

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "rounds", "steps")
        require_fields(self, Rule("numbers of at least 1", lambda value: value and min(value) >= 1), "nodes")
        require_fields(self, Rule("bounds of at least 0", lambda value: value and min(value) >= 0), "staleness")


METRICS = {
    "groups_per_s": Metric(title="groups/s", doc="trained, over the whole run", kind=Kind.RATE),
    "tokens_per_s": rate("tokens/s", "generated"),
    "lead_cpu": share("lead's CPU", "share of a core", kind=Kind.CPU),
    "full_at": count("full at nodes", "where the lead's core would be full, growing as from half as many nodes"),
    "messages_per_s": rate("messages/s", "that the lead takes or sends"),
    "record_bytes_per_s": Metric(title="records", doc="", kind=Kind.RATE, form=".1f", scale=1e-6, unit=" MB/s"),
    "sync_s": seconds("sync", "from trained to live on the last node, mean", form=".0f"),
    "staleness_mean": count("staleness", "versions by which a group's oldest token is behind, mean", form=".2f"),
    "staleness_max": count("largest", "largest staleness", summary="largest"),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    kind: str
    max_staleness: int
    nodes: int

    @property
    def name(self) -> str:
        return f"{self.kind}/staleness {self.max_staleness}/{self.nodes}"


def measure(options: Options, keep: Keep) -> None:
    for number in range(options.rounds):
        outcomes: dict[Cell, Outcome] = {}
        for kind, staleness, nodes in product(options.kinds, options.staleness, options.nodes):
            say(f"round {number + 1} of {options.rounds}: {kind}, staleness {staleness}, {nodes} nodes")
            cell = Cell(kind=kind, max_staleness=staleness, nodes=nodes)
            outcomes[cell] = simulated(cell, options.steps, SEED + 100 * number)
        keep({cell.name: figures(cell, outcomes) for cell in outcomes})


def simulated(cell: Cell, steps: int, seed: int) -> Outcome:
    groups = groups_of(cell.kind, cell.nodes, steps, seed)
    longest = max(row.total_tokens for rows in groups for row in rows)
    setting = Setting(
        nodes=cell.nodes,
        replicas=REPLICAS,
        groups_per_step=GROUPS * cell.nodes,
        steps=steps,
        max_staleness=cell.max_staleness,
        machine=H200,
    )
    return Cluster(setting, groups, lambda: KvAware(longest)).run()


def groups_of(kind: str, nodes: int, steps: int, seed: int) -> list[list[Traced]]:
    samples = workload.FULL[kind].samples
    trace = workload.generate(kind, seed + nodes, Size(groups=GROUPS * nodes * steps, samples=samples))
    return [list(rows) for _, rows in groupby(trace, key=lambda row: row.group)]


def figures(cell: Cell, outcomes: dict[Cell, Outcome]) -> dict[str, float]:
    outcome = outcomes[cell]
    values = {
        "groups_per_s": outcome.groups_per_s,
        "tokens_per_s": outcome.tokens_per_s,
        "lead_cpu": outcome.lead_cpu,
        "messages_per_s": outcome.messages_per_s,
        "record_bytes_per_s": outcome.record_bytes_per_s,
        "sync_s": outcome.sync_s,
        "staleness_mean": outcome.staleness_mean,
        "staleness_max": outcome.staleness_max,
    }
    smaller = outcomes.get(Cell(kind=cell.kind, max_staleness=cell.max_staleness, nodes=cell.nodes // 2))
    if smaller is not None and outcome.lead_cpu > smaller.lead_cpu:
        per_node = (outcome.lead_cpu - smaller.lead_cpu) / (cell.nodes / 2)
        values["full_at"] = cell.nodes + (1 - outcome.lead_cpu) / per_node
    return values


BENCH = Bench(
    options=Options,
    metrics=METRICS,
    measure=measure,
    headline=("groups_per_s", "tokens_per_s", "lead_cpu", "sync_s"),
    quick={"rounds": "1", "nodes": "1,2", "kinds": "math8k", "staleness": "1", "steps": "2"},
    simulated=True,
)
