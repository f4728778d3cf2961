"""Tracks which stage has each group of a run, and decides whether anything can still move. Pure: it is told what the
stages take and put out.

Invariants
- A stage puts out each group that it takes once. A second time is an error, and so is a group that it did not take.
- A pipeline is dead only if none of its stages can act any more. A stage that holds groups and has a task or a timer of
  its own can, since it may put them out without another item.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 3  # prompts that a message names


class GroupVanished(RuntimeError):
    """A stage took a group and can never put it out. The message names stage, counts and prompts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageState:
    """A stage at one moment.

    waits: whether all its workers wait for an item. holds: how many groups it took and has not put out. may_act:
    whether it has a task or a timer of its own, which may put something out without another item.
    """

    name: str
    queue: int
    waits: bool
    holds: int
    may_act: bool = False


def is_dead(stages: Sequence[StageState], *, waits_for_lease: bool) -> bool:
    """Returns whether nothing will ever move again.

    That is so if the first stage waits for a lease, which only a trained step gives back, and all others wait for items
    that nobody makes.

    >>> admit = StageState(name="admit", queue=0, waits=False, holds=0)
    >>> skip_easy = StageState(name="skip_easy", queue=0, waits=True, holds=1)
    >>> train = StageState(name="train", queue=0, waits=True, holds=0)
    >>> is_dead([admit, skip_easy, train], waits_for_lease=True)
    True
    """
    followers = stages[1:]
    return waits_for_lease and all(
        stage.queue == 0 and stage.waits and not (stage.holds and stage.may_act) for stage in followers
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a group is: within a stage that took it, or on the way from there to the next one."""

    prompt_id: str
    stage: str
    within: bool
    has_advantages: bool


class Whereabouts:
    """Knows where each group is. It is told by `taken` and `put`, and by `forget` when a group's lease is released.

    >>> from engine.types import Group, Prompt
    >>> group = Group(prompt=Prompt(id="train-7", messages=(), answer=""), trajectories=(), lease=0)
    >>> whereabouts = Whereabouts()
    >>> whereabouts.taken("skip_easy", group); whereabouts.within("skip_easy")
    ['train-7']
    """

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}  # lease -> place

    def taken(self, stage: str, item: Any) -> None:
        for group in _groups(item):
            self._places[group.lease] = _place(group, stage, within=True)

    def put(self, stage: str, item: Any, *, source: bool = False) -> None:
        """Notes what a stage puts out. source: whether it is the stage that makes the groups.

        Raises ValueError for a group that the stage does not have, whose advantages it lost, or that cannot be trained
        with what it keeps.
        """
        for group in _groups(item):
            before = self._places.get(group.lease)
            own = before if before is not None and before.stage == stage else None
            if not source and (own is None or not own.within):
                fault = "a second time" if own is not None else "although it has not taken it, or has put it out before"
                raise ValueError(
                    f"stage {stage} put out the group of prompt {group.prompt.id} (lease {group.lease}) {fault}. "
                    "Fix: put out each group that the stage takes once"
                )
            if (wrong := _wrong(group)) is not None:
                raise ValueError(f"stage {stage} put out the group of prompt {group.prompt.id} with {wrong}")
            place = _place(group, stage, within=False)
            if before is not None and before.has_advantages and _kept(group) and not place.has_advantages:
                raise ValueError(
                    f"stage {stage} put out the group of prompt {group.prompt.id} with kept={group.kept} and without "
                    "advantages. Fix: set advantages_K too, one for each trajectory that is kept"
                )
            self._places[group.lease] = place

    def forget(self, lease: int) -> None:
        """Forgets a group that is trained, or dropped for good."""
        self._places.pop(lease, None)

    def within(self, stage: str) -> list[str]:
        """Returns the prompt ids of the groups that a stage took and has not put out, oldest lease first."""
        return [place.prompt_id for _, place in sorted(self._places.items()) if place.within and place.stage == stage]


def missing(stage: str, *, items_in: int, items_out: int, prompts: Sequence[str]) -> str:
    """Returns the sentence about a stage that has swallowed groups."""
    shown = ", ".join(prompts[:SHOWN]) + (f" and {len(prompts) - SHOWN} more" if len(prompts) > SHOWN else "")
    one = len(prompts) == 1
    return (
        f"stage {stage} took {items_in} groups and put out {items_out}: the {'group' if one else 'groups'} of prompt "
        f"{shown} {'is' if one else 'are'} missing"
    )


FIX = (
    "Fix: `await outbox.put(group)` for each group that the stage takes; one that is not to be trained goes out as "
    'replace(group, kept=(), advantages_K=None, drop="why")'
)


def _groups(item: Any) -> Iterator[Any]:
    """Yields the groups of an item, which is an admitted prompt, a group or the groups of a step; else none."""
    for member in item if isinstance(item, list) else (item,):
        if hasattr(member, "lease") and hasattr(member, "prompt"):
            yield member


def _wrong(group: Any) -> str | None:
    """Returns what makes a group unfit for training, and what to do; None if it is fit."""
    kept, advantages_K = _kept(group), getattr(group, "advantages_K", None)
    members = len(getattr(group, "trajectories", ()))
    if len(set(kept)) < len(kept) or not all(0 <= index < members for index in kept):
        return f"kept={kept}. Fix: different indices below its {members} trajectories"
    if advantages_K is not None and len(advantages_K) != len(kept):
        return f"{len(advantages_K)} advantages for kept={kept}. Fix: one for each trajectory that is kept"
    if advantages_K is not None and not all(map(math.isfinite, advantages_K)):
        return f"advantages that are not finite, {advantages_K!r:.100}. Fix: finite numbers"
    return None


def _kept(group: Any) -> Sequence[int]:
    return getattr(group, "kept", ())


def _place(group: Any, stage: str, *, within: bool) -> _Place:
    has = getattr(group, "advantages_K", None) is not None
    return _Place(prompt_id=group.prompt.id, stage=stage, within=within, has_advantages=has)
