"""Writes a run as one HTML file, for a paper or a colleague: the page with the answers that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from engine.atomic_files import CannotWrite, write_whole
from engine.view.answers.trajectories import NotThere
from engine.view.page import single_page
from engine.view.questions import Questions

STEPS = 2  # the file has groups and timeline of this many newest steps: those of a whole run are gigabytes
TRAJECTORIES = 64  # trajectories of each such step that come with their texts and tokens


def export(questions: Questions, path: Path) -> int:
    """Writes the file and returns its size in bytes. Raises CannotWrite and NoPlots."""
    content = single_page(dict(_answers(questions))).encode()
    try:
        write_whole(path, [content])
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}. Fix: name a file in a folder that exists") from error
    return len(content)


def _answers(questions: Questions) -> Iterator[tuple[str, Any]]:
    runs = questions.answer("runs", {})["runs"]
    kept = []
    for number, run in enumerate(runs):
        for name in ("metrics", "now", "about", "changes"):
            yield from _asked(questions, name, run=number)
        for other in range(len(runs)):
            if other != number:
                yield from _asked(questions, "comparison", run=number, other=other)
        groups = run["recorded"][-STEPS:]
        timelines = run["timeline"][-STEPS:]
        for step in groups:
            yield from _step(questions, number, step)
        for step in timelines:
            yield from _asked(questions, "timeline", run=number, first=step, last=step)
        if groups:
            yield from _asked(questions, "tool-calls", run=number, first=groups[0], last=groups[-1])
        kept.append(
            run
            | {
                "recorded": groups,
                "timeline": timelines,
                "state": "finished" if run["state"] == "finished" else "stopped",
            }
        )
    yield "runs", {"follow": False, "runs": kept}


def _step(questions: Questions, run: int, step: int) -> Iterator[tuple[str, Any]]:
    members: list[tuple[int, int]] = []
    for address, groups in _asked(questions, "groups", run=run, step=step):
        yield address, groups
        members = [
            (group["number"], member["sample"]) for group in groups["groups"] for member in group["trajectories"]
        ]
    for name in ("placement", "tokens"):
        yield from _asked(questions, name, run=run, step=step)
    for group, sample in members[:TRAJECTORIES]:
        yield from _asked(questions, "trajectory", run=run, step=step, group=group, sample=sample)


def _asked(questions: Questions, name: str, **values: int) -> Iterator[tuple[str, Any]]:
    """Yields the answer under the address that the page asks for, which has the values in this order too.

    Yields nothing if the files hold no answer: a damaged record holds no groups.
    """
    query = {key: str(value) for key, value in values.items()}
    with suppress(NotThere):
        yield f"{name}?{urlencode(query)}", questions.answer(name, query)
