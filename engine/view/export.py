"""Writes a run as one HTML file, for a paper or a colleague: the page with the answers that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from engine.atomic_files import CannotWrite, write_whole
from engine.view.answers.trajectories import NotThere
from engine.view.page import single_page
from engine.view.questions import Questions

STEPS = 2  # the file has groups and timeline of this many newest steps: those of a whole run are gigabytes
TRAJECTORIES = 64  # trajectories of each such step that come with their texts and tokens,
TOKENS = 100_000  # and no further one after so many tokens: some 8 MB
LISTED = 2_048  # trajectories of each such step that are listed
PAGES = 2  # pages of placement decisions of each such step

Answers = Iterator[tuple[str, Any]]


def export(questions: Questions, path: Path, progress: Callable[[int, int], None] = lambda done, parts: None) -> int:
    """Writes the file and returns its size in bytes. Raises CannotWrite and NoPlots.

    progress: is called after each part with the number of those that are done, and of all. Nothing is left of a file
    whose writing was interrupted.
    """
    if not os.access(path.parent, os.W_OK | os.X_OK) or path.is_dir():  # said before the answers are computed
        raise CannotWrite(f"export={path} is no place for a file. Fix: name a file in a folder that can be written")
    answers: dict[str, Any] = {}
    parts = list(_parts(questions))
    for done, part in enumerate(parts, start=1):
        answers.update(part())
        progress(done, len(parts))
    content = single_page(answers).encode()
    try:
        write_whole(path, [content])
    except OSError as error:
        raise CannotWrite(f"cannot write {path}: {error.strerror}. Fix: name a file in a folder that exists") from error
    return len(content)


def _parts(questions: Questions) -> Iterator[Callable[[], Answers]]:
    """Yields functions that each answer some of what the page asks."""
    kept = []
    runs = questions.answer("runs", {})["runs"]
    for number, run in enumerate(runs):
        for name in ("metrics", "meanings", "now", "about", "changes"):
            yield partial(_asked, questions, name, run=number)
        for other in range(len(runs)):
            if other != number:
                yield partial(_asked, questions, "comparison", run=number, other=other)
        groups = run["recorded"][-STEPS:]
        timelines = run["timeline"][-STEPS:]
        for step in groups:
            yield partial(_step, questions, number, step)
        for step in timelines:
            yield partial(_asked, questions, "timeline", run=number, first=step, last=step)
        if groups:
            yield partial(_asked, questions, "tool-calls", run=number, first=groups[0], last=groups[-1])
        state = "finished" if run["state"] == "finished" else "stopped"
        kept.append(run | {"recorded": groups, "timeline": timelines, "state": state})
    yield lambda: iter([("runs", {"follow": False, "listed": False, "now": 0.0, "runs": kept})])


def _step(questions: Questions, run: int, step: int) -> Answers:
    groups: list[dict[str, Any]] = []
    for address, answer in _asked(questions, "groups", run=run, step=step):
        yield address, answer
        groups = answer["groups"]
    for name in ("placement", "tokens"):
        yield from _asked(questions, name, run=run, step=step)
    for page in range(PAGES):
        yield from _asked(questions, "decisions", run=run, step=step, page=page)
    listed = 0
    for group in groups:
        if listed < LISTED:
            yield from _asked(questions, "members", run=run, step=step, group=group["number"])
            listed += len(group["samples"])
    members = [
        (group["number"], sample, tokens)
        for group in groups
        for sample, tokens in zip(group["samples"], group["tokens"], strict=True)
    ]
    told = 0
    for number, sample, tokens in members[:TRAJECTORIES]:
        if told < TOKENS:
            yield from _asked(questions, "trajectory", run=run, step=step, group=number, sample=sample)
            told += tokens


def _asked(questions: Questions, name: str, **values: int) -> Answers:
    """Yields the answer under the address that the page asks for, which has the values in this order too.

    Yields nothing if the files hold no answer: a damaged record holds no groups.
    """
    query = {key: str(value) for key, value in values.items()}
    with suppress(NotThere):
        yield f"{name}?{urlencode(query)}", questions.answer(name, query)
