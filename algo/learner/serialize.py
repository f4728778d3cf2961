"""Plain values for objects: an object of a recipe reaches the learner as {"type": "module:Class", field: value, ...}.

Invariants
- from_plain(to_plain(value)) == value, also after a trip over the wire, for any frozen dataclass of plain values or of
  other such dataclasses that is defined in an importable module.
- What cannot be rebuilt on the other side is a ValueError on this one, as far as that can be known here.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any


def to_plain(value: Any) -> dict[str, Any]:
    """Returns the plain form of a dataclass instance. Raises ValueError for one that another process cannot import.

    >>> from algo.loss.policy_losses import Cispo
    >>> to_plain(Cispo(clip_high=1.0))["type"]
    'algo.loss.policy_losses:Cispo'
    """
    kind = type(value)
    path = f"{kind.__module__}:{kind.__qualname__}"
    if not is_dataclass(kind):
        raise ValueError(f"{path} must be a frozen dataclass of plain values")
    if kind.__module__ == "__main__" or "<locals>" in kind.__qualname__:
        raise ValueError(f"{path} cannot be imported by the learner: define it at the top of a module of its own")
    return {"type": path} | {field.name: _field_to_plain(getattr(value, field.name)) for field in fields(value)}


def _field_to_plain(value: Any) -> Any:
    return to_plain(value) if is_dataclass(value) else value


def from_plain(form: Any) -> Any:
    """Returns the object of a plain form; a form that is not a mapping is returned as it is.

    Raises ValueError when its type cannot be imported or does not take the fields.
    """
    if not isinstance(form, Mapping):
        return form
    values = {name: from_plain(value) for name, value in form.items()}
    path = str(values.pop("type", None))
    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        reason = f"type {path!r} cannot be imported ({error}); it must be module:Class on the learner's PYTHONPATH"
        raise ValueError(reason) from error
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(f"type {path!r} must be a dataclass")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{path} cannot be built: {error}") from error
