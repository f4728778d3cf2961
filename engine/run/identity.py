"""Whether a folder holds the same run: the options that decide its result, compared with those it was made with."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

SHOWN_CHARS = 80

Differences = Mapping[str, tuple[Any, Any]]
"""Name -> (the value there, the value now); None where there is no such name."""


class Identity:
    """The options that decide what a run or a job produces, by name. Results of one identity may be continued as one.

    config: the options as `engine.console.options.flat` returns them, and whatever else decides the result, such as the
    hash of a data file. free: names of options that may change from one start to the next; "record." frees each name
    that begins with it.

    >>> made = Identity({"seed": 0, "steps": 8, "record.newest": 4}, free=("steps", "record."))
    >>> made.differences({"seed": 1, "steps": 40, "argv": []})
    {'seed': (1, 0)}
    """

    def __init__(self, config: Mapping[str, Any], *, free: Collection[str] = ()) -> None:
        beginnings = tuple(name for name in free if name.endswith("."))
        deciding = {
            name: value for name, value in config.items() if name not in free and not name.startswith(beginnings)
        }
        self.values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(deciding, enc_hook=str))
        """As they come back from a JSON file: a tuple is a list, a path is text."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.values == other.values

    __hash__ = None  # type: ignore[assignment]  # its values may be lists

    def __repr__(self) -> str:
        return f"Identity({self.values})"

    def differences(self, there: Mapping[str, Any]) -> Differences:
        """Returns the options whose values are others there. there: a config.json, which may hold more than these."""
        return {name: (there.get(name), value) for name, value in self.values.items() if there.get(name) != value}


def describe(differences: Differences) -> str:
    """Returns the differences as part of a message.

    >>> describe({"seed": (1, 0), "k": (None, 2)})
    'seed (1 there, 0 now), k (None there, 2 now)'
    """
    return ", ".join(f"{name} ({_shown(there)} there, {_shown(now)} now)" for name, (there, now) in differences.items())


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 20]} ... {text[-15:]}"
