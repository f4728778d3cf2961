"""Messages between a node (client) and a sandbox host, and the types both use.

Invariants
- A call is answered by exactly one CallResult, whatever happens to the code, the slot or the host.
- `outcome` comes from the kernel (wait status, rusage) as seen by the host, never from bytes the code wrote.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["ok", "error", "timeout", "memory", "output", "killed", "lost"]
SessionState = Literal["kept", "restored", "lost"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one call, all above 0. memory_bytes is address space per process; output_bytes is what is kept of
    stdout and of stderr. A file, stdout and stderr included, may grow to the larger of disk_bytes and output_bytes.
    """

    wall_s: float = 4.0
    cpu_s: float = 4.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 16
    processes: int = 32
    disk_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"Limits.{name} must be positive, got {value!r}")


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one call did.

    outcome is "ok": exit code 0; "error": any other exit code or an exception; "timeout", "memory", "output": a limit
    ended it; "killed": cancelled, or a signal that no limit explains; "lost": our fault (its slot or host died twice),
    never shown as the model's error.
    """

    outcome: Outcome
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    truncated: bool = False
    display: str | None = None
    queue_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_memory_bytes: int = 0
    session_state: SessionState | None = None
    jailed: bool = False


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call on its way to a host. `code` and `stdin` are UTF-8 bytes."""

    id: int
    code: bytes
    stdin: bytes
    limits: Limits


class Run(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Client -> host: start these calls, in order; at most BATCH of them."""

    calls: list[Call]


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Client -> host: end these calls now."""

    ids: list[int]


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Host -> client: ready, with this many slots at this level of isolation."""

    slots: int
    level: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Host -> client: cannot serve; the reason is one line with the cause and the mend."""

    reason: str


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Host -> client: nothing to say, but running."""


class CallResult(msgspec.Struct, frozen=True, array_like=True):
    id: int
    result: ToolResult


class Results(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Host -> client: at most BATCH results."""

    results: list[CallResult]


BATCH = 64
ToHost = Run | Stop
ToClient = Hello | Refused | Alive | Results
encode = msgspec.msgpack.Encoder().encode
decode_to_host = msgspec.msgpack.Decoder(ToHost).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode
