"""How a resumed run passes over the prompts that it drew before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from engine.types import Prompt


@runtime_checkable
class Skips(Protocol):
    """A stream that can pass over prompts without making them."""

    def skip(self, count: int) -> int:
        """Returns over how many, which are fewer where it ends."""
        ...


def skip(prompts: Iterator[Prompt], count: int) -> int:
    """Passes over this many prompts of any stream, by its own `skip` where it has one. Returns over how many."""
    if isinstance(prompts, Skips):
        return prompts.skip(count)
    return sum(1 for _ in zip(range(count), prompts, strict=False))
