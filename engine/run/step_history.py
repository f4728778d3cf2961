"""What a run has learnt so far, for whoever chooses prompts by it.

Invariant: the prompts of a step are chosen by the same weights whenever the run is opened again. Which weights a
mixture had for each step is written down when they are first asked for, before a prompt is drawn by them, and read
back: what is measured again after a resume, and refills that draw ahead, change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from engine.atomic_files import write_whole
from engine.run.checkpoints import Unresumable
from engine.run.run_folder import checked_row, signed_row

Rows = Sequence[Mapping[str, float]]
"""The metrics of steps, as in metrics.jsonl."""


class StepHistory:
    """`job.steps`: call it for the rows of all steps so far; give it to a mixture as its `steps`.

    >>> history = StepHistory(lambda: [{"step": 1, "reward": 0.5}], prompts_per_step=2, max_staleness=0)
    >>> history()
    [{'step': 1, 'reward': 0.5}]
    >>> mixture = history.joined()
    >>> history.weights(mixture, 2, lambda known: {"a": float(len(known))})  # the third prompt
    {'a': 1.0}
    """

    def __init__(
        self, rows: Callable[[], Rows], *, prompts_per_step: int, max_staleness: int, path: Path | None = None
    ) -> None:
        """path: where the weights are written down; None: nowhere. Raises Unresumable when it is damaged."""
        self.prompts_per_step = prompts_per_step
        self._rows, self._staleness, self._path = rows, max_staleness, path
        self._mixtures = count()
        self._decided: dict[tuple[int, int], dict[str, float]] = {}  # by mixture and step
        if path is not None and path.exists():
            self._read(path)

    def __call__(self) -> Rows:
        return self._rows()

    def joined(self) -> int:
        """The number of another mixture of the run; it is the same when the recipe is run again."""
        return next(self._mixtures)

    def weights(self, mixture: int, drawn: int, decide: Callable[[Rows], Mapping[str, float]]) -> Mapping[str, float]:
        """Those by which the prompt after `drawn` others is chosen.

        decide: gives new ones from the rows that are surely known when the step of that prompt begins: those more than
        `max_staleness` before it.
        """
        step = drawn // self.prompts_per_step
        if (mixture, step) not in self._decided:
            known = [row for row in self._rows() if row["step"] <= step - self._staleness]
            self._decided[mixture, step] = dict(decide(known))
            if self._path is not None:
                write_whole(self._path, self._lines())
        return self._decided[mixture, step]

    def _lines(self) -> Iterator[bytes]:
        for (mixture, step), weights in self._decided.items():
            row = {"mixture": mixture, "step": step, "weights": weights}
            yield signed_row(msgspec.json.encode(row, enc_hook=float)) + b"\n"

    def _read(self, path: Path) -> None:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            row: Mapping[str, Any] | None = checked_row(line)
            if row is None:
                raise Unresumable(
                    f"{path} is damaged in line {number}: by which weights prompts were drawn is not known. "
                    "Fix: fresh=true starts a new run"
                )
            self._decided[row["mixture"], row["step"]] = row["weights"]
