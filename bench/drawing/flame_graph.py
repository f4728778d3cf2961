"""A flame graph as an SVG image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from bench.measuring.stacks import Stack

WIDTH, HEIGHT = 1600, 17


def flame_graph(stacks: Iterable[Stack], svg: Path) -> None:
    """Draws a rectangle for each function, as wide as its samples, with its callers below.

    py-spy itself draws only what it samples for a drawing.
    """
    root: dict[str, Any] = {}
    for stack in stacks:
        place = root
        for frame in (*stack.process, *stack.calls):
            box = place.setdefault(frame, [0, {}])
            box[0] += stack.samples
            place = box[1]
    svg.write_text("".join(_drawn(root)))


def _drawn(root: Mapping[str, Any]) -> Iterable[str]:
    total = sum(count for count, _ in root.values()) or 1
    depth = _depth(root)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * depth}" font-family="sans-serif">'
    yield "<style>text{font-size:11px}g:hover rect{stroke:black}</style>"
    yield from _boxes(root, 0.0, HEIGHT * (depth - 1), WIDTH / total)
    yield "</svg>"


def _depth(place: Mapping[str, Any]) -> int:
    return 1 + max((_depth(below) for _, below in place.values()), default=-1)


def _boxes(place: Mapping[str, Any], x: float, y: float, scale: float) -> Iterable[str]:
    for frame, (count, below) in place.items():
        width = count * scale
        if width >= 1:
            name = escape(frame)
            shown = escape(frame[: int(width / 7)]) if width > 30 else ""
            hue = sum(map(ord, frame)) % 50
            box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT - 1}" fill="hsl({hue},80%,70%)"'
            yield f"<g><title>{name}: {count}</title><rect {box}/>"
            yield f'<text x="{x + 3:.1f}" y="{y + 12}">{shown}</text></g>'
            yield from _boxes(below, x, y - HEIGHT, scale)
        x += width
