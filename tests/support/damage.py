"""What may happen to a file while nobody writes it."""

from __future__ import annotations

from collections.abc import Iterator


def damages(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """(what was done, what is left of the content) of a file; None: it was deleted."""
    yield "deleted", None
    if not content:
        return
    yield "empty", b""
    yield "cut off", content[: len(content) // 2]
    third = len(content) // 3
    yield "zeros within", content[:third] + bytes(third) + content[2 * third :]
    for place, at in (("start", 0), ("middle", len(content) // 2), ("end", len(content) - 1)):
        for bits in (0x01, 0x80):  # a digit becomes another one; no UTF-8
            yield f"{bits:#x} flipped at its {place}", content[:at] + bytes([content[at] ^ bits]) + content[at + 1 :]
