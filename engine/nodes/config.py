"""How the lead of a run listens for rollout nodes, and how a node finds it."""

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
from sandbox.require import positive, require

_NAME = re.compile(r"[\w.:-]{1,100}", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeadConfig:
    """recipe, options: what the nodes run: the recipe's file, and `field=value` for each that differs."""

    listen: str
    """Address where nodes join: tcp://0.0.0.0:5700, for all of this machine's."""
    keys: Path | None
    """Folder made by `rocstar keys`; needed for nodes on other machines."""
    recipe: Path
    options: tuple[str, ...]
    nodes_only: bool = False
    """The lead's own replicas make no groups; they evaluate, and agree on the first weights."""
    deltas: bool = False
    """Nodes pull what has changed of the weights, where that is less: for slow links."""
    learner: LearnerHosts | None = None
    """Where the learner's ranks are on several hosts."""

    def __post_init__(self) -> None:
        check_address("nodes", self.listen)
        if self.keys is None and not stays_here(self.listen):
            raise ValueError(
                f"nodes_keys must be set for nodes={self.listen}, beyond this machine. "
                "Fix: make keys with `rocstar keys FOLDER`, or listen on tcp://127.0.0.1:5700"
            )
        if self.keys is not None:
            load_node(self.keys)  # its own checks, before anything starts
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

    def __post_init__(self) -> None:
        check_address("lead", self.lead)
        check_name(self.name)
        require("patience_s", self.patience_s, positive)


def check_name(name: str) -> None:
    """Raises ValueError unless a node can be called so in metrics, notes and on the page."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"name must be 1 to 100 letters, digits and any of . _ : -, got {name[:100]!r}. Fix: name=one")


def launcher(learner: LearnerHosts, *, host: str | None = None) -> tuple[str, ...]:
    """The learner's launcher on one of its hosts. host: a name that no other host has; None on the lead's."""
    words = [f"--hosts={learner.hosts}", f"--at={learner.at}", f"--run={learner.run}"]
    return (*LAUNCHER, *words, *([f"--host={host}"] if host else []))


def node_command(listen: str, keys: Path | None) -> str:
    """Returns what is run on each node of a lead that listens there."""
    host, _, port = listen.removeprefix("tcp://").rpartition(":")
    lead = f"tcp://{socket.gethostname() if host in ('0.0.0.0', '*', '[::]') else host}:{port}"
    rocstar = Path(sys.executable).with_name("rocstar")
    return shlex.join([str(rocstar), "node", f"lead={lead}", *([f"keys={keys}"] if keys else [])])


def check_address(name: str, address: str) -> None:
    """Raises ValueError unless it is tcp://HOST:PORT, an IPv6 address in brackets."""
    host, colon, port = address.removeprefix("tcp://").rpartition(":")
    named = host and (":" not in host or (host[0], host[-1]) == ("[", "]"))  # IPv6 in brackets
    whole = address.startswith("tcp://") and named and colon
    if not whole or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{name} must be tcp://HOST:PORT, got {address!r}")


def check_meeting(at: str) -> None:
    """Raises ValueError unless the learner's hosts can meet at HOST:PORT, and nobody by another address.

    Whoever reaches that port can run code in the ranks, so it is open at one address only, and never at all of them.
    """
    host = at.rpartition(":")[0]
    what = f"learner_at must be HOST:PORT with an address of this machine, got {at!r}"
    try:
        with socket.create_server((host, 0)) as probe:
            found = ipaddress.ip_address(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror or error}") from None
    if host in ("", "*") or found.is_unspecified:
        raise ValueError(
            f"{what}, which is all of them: whoever reaches the port can run code here. "
            "Fix: the address by which the learner's other hosts reach this one"
        )
    if found.is_loopback and host != "localhost" and host != str(found):
        raise ValueError(f"{what}, which other hosts do not reach: here it means {found}. Fix: the address itself")
