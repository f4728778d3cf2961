"""Answers the questions that the page asks about runs, by name. Server and export both use it."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from engine import metric_names as metric
from engine.diagnosis.limit import Diagnosis, diagnose
from engine.diagnosis.pace import pace_of
from engine.run.identity import Identity
from engine.view.answers.about import about
from engine.view.answers.in_flight import in_flight_of
from engine.view.answers.meanings import meanings_of
from engine.view.answers.owner import owner_of
from engine.view.answers.pace import changes_of, comparison_of
from engine.view.answers.placement import decisions_of, placement_of
from engine.view.answers.timeline import Stretch, timeline_of
from engine.view.answers.token_figures import token_figures_of
from engine.view.answers.tool_calls import tool_calls_of
from engine.view.answers.trajectories import NotThere, groups_of, members_of, trajectory_of
from engine.view.run_files import RunFiles
from engine.view.run_list import RunList

Query = Mapping[str, str]


class Questions:
    """Answers questions about runs, which are numbered in the order in which they were opened.

    follow: `runs` first reads what the runs have written since the last time. below: folders whose runs are listed and
    can be opened too.
    """

    def __init__(self, runs: Sequence[RunFiles], *, follow: bool = False, below: Sequence[Path] = ()) -> None:
        self.runs, self.follow = [*runs], follow
        self._list = RunList([*below, *(run.path for run in runs)])
        self._below = [*below]
        self._lock = threading.Lock()  # answers are made in threads, and RunFiles and RecordedRun cache what they read
        self._names: dict[str, Callable[[Query], Any]] = {
            "runs": self._runs,
            "run-list": lambda query: self._found(),
            "open": lambda query: {"number": self._open(query.get("path", ""))},
            "metrics": self._metrics,
            "now": self._now,
            "groups": lambda query: groups_of(self.run(query), _number(query, "step")),
            "members": lambda query: members_of(self.run(query), _number(query, "step"), _number(query, "group")),
            "trajectory": lambda query: trajectory_of(
                self.run(query), _number(query, "step"), _number(query, "group"), _number(query, "sample")
            ),
            "timeline": lambda query: timeline_of(self.run(query), _stretch(query)),
            "placement": lambda query: placement_of(self.run(query), _number(query, "step")),
            "decisions": lambda query: decisions_of(self.run(query), _number(query, "step"), _number(query, "page")),
            "tool-calls": lambda query: tool_calls_of(self.run(query), _number(query, "first"), _number(query, "last")),
            "tokens": lambda query: token_figures_of(self.run(query), _number(query, "step")),
            "owner": self._owner,
            "about": lambda query: about(self.run(query)),
            "meanings": lambda query: meanings_of(self.run(query)),
            "in-flight": lambda query: in_flight_of(self.run(query)),
            "changes": lambda query: changes_of(self.run(query)),
            "comparison": lambda query: comparison_of(self.run(query), self.run({"run": query.get("other", "")})),
        }

    @property
    def title(self) -> str:
        """What the page shows, in a few words."""
        roots = self._below
        named = [run.name for run in self.runs if not any(run.path.is_relative_to(root) for root in roots)]
        lists = ", ".join(str(root) for root in roots if root.exists())
        awaited = [f"{root} once it is there" for root in roots if not root.exists()]
        return ", ".join([*named, *([f"the runs in {lists}"] if lists else []), *awaited])

    def answer(self, name: str, query: Query) -> Any:
        """Answers the question of this name. Raises NotThere for what the run does not have, and ValueError for a wrong
        question.
        """
        answer = self._names.get(name)
        if answer is None:
            raise NotThere(f"there is no question {name!r}")
        with self._lock:
            try:
                return answer(query)
            except (ValueError, MemoryError):
                raise
            except Exception as error:  # the files may come from anywhere; the page still shows what it can read
                cause = f"{type(error).__name__}: {error}"
                raise ValueError(f"{name}: the run's files are damaged, or not those of a run ({cause})") from error

    def run(self, query: Query) -> RunFiles:
        """Returns the run that a query names by its number. Raises NotThere."""
        number = _number(query, "run")
        if not 0 <= number < len(self.runs):
            raise NotThere(f"there is no run {number}")
        return self.runs[number]

    def _runs(self, _: Query) -> dict[str, Any]:
        if self.follow:
            for run in self.runs:
                run.refresh()
        now = time.time()
        runs = [
            {
                "name": run.name,
                "path": str(run.path),
                "state": run.state,
                "epoch": run.epoch,
                "rows": len(run.rows),
                "last": max((int(row["step"]) for row in run.rows), default=0),
                "steps": run.config.get("steps"),
                "family": _family(run.config),
                "recorded": run.recorded.steps,
                "timeline": run.recorded.timeline_steps,
                "problems": run.problems,
                "changed_at": round(now - run.age_s),
                "step_s": pace_of(run.rows, run.state, run.age_s, run.ended).step_s,
            }
            for run in self.runs
        ]
        return {"follow": self.follow, "now": now, "listed": len(self._below) > 0, "runs": runs}

    def _found(self) -> dict[str, Any]:
        """Returns a row for each run that there is, with its number if it is open."""
        numbers = {run.path.resolve(): number for number, run in enumerate(self.runs)}
        return {
            "below": [str(root) for root in self._below],
            "runs": [row | {"number": numbers.get(Path(row["path"]).resolve())} for row in self._list.rows()],
        }

    def _open(self, path: str) -> int:
        """Opens a run of the list and returns its number. Raises NotThere for any other folder."""
        for row in self._found()["runs"]:
            if row["path"] == path:
                if row["number"] is None:
                    self.runs.append(RunFiles(Path(path)))
                    return len(self.runs) - 1
                number: int = row["number"]
                return number
        raise NotThere(f"there is no run {path}")

    def _metrics(self, query: Query) -> dict[str, Any]:
        """Returns the rows from `after` on, as columns. A row may be of a training step, an evaluation, or both."""
        run, after = self.run(query), int(query.get("after", 0))
        rows = run.rows[after:]
        names = sorted({name for row in rows for name in row} - {"step"})
        return {
            "after": after,
            "step": [row["step"] for row in rows],
            "values": {name: [row.get(name) for row in rows] for name in names},
        }

    def _owner(self, query: Query) -> dict[str, Any]:
        start, end = _seconds(query, "start"), _seconds(query, "end")
        if start is None or end is None:
            raise ValueError("start and end must be given")
        return owner_of(self.run(query), _number(query, "first"), _number(query, "last"), start, end)

    def _now(self, query: Query) -> dict[str, Any]:
        run = self.run(query)
        diagnosis: Diagnosis = diagnose(run.rows, run.config, run.summary, ended=run.state != "running")
        steps = [row for row in run.rows if metric.TIME_STEP_S in row]
        measured = not steps or any(metric.REPLICAS_BUSY_S in row for row in steps)
        pace = pace_of(run.rows, run.state, run.age_s, run.ended)
        return asdict(diagnosis) | {"measured": measured, "pace": asdict(pace)}


# Options in which runs of one family may differ: the seed, the folder, and how the command was written.
FREE = ("seed", "steps", "name", "runs", "fresh", "metrics_port", "argv", "directory", "options", "versions")


def _family(config: Mapping[str, Any]) -> str:
    """Returns a text that is the same for runs which differ only by their seed, as far as learning goes.

    >>> _family({"seed": 0, "lr": 1}) == _family({"seed": 1, "lr": 1}) != _family({"seed": 0, "lr": 2})
    True
    """
    values = Identity(config, free=FREE).values
    return f"{zlib.crc32(msgspec.json.encode(values, order='sorted')):08x}"


def _stretch(query: Query) -> Stretch:
    return Stretch(
        first=_number(query, "first"),
        last=_number(query, "last"),
        start=_seconds(query, "from"),
        end=_seconds(query, "to"),
        longest=query.get("trajectories") == "longest",
        idlest=query.get("replicas") == "idlest",
    )


def _seconds(query: Query, name: str) -> float | None:
    if name not in query:
        return None
    try:
        return float(query[name])
    except ValueError as error:
        raise ValueError(f"{name} must be a number of seconds, got {query[name]!r}") from error


def _number(query: Query, name: str) -> int:
    try:
        return int(query[name])
    except (KeyError, ValueError) as error:
        raise ValueError(f"{name} must be a number, got {query.get(name)!r}") from error
