"""The options of every recipe beside those of its own configuration."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from sandbox.require import at_least, none_or, require, within


@dataclass(frozen=True, kw_only=True, slots=True)
class Invocation:
    """Where the run is written, and where its metrics are served."""

    name: Annotated[str, "folder of the run under runs/; the recipe's own name by default"] = ""
    runs: Annotated[Path, "where runs are written"] = Path("runs")
    fresh: Annotated[bool, "begin a new run, even if the last one of that name could be resumed"] = False

    metrics_port: Annotated[int | None, "serve /metrics on 127.0.0.1 for Prometheus; 0: any free port"] = None

    def __post_init__(self) -> None:
        require("metrics_port", self.metrics_port, none_or(within("[0, 65535]")))
        if self.name == ".." or Path(self.name).name != self.name:
            raise ValueError(f"name must be that of a folder, got {self.name!r}")

    def named(self, program: str) -> Invocation:
        """Returns it with the name of the program if none was given."""
        return self if self.name else dataclasses.replace(self, name=program)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Who takes part in a run beside this machine."""

    nodes: Annotated[str | None, "address where rollout nodes may join, tcp://0.0.0.0:5700; none: this machine"] = None
    nodes_keys: Annotated[Path | None, "folder of `rocstar keys`, for nodes on other machines"] = None
    nodes_only: Annotated[bool, "all groups are made on the nodes; the replicas here evaluate"] = False
    nodes_deltas: Annotated[bool, "nodes pull what has changed of the weights, for slow links"] = False
    learner_hosts: Annotated[int, "hosts of the learner's ranks, this one included; each has learner_ranks"] = 1
    learner_at: Annotated[str | None, "this machine's HOST:PORT where the learner's hosts meet, lead:29400"] = None
    dry_run: Annotated[bool, "print what each machine would run, and end"] = False

    def __post_init__(self) -> None:
        if self.nodes is None and (self.nodes_only or self.nodes_keys is not None):
            raise ValueError("nodes must be an address where nodes_only or nodes_keys is given, got none")
        require("learner_hosts", self.learner_hosts, at_least(1))
        if self.learner_hosts > 1 and self.nodes is None:
            raise ValueError("nodes must be an address where learner_hosts is above 1: the other hosts come to it")
        if (self.learner_hosts > 1) != (self.learner_at is not None):
            raise ValueError(
                f"learner_at must be HOST:PORT with learner_hosts above 1, and only then, got {self.learner_at}"
            )
        if self.learner_at is not None and not re.fullmatch(r"[^:/]+:\d+", self.learner_at):
            raise ValueError(f"learner_at must be HOST:PORT, got {self.learner_at!r}")
