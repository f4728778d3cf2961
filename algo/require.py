"""The check of a configuration's fields."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


def require(owner: Any, rule: str, holds: Callable[[Any], bool], *names: str) -> None:
    """Raises ValueError naming field and value; of one that `holds` cannot compare (None, "3e-4"), too."""
    for name in names:
        with suppress(TypeError):
            if holds(getattr(owner, name)):
                continue
        raise ValueError(f"{type(owner).__name__}.{name} must be {rule}, got {getattr(owner, name)!r}")
