"""What is written down of a run is shown again when it is resumed, without what was damaged meanwhile."""

import io
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
from rich.console import Console

from engine.console.recorder import FIRST, LAST, RunRecorder
from engine.console.report import print_report
from engine.diagnosis.step_window import Limit
from engine.run.checkpoints import Unresumable
from engine.run.identity import Identity
from engine.run.resume import RunState
from engine.run.run_folder import RunFolder
from engine.telemetry.sinks import SinkUnavailable, WeightsAndBiases
from engine.telemetry.timeline import Timeline
from tests.support.fakes import Clock, a_prompt, a_trajectory

CONFIG = {"steps": 1}
IDENTITY = Identity(CONFIG)


class Shown:
    """Stands for `Display`; steps: what was shown, and whether silently."""

    def __init__(self):
        self.steps = []

    def step(self, step, metrics, *, silent=False, failed=""):
        self.steps.append((step, silent))

    def limit(self, sentence):
        self.sentence = sentence


def evaluation(accuracy):
    names = ("eval/accuracy", "eval/accuracy_low", "eval/accuracy_high", "eval/tool_error_share_correct")
    counts = {"eval/n": 1, "eval/tool_calls": 2, "eval/tool_calls_jailed": 2, "time/eval_s": 1.0}
    return dict.fromkeys(names, accuracy) | counts


def example(question, reward):
    return [replace(a_trajectory(sampled=5, reward=reward), prompt=a_prompt(0, question))]


TRAINED = {"reward": 0.5, "tools/error_share_correct": 0.1, "rollout/staleness_max": 0, "time/train_total_s": 1.0}


def test_what_limits_the_run_is_shown_with_each_step(tmp_path):
    options = {"max_staleness": 0, "kv_blocks": 40}
    with RunFolder.open(tmp_path, "run", IDENTITY) as run:
        run.json("config.json", CONFIG | options)
        book = RunRecorder(run, RunState.open(run, 1), Timeline(Clock()))
        shown = Shown()
        book.show_on(shown)
        waits = {"time/step_s": 2.0, "replicas/busy_s": 2.0, "kv/blocked_s": 1.9, "tokens/generated": 9}
        book.step(1, TRAINED | waits)
        found = book.diagnosis()
        assert found.limit is Limit.KV
        assert shown.sentence == found.sentence
        assert found.advice[0].value == 40


def begun(folder):
    """A run of one step that was evaluated before and after, and killed before it ended."""
    with RunFolder.open(folder, "run", IDENTITY) as run:
        run.json("config.json", CONFIG)
        state = RunState.open(run, 1)
        book = RunRecorder(run, state, Timeline(Clock()))
        assert book.resume_message == ""
        book.show_on(Shown())
        book.evaluated(0, evaluation(0.25), example("as it was", 0.0))
        book.step(0, evaluation(0.25))
        book.evaluated(1, evaluation(0.75), example("as it is", 1.0))
        book.step(1, TRAINED | evaluation(0.75))
        state.journal.sync(state.journal.floor(1))
        checkpoint = state.checkpoints.of(1)
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
    return folder / "run" / "journal"


def resumed(folder):
    """(what it says, what the report prints, its summary, what the display shows)."""
    with RunFolder.open(folder, "run", IDENTITY) as run:
        book, shown, written = RunRecorder(run, RunState.open(run, 1), Timeline(Clock())), Shown(), io.StringIO()
        book.show_on(shown)
        summary = book.summary() | {"first_step_s": None}
        print_report(Console(file=written, width=200), run.path, summary, book.progress)
    return book.resume_message, written.getvalue(), summary, shown.steps


def test_a_run_that_is_resumed_shows_what_it_has_measured(tmp_path):
    begun(tmp_path)
    story, report, summary, shown = resumed(tmp_path)
    assert story.splitlines() == [line for line in story.splitlines() if "resuming" in line]
    assert "as it was" in report
    assert "before" in report.partition("Before and after")[2]
    assert (summary["accuracy_initial"], summary["accuracy_final"]) == (0.25, 0.75)
    assert shown == [(0, True), (1, True)]


def test_a_run_whose_metrics_have_older_names_is_refused(tmp_path):
    begun(tmp_path)
    with RunFolder.open(tmp_path, "run", IDENTITY) as run:
        state = RunState.open(run, 1)
        old = [
            {name.replace("tools/error_share", "tool_error_share"): value for name, value in row.items()}
            for row in state.rows
        ]
        with pytest.raises(Unresumable, match=r"metrics\.jsonl: step 1 .*tools/error_share_correct"):
            RunRecorder(run, replace(state, rows=old), Timeline(Clock()))


