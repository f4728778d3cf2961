"""The configurations of a run's lead, which listens for rollout nodes, and of a node, which connects to it."""

from __future__ import annotations

import ipaddress
import re
import shlex
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

from engine.learner.process import LAUNCHER
from engine.nodes.messages import LearnerHosts
from sandbox.config import stays_here
from sandbox.keys import load_node
from sandbox.require import at_least, positive, require

_NAME = re.compile(r"[\w.:-]{1,100}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeadConfig:
    """recipe, options: what the nodes run: the recipe's file, and `field=value` for each option that differs."""

    listen: str
    """Address where nodes join; tcp://0.0.0.0:5700 stands for all addresses of this machine."""
    keys: Path | None
    """Folder made by `rocstar keys`; needed for nodes on other machines."""
    recipe: Path
    options: tuple[str, ...]
    nodes_only: bool = False
    """The lead's own replicas make no groups; they evaluate, and check the first weights."""
    deltas: bool = False
    """Nodes pull only what has changed of the weights, if that is less: for slow links."""
    learner: LearnerHosts | None = None
    """The learner's hosts, if its ranks are on several."""
    gpus: tuple[str, ...] = ()
    """The GPUs of the lead's own learner and replicas (`engine.telemetry.gpus.gpu_ids`)."""

    def __post_init__(self) -> None:
        check_address("nodes", self.listen)
        if self.keys is None and not stays_here(self.listen):
            raise ValueError(
                f"nodes_keys must be set for nodes={self.listen}, which other machines can reach. "
                "Fix: make keys with `rocstar keys FOLDER`, or listen on tcp://127.0.0.1:5700"
            )
        if self.keys is not None:
            load_node(self.keys)  # raises for unusable keys before anything starts
        if self.learner is not None:
            check_meeting(self.learner.at)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeConfig:
    lead: str
    """Address of the lead: tcp://HOST:PORT."""
    keys: Path | None = None
    """Folder with host.key and node.pub (`rocstar keys`)."""
    name: str = field(default_factory=socket.gethostname)
    """What the lead calls this node."""
    patience_s: float = 600.0
    """Seconds without the lead after which a node ends."""
    grace_s: float = 20.0
    """Seconds after SIGTERM in which the node may make the groups that it has. Slurm and Kubernetes kill after 30."""
    ready_file: Path | None = None
    """A file that is there while the node belongs to the run."""

    def __post_init__(self) -> None:
        check_address("lead", self.lead)
        check_name(self.name)
        require("patience_s", self.patience_s, positive)
        require("grace_s", self.grace_s, at_least(0))


def check_name(name: str) -> None:
    """Raises ValueError unless a node can have this name in metrics, in notes and on the page."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be 1 to 100 letters, digits and any of . _ : -, got {name[:100]!r}. Fix: name=one")


def launcher(learner: LearnerHosts, *, host: str | None = None) -> tuple[str, ...]:
    """Returns the learner's launcher for one of its hosts. host: a name that no other host has; None on the lead's."""
    options = [f"--hosts={learner.hosts}", f"--at={learner.at}", f"--run={learner.run}"]
    return (*LAUNCHER, *options, *([f"--host={host}"] if host else []))


def node_command(listen: str, keys: Path | None) -> str:
    """Returns the command that starts a node of a lead that listens there."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    lead = f"tcp://{socket.gethostname() if host in ('0.0.0.0', '*', '[::]') else host}:{port}"
    rocstar = Path(sys.executable).with_name("rocstar")
    return shlex.join([str(rocstar), "node", f"lead={lead}", *([f"keys={keys}"] if keys else [])])


def check_address(name: str, address: str) -> None:
    """Raises ValueError unless the address is tcp://HOST:PORT, with brackets around an IPv6 host."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    named = host and (":" not in host or (host[0], host[-1]) == ("[", "]"))
    whole = address.startswith("tcp://") and named and colon
    if not whole or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{name} must be tcp://HOST:PORT, got {address!r}")


def check_meeting(at: str) -> None:
    """Raises ValueError unless HOST:PORT is at one address of this machine, which the learner's other hosts can reach.

    Whoever reaches that port can run code in the ranks, so it is never open at all addresses.
    """
    host = at.rpartition(":")[0]
    what = f"learner_at must be HOST:PORT with an address of this machine, got {at!r}"
    try:
        with socket.create_server((host, 0)) as probe:
            bound = ipaddress.ip_address(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror or error}") from None
    if host in ("", "*") or bound.is_unspecified:
        raise ValueError(
            f"{what}, which is all of them: whoever reaches the port can run code here. "
            "Fix: the address by which the learner's other hosts reach this one"
        )
    if bound.is_loopback and host != "localhost" and host != str(bound):
        raise ValueError(f"{what}, which other hosts do not reach: here it means {bound}. Fix: the address itself")
