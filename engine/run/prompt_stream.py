"""How a resumed run skips the prompts that it drew before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from engine.types import Prompt


@runtime_checkable
class Skips(Protocol):
    """A stream that can skip prompts without making them."""

    def skip(self, count: int) -> int:
        """Skips prompts. Returns how many, which are fewer than `count` where the stream ends."""
        ...


def skip(prompts: Iterator[Prompt], count: int) -> int:
    """Skips prompts of any stream, by its own `skip` if it has one. Returns how many were skipped."""
    if isinstance(prompts, Skips):
        return prompts.skip(count)
    return sum(1 for _ in zip(range(count), prompts, strict=False))
