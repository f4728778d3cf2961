"""Where one lead saturates: a run over 1 to 64 simulated nodes of 8 replicas each, by messages and by bytes.

    python -m bench sim_nodes [--quick] [--nodes 1,2,4,8,16,32,64] [--kinds math8k,agentic] [--staleness 0,1]

Each node has a fleet of `bench sim_fleet` with its own balancer; the lead grants groups by the ledger of the engine
and pays for each message what `bench nodes` measured. The groups of a step grow with the nodes. The lead's link is 100
Gbit/s, the weights are 29.5 GB (14B in bf16), a step of the learner takes a minute: assumed, as the engines are. lead
CPU: share of a core; full at: the nodes at which it would be 1, if it grows as from half of the nodes to all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

from bench.benches.sim_nodes.cluster import Cluster, Outcome, Setting
from bench.measuring.report import at_least, environment, fill, finish, interruptible, names, say, several
from bench.placement import workload
from bench.placement.workload import Size, Traced
from bench.simulator.costs import H200
from engine.balancing.kv_aware import KvAware

REPLICAS = 8
GROUPS = {"math8k": 32, "agentic": 32}  # of a step and node
SEED = 7100


@dataclass(frozen=True, kw_only=True)
class Cell:
    kind: str
    max_staleness: int
    nodes: int


Results = dict[Cell, Outcome]


def groups_of(kind: str, nodes: int, steps: int) -> list[list[Traced]]:
    samples = workload.FULL[kind].samples
    trace = workload.generate(kind, SEED + nodes, Size(groups=GROUPS[kind] * nodes * steps, samples=samples))
    return [list(rows) for _, rows in groupby(trace, key=lambda row: row.group)]


def simulated(cell: Cell, steps: int) -> Outcome:
    groups = groups_of(cell.kind, cell.nodes, steps)
    most = max(row.total_tokens for rows in groups for row in rows)
    setting = Setting(
        nodes=cell.nodes,
        replicas=REPLICAS,
        groups_per_step=GROUPS[cell.kind] * cell.nodes,
        steps=steps,
        max_staleness=cell.max_staleness,
        machine=H200,
    )
    return Cluster(setting, groups, lambda: KvAware(most)).run()


def measure(options: argparse.Namespace, results: Results) -> None:
    for kind, staleness, nodes in product(options.kinds, options.staleness, options.nodes):
        say(f"{kind}, staleness {staleness}, {nodes} nodes")
        cell = Cell(kind=kind, max_staleness=staleness, nodes=nodes)
        results[cell] = simulated(cell, options.steps)


def show(options: argparse.Namespace, machine: dict[str, Any], results: Results) -> None:
    rows, metrics = [], {}
    for cell, found in results.items():
        name = f"{cell.kind}_s{cell.max_staleness}_{cell.nodes}"
        metrics |= {f"groups_per_s_{name}": found.groups_per_s, f"lead_cpu_{name}": found.lead_cpu}
        smaller = results.get(Cell(kind=cell.kind, max_staleness=cell.max_staleness, nodes=cell.nodes // 2))
        rows.append(
            [
                cell.kind,
                str(cell.max_staleness),
                str(cell.nodes),
                f"{found.groups_per_s:.2f}",
                f"{found.tokens_per_s:,.0f}",
                f"{100 * found.lead_cpu:.1f} %",
                full_at(cell, found, smaller),
                f"{found.messages_per_s:,.0f}",
                f"{found.record_bytes_per_s / 1e6:.1f}",
                f"{found.sync_s:.0f}",
                f"{found.staleness_mean:.2f} ({found.staleness_max})",
            ]
        )
    header = ["workload", "max_staleness", "nodes", "groups/s", "tokens/s", "lead CPU", "full at nodes"]
    header += ["messages/s", "records MB/s", "sync s", "staleness mean (max)"]
    title = f"one lead, nodes of {REPLICAS} replicas; simulated"
    finish("sim_nodes", title, header, rows, config=vars(options), metrics=metrics, environment=machine)


def full_at(cell: Cell, found: Outcome, smaller: Outcome | None) -> str:
    """Nodes at which the lead's core would be full."""
    if smaller is None or found.lead_cpu <= smaller.lead_cpu:
        return ""
    per_node = (found.lead_cpu - smaller.lead_cpu) / (cell.nodes / 2)
    return f"{cell.nodes + (1 - found.lead_cpu) / per_node:.0f}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench sim_nodes", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 and 2 nodes, two steps of math8k")
    parser.add_argument("--nodes", type=several(at_least(1)))
    parser.add_argument("--kinds", type=names(tuple(GROUPS)), help=",".join(GROUPS))
    parser.add_argument("--staleness", type=several(at_least(0)))
    parser.add_argument("--steps", type=at_least(1))
    options = parser.parse_args(given)
    fill(
        options,
        nodes=([1, 2], [1, 2, 4, 8, 16, 32, 64]),
        kinds=(["math8k"], ["math8k", "agentic"]),
        staleness=([1], [0, 1]),
        steps=(2, 4),
    )
    return options


def main() -> None:
    options, machine = arguments(), environment()
    results: Results = {}
    interruptible(lambda: measure(options, results), lambda: show(options, machine, results), results)
