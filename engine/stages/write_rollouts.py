"""The stage that writes rollouts for people to read: one JSON line per trajectory.

`python -m engine.console.rollouts RUN` shows them. Nothing of a run depends on these files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from engine.atomic_files import write_whole
from engine.pipeline.leases import Leases
from engine.pipeline.pipeline import Inbox, Outbox, StageFunction
from engine.types import Group


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call as the model wrote it, and what it read of the result."""

    name: str
    arguments: str
    outcome: str
    reply: str


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """A row. advantage: None where the trajectory was not trained. kept: it was chosen; drop: why its group was not.

    text: all that the model sampled, with the end-of-turn tokens between its turns; calls: of all turns, in order.
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


def write_rollouts(folder: Path, leases: Leases, *, every: int) -> StageFunction:
    """Passes the groups of each step on; writes those of the steps (from 1) that `every` divides.

    Raises ValueError for an `every` below 1, and DiskFull.
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
                    Call(name=use.name, arguments=use.arguments, outcome=use.outcome, reply=use.response)
                    for use in member.tool_uses
                ),
                reward=member.reward,
                kept=index in group.kept,
                advantage=float(advantages[index]) if index in advantages else None,
                drop=group.drop,
                stop=str(member.stop),
                tokens=member.sampled_tokens,
            )