@pytest.mark.parametrize("damage", ["flipped", "cut off", "deleted"])
@pytest.mark.parametrize("names", [(FIRST,), (LAST,), (FIRST, LAST)])
def test_examples_that_are_damaged_are_left_out_and_the_rest_is_as_it_was(tmp_path, names, damage):
    journal = begun(tmp_path)
    for name in names:
        content = (journal / name).read_bytes()
        if damage == "flipped":
            (journal / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        elif damage == "cut off":
            (journal / name).write_bytes(content[:40])
        else:
            (journal / name).unlink()
    story, report, summary, shown = resumed(tmp_path)
    lines = story.splitlines()
    assert len(lines) == len(names) + 1
    assert all(str(journal / name) in line for name, line in zip(names, lines, strict=False))
    assert ("as it was" in report) is False
    assert ("as it is" in report) is (LAST not in names)
    assert ("Before and after" in report) is (LAST not in names), "a table of the evaluation before as that after"
    assert (summary["accuracy_initial"], summary["accuracy_final"]) == (0.25, 0.75)
    assert shown == [(0, True), (1, True)]


class Kept:
    """A sink."""

    def __init__(self):
        self.rows = []

    def step(self, step, metrics):
        self.rows.append((step, metrics["reward"]))


class Every:
    """A sink that takes every row."""

    def __init__(self):
        self.rows = []

    def step(self, step, metrics):
        self.rows.append((step, dict(metrics)))

    def close(self):
        pass


class Broken:
    def step(self, step, metrics):
        raise OSError("no network")

    def close(self):
        raise OSError("no network")


def test_every_row_goes_to_every_sink(tmp_path):
    sinks = [Kept(), Kept()]
    with RunFolder.open(tmp_path, "run", IDENTITY) as run:
        recorder = RunRecorder(run, RunState.open(run, 1), Timeline(Clock()), sinks=sinks)
        recorder.step(1, TRAINED)
    assert [sink.rows for sink in sinks] == [[(1, 0.5)]] * 2


def test_what_was_before_a_resume_goes_to_the_sinks(tmp_path):
    begun(tmp_path)
    kept = Every()
    with RunFolder.open(tmp_path, "run", IDENTITY) as run:
        recorder = RunRecorder(run, RunState.open(run, 1), Timeline(Clock()), sinks=[kept])
        recorder.show_on(Shown())
    assert [(step, row["eval/accuracy"]) for step, row in kept.rows] == [(0, 0.25), (1, 0.75)]


def test_a_sink_that_raises_ends_neither_the_run_nor_the_others(tmp_path):
    kept = Every()
    with RunFolder.open(tmp_path, "run", IDENTITY) as run:
        recorder = RunRecorder(run, RunState.open(run, 1), Timeline(Clock()), sinks=[Broken(), kept])
        for step in (1, 2, 3):
            recorder.step(step, TRAINED)
        recorder.sinks.close()
        assert recorder.summary()["sink_failures"] == {"Broken": 4}
    assert [step for step, _ in kept.rows] == [1, 2, 3]
    [note] = (run.path / "notes.log").read_text().splitlines()
    assert all(word in note for word in ("Broken", "step 1", "OSError", "no network"))


WANDB = """
runs = []


class Run:
    # As the client does, without its files: a row of an older step than the last one is lost.
    def __init__(self, settings):
        self.settings, self.rows, self.axes, self.last = settings, [], {}, 0

    def define_metric(self, name, step_metric=None, hidden=None):
        self.axes[name] = step_metric

    def log(self, row, step=None):
        step = self.last + 1 if step is None else step
        if step >= self.last:
            self.rows.append(row)
            self.last = step

    def finish(self):
        pass


def init(**settings):
    runs.append(Run(settings))
    return runs[-1]
"""


def test_an_evaluation_that_ends_beside_training_reaches_weights_and_biases(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with RunFolder.open(tmp_path, "run", IDENTITY) as run:
        sink = WeightsAndBiases(run)
    for step in (1, 2, 3):
        sink.step(step, {"reward": step / 10})
    sink.step(1, {"eval/accuracy": 0.5})
    sink.close()
    [made] = sys.modules.pop("wandb").runs
    assert [row["step"] for row in made.rows] == [1, 2, 3, 1]
    assert made.rows[-1]["eval/accuracy"] == 0.5
    assert made.axes["*"] == "step"


@pytest.mark.skipif(find_spec("wandb") is not None, reason="it is installed here")
def test_a_sink_whose_client_is_not_installed_says_what_to_do(tmp_path):
    with (
        RunFolder.open(tmp_path, "run", IDENTITY) as run,
        pytest.raises(SinkUnavailable, match="pip install wandb"),
    ):
        WeightsAndBiases(run)
