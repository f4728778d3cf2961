"""Writes plain values as JSON text, and reads such text back.

Plain are None, bool, int, float, complex, str, bytes, and list, tuple, set, frozenset and dict of plain values.

Invariants
- `decode` makes values of exactly these types, whatever the text: equality, length and hash are Python's own.
- Any text gives a value or a ValueError, and nothing of it is executed.
- Equal values of equal types have equal text. The order of a set makes no difference to it, that of a dict does.

The file stands alone, because its text is a part of the programs that run in the jail.
"""

import json

WIDEST = 1 << 63  # Integers beyond it are written in hexadecimal: Python bounds the digits of decimal ones.


def encode(value: object) -> str:
    """Returns the value as one line of ASCII. Raises ValueError if something in it is not plain.

    A subclass counts as its plain base (Counter as dict, a named tuple as tuple), and a NumPy scalar as its number.

    >>> encode([(1, "a"), {2}])
    '[{"tuple":[1,"a"]},{"set":[2]}]'
    """
    try:
        return json.dumps(_written(value), separators=(",", ":"))
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def decode(text: str) -> object:
    """Returns the value that `encode` wrote. Raises ValueError for any other text."""
    try:
        return _read(json.loads(text))
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"the text is no plain value: {error}") from None


def _written(value):  # type: ignore[no-untyped-def]
    if value is None or value is True or value is False or isinstance(value, (str, float)):
        return value
    if isinstance(value, int):
        return value if -WIDEST < value < WIDEST else {"int": hex(value)}
    if isinstance(value, list):
        return [_written(part) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [_written(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[_written(key), _written(part)] for key, part in value.items()]}
    for kind in (set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: sorted((_written(part) for part in value), key=json.dumps)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value).__module__ == "numpy" and hasattr(value, "item") and not getattr(value, "shape", True):
        return _written(value.item())
    raise ValueError(f"a {type(value).__name__} is no plain value")


def _read(value):  # type: ignore[no-untyped-def]
    if isinstance(value, list):
        return [_read(part) for part in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        real, imaginary = content
        return complex(real, imaginary)
    if kind == "dict":
        return {_read(key): _read(part) for key, part in content}
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](_read(part) for part in content)
