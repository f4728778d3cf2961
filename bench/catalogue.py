"""The benches by name: the module of each, and the question that it answers."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True, slots=True)
class Entry:
    """module: below bench.benches; its BENCH is the bench. A bench is imported when it is run, as some are heavy."""

    module: str
    question: str

    def load(self) -> ModuleType:
        return importlib.import_module(f"bench.benches.{self.module}")


CATALOGUE = {  # in the order of bench/README.md
    "quickstart": Entry("quickstart", "Does the quick start learn, and how fast?"),
    "roc": Entry("roc", "What does GRPO-RoC change against plain GRPO on the quick start's task?"),
    "sandbox": Entry("sandbox.sandbox", "What does a jailed call cost beside other ways to run a program?"),
    "code": Entry("code", "What does it cost to grade a program by tests that it cannot read?"),
    "fleet": Entry("fleet.fleet", "How do placement policies differ on two real replicas with a small KV cache?"),
    "sim_fleet": Entry("sim_fleet", "How do placement policies differ on many simulated replicas?"),
    "sim_live": Entry("sim_live", "How near is the simulator to the two live replicas of a record?"),
    "rollout": Entry("rollout.rollout", "What do rollouts cost on top of their engines?"),
    "loop": Entry("loop.loop", "How many tokens a second does one event loop carry?"),
    "gateway": Entry("gateway.gateway", "What does a turn through the gateway cost beside vLLM's own server?"),
    "streaming": Entry("streaming.streaming", "What does dispatching a tool call at its closing tag save?"),
    "learner": Entry("learner", "How fast is the learner against its bare model?"),
    "long_rows": Entry("long_rows", "What do long rows and a large vocabulary take in the learner?"),
    "step": Entry("step", "What does staleness buy: a step strict and overlapped, against its slower side?"),
    "recording": Entry("recording", "What does recording a run cost?"),
    "weights": Entry("weights", "How long does a weight update take, by size and transport?"),
    "mismatch": Entry("mismatch", "How far apart are the log-probabilities of sampler and learner?"),
    "nodes": Entry("nodes.nodes", "What does leading nodes cost, and how long do weights take to reach them?"),
    "sim_nodes": Entry("sim_nodes.sim_nodes", "Where does one lead saturate, by messages and by bytes?"),
    "gpu": Entry("gpu.gpu", "What does one GPU do, part by part?"),
}
