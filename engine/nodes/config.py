"""How the lead of a run listens for rollout nodes, and how a node finds it."""

from __future__ import annotations

import shlex
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from engine.nodes.messages import LearnerHosts
from sandbox.config import stays_here
from sandbox.keys import load_node


@dataclass(frozen=True, kw_only=True, slots=True)
class LeadConfig:
    """recipe, options: what the nodes run: the recipe's file, and `field=value` for each that differs."""

    listen: str
    """Address where nodes join: tcp://0.0.0.0:5700, for all of this machine's."""
    keys: Path | None
    """Folder made by `python -m sandbox.keys`; needed for nodes on other machines."""
    recipe: Path
    options: tuple[str, ...]
    nodes_only: bool = False
    """The lead's own replicas make no groups; they evaluate, and agree on the first weights."""
    deltas: bool = False
    """Nodes pull what has changed of the weights, where that is less: for slow links."""
    checkpoint_option: str = "checkpoint"
    """The recipe's option for the folder that training begins with: nodes set it to their copy."""
    learner: LearnerHosts | None = None
    """Where the learner's ranks are on several hosts."""

    def __post_init__(self) -> None:
        check_address("nodes", self.listen)
        if self.keys is None and not stays_here(self.listen):
            raise ValueError(
                f"nodes_keys must be set for nodes={self.listen}, beyond this machine. "
                "Fix: make keys with `python -m sandbox.keys DIR`, or listen on tcp://127.0.0.1:5700"
            )
        if self.keys is not None:
            load_node(self.keys)  # its own checks, before anything starts


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    lead: str
    """Address of the lead: tcp://HOST:PORT."""
    keys: Path | None = None
    """Folder with host.key and node.pub (`python -m sandbox.keys`)."""
    name: str = field(default_factory=socket.gethostname)
    """What the lead calls this node."""
    patience_s: float = 600.0
    """Seconds without the lead after which a node ends."""

    def __post_init__(self) -> None:
        check_address("lead", self.lead)
        if not self.patience_s > 0:
            raise ValueError(f"patience_s must be positive, got {self.patience_s}")


def launcher(learner: LearnerHosts, *, leads: bool) -> tuple[str, ...]:
    """torch's launcher on one of the learner's hosts. leads: on the lead's, where the hosts meet."""
    words = [f"--nnodes={learner.hosts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={learner.at}"]
    words += [f"--rdzv-id={learner.run}", f"--rdzv-conf=is_host={str(leads).lower()}", "--max-restarts=0"]
    words += [f"--local-addr={learner.at.rpartition(':')[0]}"] if leads else []
    return (sys.executable, "-m", "torch.distributed.run", *words)


def node_command(listen: str, keys: Path | None) -> str:
    """What is run on each node of a lead that listens there."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    lead = f"tcp://{socket.gethostname() if host in ('0.0.0.0', '*') else host}:{port}"
    words = [sys.executable, "-m", "engine.nodes", "--lead", lead, *(["--keys", str(keys)] if keys else [])]
    return shlex.join(words)


def check_address(name: str, address: str) -> None:
    """Raises ValueError unless it is tcp://HOST:PORT."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    whole = address.startswith("tcp://") and host and colon
    if not whole or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{name} must be tcp://HOST:PORT, got {address!r}")
