"""Messages between a node (client) and a sandbox host, and the types both use.

Invariants
- A call is answered by exactly one CallResult, whatever happens to the code, the slot or the host.
- `outcome` comes from the kernel (wait status, rusage) as the host sees it, never from bytes that the code wrote.
- A cell runs only on the state that the client means: the host holds the session as it is after exactly
  `SessionStep.number` kept cells, or rebuilds it from `SessionStep.history`. Otherwise the answer is "lost", and the
  code did not run.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MAX_LIMIT = 1 << 40  # bounds each limit: 34,000 years, a tebibyte; beyond it the kernel's arithmetic ends
MAX_CODE_BYTES = 8 << 20  # the size of a session's shared memory
MAX_SLOTS = 1000  # the most of one host
DATA = "/data"  # where guest code finds the folder SandboxConfig.data
SEED_BITS = 63  # both a msgpack int and a signed 64 bit int hold it
Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << SEED_BITS) - 1)]
Outcome = Literal["ok", "error", "timeout", "memory", "output", "killed", "lost"]
SessionState = Literal["kept", "restored", "lost"]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one call, all above 0 and at most 2**40.

    memory_bytes: address space of each process; together with disk_bytes it bounds what all processes of a call use.
    output_bytes: how much is kept of stdout, and of stderr.
    processes: threads count too.
    disk_bytes: a file, stdout and stderr included, may grow to the larger of disk_bytes and output_bytes.
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
            # Only types that a message can carry: one that a host cannot decode ends all calls of this node there.
            types = (float, int) if name.endswith("_s") else (int,)
            if type(value) not in types or not 0 < value <= MAX_LIMIT:
                kind = " or ".join(kind.__name__ for kind in types)
                raise ValueError(f"Limits.{name} must be {kind}, positive and at most 2**40, got {value!r}")


def check_limits(limits: Limits | None, default: Limits) -> Limits:
    """Returns `limits`, or the default for None. Raises ValueError for anything else."""
    limits = default if limits is None else limits
    if not isinstance(limits, Limits):
        raise ValueError(f"limits must be Limits, got {limits!r}")
    return limits


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one call.

    outcome: "ok" is exit code 0, "error" any other exit code or an exception. "timeout", "memory" and "output": that
    limit ended the call; an uncaught MemoryError is "memory" too. "killed": it was cancelled, or ended by a signal that
    no limit explains. "lost": our fault (its slot or host died twice), which is never shown as the model's error.
    stdout, stderr: what the code printed, before a "timeout" too, flushed or not, unless the interpreter was inside one
    call into C.
    truncated: stdout, stderr or the display was cut. For the streams the sizes of their files prove it; the display and
    its length are the code's own claim.
    wall_s, cpu_s: the code's own time. Everything before and after, such as waiting for a slot or rebuilding a session,
    is in queue_s.
    cpu_s, peak_memory_bytes: the sum, and the largest, over the main process and those that it waited for; what it left
    running was killed and is not counted (but was limited).

    session_state is set for a session's cell only. "kept": the cell ran on the live state, which stays, also after an
    error. "restored": the state was rebuilt. After a timeout or crash it is again as before this cell, whose own
    effects are undone (if a copy was taken before the cell, its threads are gone and files are as the cell left them).
    If the session had been evicted or its host had died, this cell ran on the rebuilt state. "lost": the state could
    not be rebuilt. This cell did not run or its effects are gone, and the session is empty now.
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


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """A cell of a session's history: code and standard input, both UTF-8, and limits. ok: whether it ended well."""

    code: bytes
    stdin: bytes
    limits: Limits
    ok: bool = True

    @property
    def size_bytes(self) -> int:
        return len(self.code) + len(self.stdin)


def encode_code(code: str) -> bytes:
    """Returns `code` as UTF-8. Raises ValueError unless it is a str of at most MAX_CODE_BYTES."""
    encoded = _encode_text("code", code)
    if len(encoded) > MAX_CODE_BYTES:
        raise ValueError(f"code must have at most {MAX_CODE_BYTES} bytes of UTF-8, got {len(encoded)}")
    return encoded


def encode_stdin(stdin: str) -> bytes:
    """Returns `stdin` as UTF-8. Raises ValueError unless it is a str."""
    return _encode_text("stdin", stdin)


