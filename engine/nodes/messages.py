"""Messages between the lead of a run and its rollout nodes (ZeroMQ with CURVE; the lead binds a ROUTER).

    node                                   lead
    Ask                          ->
                                 <-        Job(build, recipe, options, files)
    Pull(file, offset, size)     ->                                        over connections of their own
                                 <-        Chunk(data), or Gone(file)
    Hello(session, build, kept)  ->
                                 <-        Welcome, or Refused(reason)
    NodeBeat(version, free KV)   <->       LeadBeat                        each second
    Happened(segment)            ->
    Numbered(Record)             ->
                                 <-        Numbered(Grant | Cancel | Announce | Load | Bye)
                                 <-        Fenced: this session is over
    Leave                        ->                                        repeated until the session is over

Invariants
- A Numbered message arrives once and in order within its session, whatever the connection loses or repeats
  (`engine.nodes.link`). Any other may be lost or repeated without harm.
- A record counts only under the (lease, attempt, epoch) that the lead granted last.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

PROTOCOL = 4  # the version of these messages
CHUNK_BYTES = 1 << 20


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    pass


class FileInfo(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A file that may be pulled. sha256: in hexadecimal; empty if a canary checks the content."""

    name: str
    size_bytes: int
    sha256: str = ""


class Build(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What must be equal on all machines of a run. code: a hash of our own sources and of the recipe's file."""

    protocol: int
    code: str
    versions: dict[str, str]


class LearnerHosts(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A learner on several hosts, the lead's among them, with so many ranks on each.

    at: HOST:PORT of the lead, where the hosts meet (torch.distributed's c10d rendezvous). module: what each rank runs.
    run: a name that no other run has.
    """

    hosts: int
    ranks: int
    at: str
    module: str
    run: str


class Ask(_Message, frozen=True):
    """Node -> lead: what is this run?"""


class Pull(_Message, frozen=True):
    """Node -> lead: send a part of a file of the checkpoint, or of published weights."""

    name: str
    offset: int
    size_bytes: int


class Hello(_Message, frozen=True):
    """Node -> lead: ready to work, under a session that this node made (16 random bytes). Repeated until answered.

    capacity_tokens: that of the KV caches of all its replicas. kept: (lease, attempt) of each group that it had begun
    under an earlier session and still has. process: 16 random bytes that all sessions of this process have. gpus: those
    that its replicas have (`engine.telemetry.gpus.gpu_ids`).
    """

    session: bytes
    name: str
    build: Build
    capacity_tokens: int
    replicas: int
    kept: list[tuple[int, int]] = []
    process: bytes = b""
    gpus: list[str] = []


class NodeBeat(_Message, frozen=True):
    """Node -> lead, each second.

    version: that of the weights that are live on all its replicas, -1 before the first ones. pulled: the version of
    which it has a copy. free_tokens: free in its KV caches. tokens: sampled since it started. leaving: it takes no more
    groups, and leaves when those that it has are made.
    """

    session: bytes
    ack: int
    version: int
    pulled: int
    free_tokens: int
    tokens: int
    leaving: bool = False


class Leave(_Message, frozen=True):
    """Node -> lead: end this session now; what the node has not made goes to others. `Fenced` answers it."""

    session: bytes


class Happened(_Message, frozen=True):
    """Node -> lead, every few seconds: what happened here, for the run's record.

    segment: a packed `engine.recording.records.Segment`.
    """

    session: bytes
    segment: bytes


class Numbered(_Message, frozen=True):
    """Both directions: message `seq` (from 1) of this session. ack: the last one that the sender has received."""

    session: bytes
    seq: int
    ack: int
    body: bytes


class Job(_Message, frozen=True):
    """Lead -> node: what to run. recipe: its file, relative to the project if it lies within it.

    files: those of the checkpoint, which are pulled as `checkpoint/NAME`. The node's option `model` is their folder.
    taken: the GPUs that the run uses now, each with the name of the node that has it.
    """

    build: Build
    recipe: str
    options: list[str]
    files: list[FileInfo]
    learner: LearnerHosts | None = None
    taken: dict[str, str] = {}


class Refused(_Message, frozen=True):
    """Lead -> node: this node cannot take part. reason: one line with the cause, and what to do about it."""

    reason: str


class Chunk(_Message, frozen=True):
    name: str
    offset: int
    data: bytes


class Gone(_Message, frozen=True):
    """Lead -> node: there is no such file, or no longer."""

    name: str


class Welcome(_Message, frozen=True):
    """Lead -> node: this session belongs to the run."""

    session: bytes


class LeadBeat(_Message, frozen=True):
    """Lead -> node, each second."""

    session: bytes
    ack: int


class Fenced(_Message, frozen=True):
    """Lead -> node: this session is over, and its leases go to others. Say hello under a new one."""

    session: bytes


class Record(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Node -> lead: a record of the journal (`engine.run.journal_records`): a turn that ended, a graded trajectory, or
    the decision about the group, which is the end of the lease.
    """

    lease: int
    attempt: int
    epoch: int
    record: bytes


class Grant(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Lead -> node: make the group of this attempt. records: its prompt, and what the journal holds of it."""

    lease: int
    attempt: int
    epoch: int
    records: list[bytes]


class Cancel(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Lead -> node: nobody wants this group any more."""

    lease: int
    attempt: int
    epoch: int


class Announce(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Lead -> node: weights of this version can be pulled.

    canary: the learner's log-probabilities, float32, of the fixed sequences and then of canary_further. path, inode:
    where the file lies for a node of the same machine. at_once: whether they are loaded as soon as they are pulled, or
    when a Load says so. delta: a file (`engine.nodes.deltas`) that makes them from version `base`, for a node that has
    it; then `file` has a hash.
    """

    version: int
    file: FileInfo
    canary: bytes
    path: str
    inode: int
    at_once: bool
    delta: FileInfo | None = None
    base: int = -1
    canary_further: list[list[int]] = []


class Load(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Lead -> node: its replicas may pause for this version now."""

    version: int


class Bye(msgspec.Struct, frozen=True, tag=True, array_like=True, kw_only=True):
    """Lead -> node: the run has ended."""


Kind = TypeVar("Kind")
ToLead = Ask | Pull | Hello | NodeBeat | Leave | Happened | Numbered
ToNode = Job | Refused | Chunk | Gone | Welcome | LeadBeat | Fenced | Numbered
Order = Grant | Cancel | Announce | Load | Bye

encode = msgspec.msgpack.Encoder().encode
_to_lead = msgspec.msgpack.Decoder(ToLead)
_to_node = msgspec.msgpack.Decoder(ToNode)
_record = msgspec.msgpack.Decoder(Record)
_order = msgspec.msgpack.Decoder(Order)


class BadMessage(ValueError):
    """Bytes that are not a message of this protocol."""


def decode_to_lead(data: bytes) -> ToLead:
    """Raises BadMessage for any other bytes."""
    return _decode(_to_lead, data)


def decode_to_node(data: bytes) -> ToNode:
    """Raises BadMessage for any other bytes."""
    return _decode(_to_node, data)


def decode_record(data: bytes) -> Record:
    """Raises BadMessage for any other bytes."""
    return _decode(_record, data)


def decode_order(data: bytes) -> Order:
    """Raises BadMessage for any other bytes."""
    return _decode(_order, data)


def _decode(decoder: msgspec.msgpack.Decoder[Kind], data: bytes) -> Kind:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # msgspec lets the last two through
        raise BadMessage(str(error)) from None
