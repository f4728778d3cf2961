"""Decides what of a long run stays on the disk. Pure: sizes go in, the steps to delete come out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sandbox.require import at_least, require

ROWS_SHARE = 8  # the rows may take one such part of the budget


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordConfig:
    """What a run records of itself, for people who look at it (`engine.recording`).

    >>> RecordConfig(max_mb=0).on
    False
    """

    newest: int = 50
    """Steps that are kept whole: all groups and trajectories, and the timeline."""
    every: int = 20
    """Older steps that stay whole: every so many-th, and the first. A row remains of the others."""
    token_groups: int = 4
    """Groups of a step whose tokens keep their numbers: the log-probabilities of sampler and learner, entropy."""
    max_mb: int = 1024
    """Size of the whole record in MiB; 0 records nothing. When it is reached, `every` doubles as often as needed."""

    def __post_init__(self) -> None:
        for name, least in (("newest", 1), ("every", 1), ("token_groups", 0), ("max_mb", 0)):
            require(name, getattr(self, name), at_least(least))

    @property
    def on(self) -> bool:
        return self.max_mb > 0

    @property
    def max_bytes(self) -> int:
        return self.max_mb << 20


def deletions(step_bytes: Mapping[int, int], config: RecordConfig, other_bytes: int = 0) -> list[int]:
    """Returns the steps that are no longer kept whole, ascending. step_bytes: what each takes, its timeline included.
    other_bytes: what else is in the budget.

    The newest stay, and of those before them the first and each `every`-th. Where all that is more than the budget,
    each second of the older ones goes, as often as it takes; then the older ones; then the oldest of the newest.

    >>> deletions({step: 1 for step in range(1, 11)}, RecordConfig(newest=2, every=4))
    [2, 3, 5, 6, 7]
    """
    if not step_bytes:
        return []
    last, every = max(step_bytes), config.every
    older = [step for step in sorted(step_bytes) if step <= last - config.newest]
    newest = [step for step in sorted(step_bytes) if step > last - config.newest]
    room = config.max_bytes - other_bytes
    kept = _thinned(older, every)
    while kept and _total(step_bytes, kept + newest) > room:
        every *= 2
        kept = _thinned(older, every) if every <= last else []
    while newest and _total(step_bytes, kept + newest) > room:
        newest.pop(0)
    return sorted(step_bytes.keys() - {*kept, *newest})


def rows_to_drop(row_bytes: Mapping[int, int], config: RecordConfig) -> list[int]:
    """Returns the steps of which no row remains either, ascending: none until all rows take an eighth of the budget.

    Then each second one goes, as often as it takes to halve that; the newest stay.

    >>> rows_to_drop(dict.fromkeys(range(1, 8), 20_000), RecordConfig(newest=2, max_mb=1))
    [1, 2, 3, 5]
    """
    if sum(row_bytes.values()) <= config.max_bytes // ROWS_SHARE:
        return []
    last, every = max(row_bytes), 1
    kept = list(row_bytes)
    while every <= last and _total(row_bytes, kept) > config.max_bytes // ROWS_SHARE // 2:
        every *= 2
        kept = [step for step in row_bytes if step > last - config.newest or step % every == 0]
    return sorted(row_bytes.keys() - set(kept))


def _thinned(steps: list[int], every: int) -> list[int]:
    return [step for step in steps if step <= 1 or step % every == 0]


def _total(step_bytes: Mapping[int, int], steps: list[int]) -> int:
    return sum(step_bytes[step] for step in steps)
