"""Records and shows the steps and evaluations of a run, including those before it was resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from engine import metric_names as metric
from engine.atomic_files import CannotWrite
from engine.console.display import Display
from engine.console.report import Progress, plot
from engine.diagnosis.limit import WINDOW, Diagnosis, diagnose
from engine.recording.reader import RecordedRun
from engine.recording.segments import segment_of
from engine.recording.trace import EVENTS, write_trace
from engine.run.checkpoints import Unresumable
from engine.run.resume import RunState
from engine.run.run_folder import RunFolder
from engine.telemetry.failures import failures, summed_up
from engine.telemetry.sinks import MetricSink, Sinks
from engine.telemetry.timeline import Timeline
from engine.types import Trajectory

FIRST, LAST = "evaluation-first", "evaluation-last"  # names of their trajectories in the journal


class RunRecorder:
    """Writes metrics to the run's folder, the sinks and the display.

    resume_message: tells the user what is resumed; empty for a new run. title: the plot's title. sinks: get each row.
    """

    def __init__(
        self,
        run: RunFolder,
        state: RunState,
        timeline: Timeline,
        *,
        title: str = "",
        sinks: Sequence[MetricSink] = (),
    ) -> None:
        self.progress = Progress()
        self._display: Display | None = None
        self._title = title
        self.sinks = Sinks(sinks, run.note)
        self._run, self._state, self._timeline = run, state, timeline
        self._options = run.options()
        self._failed: list[str] = []  # lines that are shown with the next row
        for row in state.rows:
            if metric.REWARD in row and metric.TOOLS_ERROR_SHARE_CORRECT not in row:
                raise Unresumable(
                    f"{run.path / 'metrics.jsonl'}: step {row['step']:.0f} has no tools/error_share_correct; "
                    "an older version gave metrics other names. Fix: start a new run with fresh=true"
                )
            self.progress.step(int(row["step"]), row)
        self.resume_message = "\n".join(filter(None, [*self._examples(), state.resume_message]))

    def _examples(self) -> Iterator[str]:
        """Restores the report's examples from earlier evaluations. Yields a line for each evaluation that lost them."""
        evaluated = [row["step"] for row in self.progress.evaluations]
        for step, name, due in ((0, FIRST, 0 in evaluated), (1, LAST, max(evaluated, default=0) > 0)):
            trajectories = self._state.journal.kept(name)
            if trajectories is None and due:
                yield f"{self._run.path / 'journal' / name} is missing or damaged; the report goes without its examples"
            if trajectories is not None or due:
                self.progress.evaluated(step, trajectories or [])

    def show_on(self, display: Display) -> None:
        """Shows on this display what is recorded from now on, and at once what a resumed run measured before.

        The sinks get the earlier rows too, since one that failed, or was not there, may lack them.
        """
        self._display = display
        for row in self._state.rows:
            display.step(int(row["step"]), row, silent=True)
            self.sinks.step(int(row["step"]), {name: value for name, value in row.items() if name != "step"})

    def failed(self, what: str, trajectories: Sequence[Trajectory]) -> None:
        """Notes what failed by our fault, and shows it with the next row. what: the step or evaluation."""
        by_boundary = failures(trajectories)
        for failure in by_boundary:
            self._run.note(f"{what}: {failure.first}")
        if by_boundary:
            self._failed.append(summed_up(by_boundary, len(trajectories)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a row: of a step, of an evaluation of its weights, or of both."""
        self.progress.step(step, metrics)
        self._run.step(step, metrics)
        self.sinks.step(step, metrics)
        if self._display is not None:
            self._display.step(step, metrics, failed="; ".join(self._failed))
            self._display.limit(self.diagnosis().sentence)
        self._failed.clear()

    def diagnosis(self, *, ended: bool = False) -> Diagnosis:
        """Returns what limits the run, or limited it if it has ended, judged by its newest steps."""
        return diagnose(self.progress.steps[-WINDOW:], self._options, ended=ended)

    def evaluated(self, step: int, metrics: Mapping[str, float], trajectories: list[Trajectory]) -> None:
        """Notes that an evaluation has just ended. Its trajectories are kept for the report's examples."""
        self.failed(f"evaluation of step {step}", trajectories)
        ended = self._timeline.now()
        self._timeline.span("evaluation", f"step {step}", ended - metrics[metric.TIME_EVAL_S], ended, **metrics)
        self.progress.evaluated(step, trajectories)
        self._state.journal.keep(LAST if step else FIRST, trajectories)

    def background_evaluation(self, step: int, metrics: Mapping[str, float], trajectories: list[Trajectory]) -> None:
        """Records an evaluation that ran beside training, in a row of its own."""
        self.evaluated(step, metrics, trajectories)
        self.step(step, {**metrics, metric.TIME_TRAIN_TOTAL_S: self.progress.seconds_of(step)})

    def draw(self) -> None:
        """Writes the newest part of the timeline, and the plot. Raises CannotWrite."""
        record = RecordedRun(self._run.path)
        segments = record.newest(EVENTS) if record.is_there else [segment_of(self._timeline.drain(), step=0)]
        with self._run.writing("timeline.json") as path:
            write_trace(path, segments)
        if self.progress.steps and self.progress.evaluations:
            with self._run.writing("reward.png") as path:
                plot(path, self.progress, self._title)

    def draw_what_is_there(self) -> None:
        """Does what `draw` does, but hides a failed write: the user is told of the error that ended the run."""
        with suppress(CannotWrite):
            self.draw()

    def summary(self) -> dict[str, Any]:
        """Returns totals of the run, and each replica's idle seconds by cause since this process began."""
        idle = self._timeline.idle.seconds(self._timeline.now())
        causes = {f"replica{index}": seconds for index, seconds in idle.items()}
        return {
            **self.progress.summary(),
            "idle_attribution_s": causes,
            "sink_failures": dict(self.sinks.failures),
        }
