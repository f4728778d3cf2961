"""Assembles the page from index.html and its modules, as files of a server or as a single file.

There is no build step. The modules of static/ import each other by bare names ("view/parts/dom"). The page's import map
gives each name an address: one of the server, or in a single file the module's own text.
"""

from __future__ import annotations

import base64
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

STATIC = Path(__file__).parent / "static"
PLOT_FILES = ("uPlot.iife.js", "uPlot.min.css")


class NoPlots(Exception):
    """The plotting library is not installed."""


def plot_folder() -> Path:
    """Returns the folder of uPlot's files. It finds the package without importing it. Raises NoPlots."""
    package = importlib.util.find_spec("uplot")
    for location in (package.submodule_search_locations or []) if package is not None else []:
        folder = Path(location) / "static"
        if all((folder / name).is_file() for name in PLOT_FILES):
            return folder
    raise NoPlots("the plots need uPlot, which is not installed. Fix: pip install uplot-python==1.1.1")


def modules() -> dict[str, Path]:
    """Returns the page's modules: the name by which each is imported ("view/parts/dom"), and its file."""
    return {f"view/{path.relative_to(STATIC).with_suffix('')}": path for path in sorted(STATIC.rglob("*.js"))}


def served_page() -> str:
    """Returns index.html for a server that has the files below /static and /plots."""
    return _page(
        style='<link rel="stylesheet" href="/plots/uPlot.min.css">\n<link rel="stylesheet" href="/static/style.css">',
        plots='<script src="/plots/uPlot.iife.js"></script>',
        addresses={name: f"/static/{path.relative_to(STATIC)}" for name, path in modules().items()},
        answers=None,
    )


def single_page(answers: Mapping[str, Any]) -> str:
    """Returns the page as a single file. answers: what a server would answer, by the address that the page asks for."""
    folder = plot_folder()
    styles = [(folder / "uPlot.min.css").read_text(), (STATIC / "style.css").read_text()]
    return _page(
        style="".join(f"<style>\n{style}\n</style>\n" for style in styles),
        plots=f"<script>\n{(folder / 'uPlot.iife.js').read_text()}\n</script>",
        addresses={name: _inline(path) for name, path in modules().items()},
        answers=answers,
    )


def _page(*, style: str, plots: str, addresses: Mapping[str, str], answers: Mapping[str, Any] | None) -> str:
    carried = ""
    if answers is not None:
        carried = f'<script type="application/json" id="answers">{_within_html(answers)}</script>'
    page = (STATIC / "index.html").read_text()
    for mark, part in (
        ("<!-- style -->", style),
        ("<!-- plots -->", plots),
        ("<!-- imports -->", f'<script type="importmap">{_within_html({"imports": addresses})}</script>'),
        ("<!-- answers -->", carried),
    ):
        assert mark in page, mark
        page = page.replace(mark, part)
    return page


def _inline(path: Path) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _within_html(value: Any) -> str:
    """Encodes a value as JSON that cannot end the HTML element around it."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")
