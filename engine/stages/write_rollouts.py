"""The stage that writes rollouts down: one JSON line per trajectory, for people to read and for later analysis.

`rocstar rollouts RUN` shows them; `read_rollouts` gives them to a program, with the exact token ids.
Nothing of a run depends on these files.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from engine.atomic_files import write_whole
from engine.numbered_files import numbered
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Inbox, Outbox, StageFunction
from engine.types import Group, Ids

FILE = "step-{:06d}.jsonl"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call as the model wrote it, and what it read of the result. turn: the one that made it, from 0."""

    name: str
    arguments: str
    outcome: str
    reply: str
    turn: int = 0


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """A segment of a trajectory: token_ids and turns as in Rollout."""

    token_ids: bytes
    turns: tuple[tuple[int, int], ...]


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A row. advantage: None where the trajectory was not trained. kept: it was chosen; drop: why its group was not.

    text: all that the model sampled, with the end-of-turn tokens between its turns; calls: of all turns, in order.
    token_ids: of the whole trajectory, the prompt first, as zlib-compressed little-endian int32 (base64 in JSON), a
    third of the size of a list of numbers; `ids` is the array. turns: the sampled spans [start, end) of it. segments:
    the same of its further token sequences, whose turns count on from those of the main one. They are empty in files
    that were written before they were recorded. scores: as of the trajectory. error: what failed by our fault, after
    the boundary where it did.
    """

    step: int
    prompt_id: str
    sample: int
    question: str
    answer: str
    text: str
    calls: tuple[Call, ...]
    reward: float | None
    kept: bool
    advantage: float | None
    drop: str | None
    stop: str
    tokens: int
    token_ids: bytes = b""
    turns: tuple[tuple[int, int], ...] = ()
    segments: tuple[Sampled, ...] = ()
    scores: dict[str, float | None] = {}
    error: str | None = None

    @property
    def ids(self) -> Ids:
        """[T]. Raises ValueError when the bytes are no token ids."""
        try:
            return np.frombuffer(zlib.decompress(self.token_ids), "<i4") if self.token_ids else np.zeros(0, np.int32)
        except zlib.error as error:
            raise ValueError(f"token_ids of {self.prompt_id} #{self.sample}: {error}") from error


def _packed(ids_T: Ids) -> bytes:
    return zlib.compress(ids_T.astype("<i4").tobytes())


_row = msgspec.json.Decoder(Rollout)


def path_of(run: Path, step: int) -> Path:
    """The file of a step, from 1."""
    return run / "rollouts" / FILE.format(step)


def steps_of(run: Path) -> list[int]:
    """The steps whose rollouts a run has written, ascending."""
    return list(numbered(run / "rollouts", FILE))


def read_rollouts(path: Path) -> Iterator[Rollout]:
    """The rows of a file, one at a time. Raises ValueError naming the line that is damaged."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _row.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def write_rollouts(folder: Path, leases: Leases, *, every: int) -> StageFunction:
    """Passes the groups of each step on; writes those of the steps (from 1) that `every` divides.

    Raises ValueError for an `every` below 1, and CannotWrite.
    """
    if every < 1:
        raise ValueError(f"every must be at least 1, got {every}")

    async def stage(inbox: Inbox, outbox: Outbox) -> None:
        async for groups in inbox:
            step = leases.step_of(groups[0].lease) + 1
            if step % every == 0:
                await asyncio.to_thread(_write, folder / f"step-{step:06d}.jsonl", step, groups)
            await outbox.put(groups)

    return stage


def _write(path: Path, step: int, groups: Sequence[Group]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_whole(path, (msgspec.json.encode(row) + b"\n" for row in rows(step, groups)))


def rows(step: int, groups: Sequence[Group]) -> Iterator[Rollout]:
    """The trajectories of a step's groups, in order."""
    for group in groups:
        values = group.advantages_K if group.advantages_K is not None else ()
        advantages = dict(zip(group.kept, values, strict=False))
        for index, member in enumerate(group.trajectories):
            yield Rollout(
                step=step,
                prompt_id=group.prompt.id,
                sample=member.sample,
                question=str(group.prompt.messages[-1]["content"]) if group.prompt.messages else "",
                answer=group.prompt.answer,
                text=member.text,
                calls=tuple(
                    Call(name=use.name, arguments=use.arguments, outcome=use.outcome, reply=use.response, turn=number)
                    for number, turn in enumerate(member.all_turns)
                    for use in turn.tool_uses
                ),
                reward=member.reward,
                kept=index in group.kept,
                advantage=float(advantages[index]) if index in advantages else None,
                drop=group.drop,
                stop=str(member.stop),
                tokens=member.sampled_tokens,
                token_ids=_packed(member.token_ids_T),
                turns=tuple((turn.start, turn.end) for turn in member.turns),
                segments=tuple(
                    Sampled(
                        token_ids=_packed(segment.token_ids_T),
                        turns=tuple((turn.start, turn.end) for turn in segment.turns),
                    )
                    for segment in member.segments
                ),
                scores=dict(member.scores),
                error=None if member.error is None else f"{member.error.boundary}: {member.error.message}",
            )