def _encode_text(name: str, value: str) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a str, got {type(value).__name__}")
    return value.encode("utf-8", "surrogatepass")


def check_seed(seed: int | None) -> int | None:
    """Returns the seed. Raises ValueError unless it is None or a seed."""
    if seed is not None and (type(seed) is not int or not 0 <= seed < 1 << SEED_BITS):
        raise ValueError(f"seed must be an int from 0 to 2**{SEED_BITS} - 1, got {seed!r}")
    return seed


def check_display(display: bool) -> bool:
    """Returns the flag. Raises ValueError unless it is a bool."""
    if type(display) is not bool:
        raise ValueError(f"display must be a bool, got {display!r}")
    return display


class SessionStep(msgspec.Struct, frozen=True, array_like=True):
    """Makes a request a cell of a session.

    session: 16 random bytes that the client made.
    number: how many cells were kept before this one. Each cell with session_state "kept" counts, whatever its outcome,
    and so does one without code, which only rebuilds.
    history: if not None, the session is rebuilt, in place of any state that the host has: these `number` cells run
    first, each under its own limits, and have to end as they did; their output is dropped.
    backup: whether to take a fork snapshot before the cell, to return to if the cell's process dies.
    """

    session: bytes
    number: int
    history: list[Cell] | None
    backup: bool


class RunRequest(msgspec.Struct, frozen=True, array_like=True):
    """One call on its way to a host. `code` and `stdin` are UTF-8 bytes. step: None for a call without a session."""

    id: int
    code: bytes
    stdin: bytes
    limits: Limits
    tier: str
    display: bool = False
    seed: Seed | None = None
    step: SessionStep | None = None

    @property
    def size_bytes(self) -> int:
        history = self.step.history if self.step is not None else None
        return len(self.code) + len(self.stdin) + sum(cell.size_bytes for cell in history or ())


class Run(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Client -> host: run these calls, at most BATCH of them, in order."""

    calls: list[RunRequest]


class CancelCalls(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Client -> host: end these calls now."""

    ids: list[int]


class EndSessions(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Client -> host: forget these sessions."""

    sessions: list[bytes]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Client -> host, in answer to its Hello and then each second: you belong to me, and I am alive."""


class Reconnect(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Client -> a host that it does not know or has given up: say hello on a new connection."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Host -> client, once per connection: ready, with so many slots, at this level of isolation, for these tiers."""

    slots: int
    level: str
    tiers: list[str]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Host -> client: cannot serve. The reason is one line: the cause, and what to do about it."""

    reason: str


class Alive(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Host -> client: a sign of life."""


class CallResult(msgspec.Struct, frozen=True, array_like=True):
    id: int
    result: ToolResult


class Results(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Host -> client: at most BATCH results."""

    results: list[CallResult]


BATCH = 64
BATCH_BYTES = (
    4 << 20
)  # Beyond this a message takes no further call, so that histories of sessions do not add up to gigabytes.
ToHost = Run | CancelCalls | EndSessions | Ping | Reconnect
ToClient = Hello | Refused | Alive | Results
encode = msgspec.msgpack.Encoder().encode
_to_host = msgspec.msgpack.Decoder(ToHost).decode
_to_client = msgspec.msgpack.Decoder(ToClient).decode


class BadMessage(ValueError):
    """The bytes are not a message of this protocol."""


def decode_to_host(frame: bytes) -> ToHost:
    """Returns the message. Raises BadMessage for bytes that are none."""
    try:
        return _to_host(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # msgspec does not wrap the last two
        raise BadMessage(str(error)) from None


def decode_to_client(frame: bytes) -> ToClient:
    """Returns the message. Raises BadMessage for bytes that are none."""
    try:
        return _to_client(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)) from None


def batches(calls: list[RunRequest]) -> list[Run]:
    """Returns the calls in messages of at most BATCH calls, and of BATCH_BYTES plus the last call."""
    messages: list[Run] = []
    room = 0
    for call in calls:
        if room <= 0 or len(messages[-1].calls) == BATCH:
            messages.append(Run([]))
            room = BATCH_BYTES
        messages[-1].calls.append(call)
        room -= call.size_bytes
    return messages
