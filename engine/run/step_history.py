"""The metrics of a run so far, for a mixture that chooses prompts by them.

Invariant: the prompts of a step are chosen by the same weights whenever the run is resumed. A mixture's weights for a
step are written down when they are first needed, before a prompt is drawn by them, and are read back later. So neither
metrics that are measured again after a resume nor refills that draw ahead change them.
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
"""Metrics of steps, as in metrics.jsonl."""


class StepHistory:
    """The history of a run, `job.steps`. A call returns the rows of all steps so far; a mixture takes it as `steps`.

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
        """Reads earlier weights. path: their file, None for no file. Raises Unresumable if it is damaged."""
        self.prompts_per_step = prompts_per_step
        self._rows, self._staleness, self._path = rows, max_staleness, path
        self._mixtures = count()
        self._decided: dict[tuple[int, int], dict[str, float]] = {}  # (mixture, step) -> weights
        if path is not None and path.exists():
            self._read(path)

    def __call__(self) -> Rows:
        return self._rows()

    def joined(self) -> int:
        """Returns a number for another mixture of the run; the same recipe gets the same numbers again."""
        return next(self._mixtures)

    def weights(self, mixture: int, drawn: int, decide: Callable[[Rows], Mapping[str, float]]) -> Mapping[str, float]:
        """Returns the weights by which a mixture chooses the prompt after `drawn` others.

        decide: computes new weights from the rows that are known for certain when the step of that prompt begins, which
        are those of steps more than `max_staleness` before it.
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
                    f"{path} is damaged in line {number}, so the weights of the mixture are unknown. "
                    "Fix: fresh=true starts a new run"
                )
            self._decided[row["mixture"], row["step"]] = row["weights"]
