"""Files that nodes pull from the lead: the checkpoint's, and published weights.

Invariants
- A pull has connections of its own, so it delays no other message, and its failure affects nothing else.
- A file appears under its name only when it is whole, and has its hash if that is known.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import zmq

from engine.nodes.messages import CHUNK_BYTES, BadMessage, Chunk, FileInfo, Gone, Pull, decode_to_node, encode
from sandbox.keys import HostKeys, trust
from sandbox.mailbox import Mailbox

CONNECTIONS = 8  # for each pull; with a long round trip a connection takes a second to get up to speed
AT_ONCE = 32  # chunks asked for before the first one has come
SILENCE_S = 20.0  # a pull without a chunk for so long has failed


class PullFailed(RuntimeError):
    """The file could not be pulled; the message says why."""


class FileServer:
    """The lead's side of pulls: files by the name under which they are pulled, open as long as they are offered."""

    def __init__(self) -> None:
        self._open: dict[str, int] = {}

    def offer(self, name: str, path: Path) -> None:
        self._open[name] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def withdraw(self, name: str) -> None:
        os.close(self._open.pop(name))

    def answer(self, pull: Pull) -> Chunk | Gone:
        """Returns a part of a file; Gone if there is no such file or part, or if it cannot be read."""
        file = self._open.get(pull.name)
        if file is None or not 0 < pull.size_bytes <= CHUNK_BYTES or not 0 <= pull.offset < os.fstat(file).st_size:
            return Gone(name=pull.name)
        try:
            return Chunk(name=pull.name, offset=pull.offset, data=os.pread(file, pull.size_bytes, pull.offset))
        except OSError:
            return Gone(name=pull.name)

    def close(self) -> None:
        for name in list(self._open):
            self.withdraw(name)


def info_of(path: Path) -> FileInfo:
    with path.open("rb") as file:
        return FileInfo(
            name=path.name, size_bytes=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )


async def fetch(lead: str, keys: HostKeys | None, name: str, info: FileInfo, path: Path) -> None:
    """Pulls a file. Raises PullFailed when the lead is silent, does not have it, or sends another one."""
    answers: asyncio.Queue[list[bytes]] = asyncio.Queue()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mailboxes = [Mailbox(zmq.DEALER, answers.put_nowait, context) for _ in range(CONNECTIONS)]
    draft = path.with_name(f".{path.name}.draft")
    try:
        for mailbox in mailboxes:
            if keys is not None:
                trust(mailbox, keys)
            mailbox.connect(lead)
        await _write(mailboxes, answers, name, info, draft)
        if info.sha256 and await asyncio.to_thread(info_of, draft) != _named(info, draft.name):
            raise PullFailed(f"{name}: its SHA-256 is not that of the lead's file")
        draft.rename(path)
    finally:
        for mailbox in mailboxes:
            mailbox.close(0)
        context.term()
        draft.unlink(missing_ok=True)


async def _write(
    mailboxes: Sequence[Mailbox], answers: asyncio.Queue[list[bytes]], name: str, info: FileInfo, draft: Path
) -> None:
    offsets = iter(range(0, info.size_bytes, CHUNK_BYTES))
    following = itertools.cycle(mailboxes)
    received = 0

    def ask() -> int:
        offset = next(offsets, None)
        if offset is None:
            return 0
        size = min(CHUNK_BYTES, info.size_bytes - offset)
        next(following).send_frames(encode(Pull(name=name, offset=offset, size_bytes=size)))
        return 1

    with draft.open("wb") as file:
        missing = sum(ask() for _ in range(AT_ONCE))
        while missing:
            chunk = await _next(answers, name)
            file.seek(chunk.offset)
            received += file.write(chunk.data)
            missing += ask() - 1
    if received != info.size_bytes:
        raise PullFailed(f"{name}: {received} bytes came, of {info.size_bytes}")


async def _next(answers: asyncio.Queue[list[bytes]], name: str) -> Chunk:
    try:
        async with asyncio.timeout(SILENCE_S):
            frames = await answers.get()
        answer = decode_to_node(frames[-1])
    except (TimeoutError, BadMessage) as error:
        raise PullFailed(f"{name}: the lead did not send it: {str(error) or f'silent for {SILENCE_S:g} s'}") from None
    if not isinstance(answer, Chunk):
        raise PullFailed(f"{name}: the lead does not have it any more")
    return answer


def _named(info: FileInfo, name: str) -> FileInfo:
    return FileInfo(name=name, size_bytes=info.size_bytes, sha256=info.sha256)
