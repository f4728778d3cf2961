"""The recording beside a run: what is asked of the learner, what is written, and what never ends a run."""

import errno
import threading

import numpy as np

from engine.recording import files, recording
from engine.recording.policy import RecordConfig
from engine.recording.reader import RecordedRun
from engine.recording.recording import Recording
from engine.telemetry.timeline import EVENTS, Timeline
from engine.types import LearnerNumbers
from tests.support.fakes import Clock
from tests.support.recorded_run import made_group, made_segment
from tests.unit.engine.recording.test_groups import a_batch, a_group


def a_recording(run, timeline=None, notes=None, **config):
    return Recording(
        run,
        RecordConfig(**config),
        timeline or Timeline(Clock()),
        step=1,
        tokenizer="{}",
        note=[].append if notes is None else notes.append,
    )


def numbers_of(batch, rows):
    """By row; each number is that of its token in the batch."""
    ends = np.cumsum(batch.lengths_B)
    tokens = {row: np.arange(ends[row] - batch.lengths_B[row], ends[row], dtype=np.float32) for row in rows}
    return {row: LearnerNumbers(logprobs_T=at, entropy_T=at, logprob_gradient_T=at) for row, at in tokens.items()}


async def test_a_step_is_on_the_disk_with_the_learners_numbers_in_their_places(tmp_path):
    groups = [a_group(0), a_group(1), a_group(2)]
    batch = a_batch(groups)
    async with a_recording(tmp_path, token_groups=2) as subject:
        rows = subject.begin(1, groups, batch)
        assert rows == [0, 1, 2, 3]
        subject.trained(numbers_of(batch, rows))
    run = RecordedRun(tmp_path)
    assert [group.whole for group in run.groups(1)] == [True, True, False]
    second = run.tokens(1, 1).trajectories
    before = int(batch.lengths_B[:2].sum())
    assert second[0][0].learner_logprobs_T.tolist() == list(range(before, before + 7))
    assert second[2][0].learner_logprob_gradient_T.tolist() == list(range(before + 7, before + 7 + 9))
    assert run.index.problems == ()


async def test_a_step_of_which_nothing_is_trained_asks_the_learner_nothing(tmp_path):
    groups = [a_group(0, kept=(), drop="flat")]
    async with a_recording(tmp_path) as subject:
        assert subject.begin(1, groups, a_batch(groups)) == []
        subject.trained({})
    assert RecordedRun(tmp_path).groups(1)[0].group.drop == "flat"


async def test_the_timeline_of_a_step_goes_to_where_its_weights_are_live(tmp_path):
    clock, groups = Clock(), [a_group(0)]
    timeline = Timeline(clock)
    async with a_recording(tmp_path, timeline) as subject:
        timeline.instant("fleet", "first")
        subject.cut()
        timeline.instant("fleet", "second")
        subject.begin(1, groups, a_batch(groups))
        subject.trained({})
        timeline.instant("fleet", "third")
    run = RecordedRun(tmp_path)
    names = [[instant.name for segment in run.timeline(step, step) for instant in segment.instants] for step in (1, 2)]
    assert names == [["first", "second"], ["third"]]


async def test_what_happened_is_on_the_disk_while_the_run_goes_on(tmp_path):
    timeline = Timeline(Clock())
    async with a_recording(tmp_path, timeline) as subject:
        timeline.instant("fleet", "now")
        await subject.flush()
        [segment] = RecordedRun(tmp_path).timeline(1, 1)
        assert [instant.name for instant in segment.instants] == ["now"]


async def test_a_full_disk_is_noted_once_and_the_record_goes_on_when_there_is_room(tmp_path, monkeypatch):
    notes, groups = [], [a_group(0)]

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    async with a_recording(tmp_path, notes=notes) as subject:
        await subject.flush()
        with monkeypatch.context() as patched:
            patched.setattr(files, "append", full)
            for step in (1, 2):
                subject.begin(step, groups, a_batch(groups))
                subject.trained({})
            await subject.flush()
        subject.begin(3, groups, a_batch(groups))
        subject.trained({})
    assert len(notes) == 1
    assert "No space left" in notes[0]
    run = RecordedRun(tmp_path)
    assert run.steps == [3]
    assert "No space left" in run.index.problems[0]


async def test_a_bug_in_what_a_selector_says_is_noted_and_ends_nothing(tmp_path):
    notes, groups = [], [a_group(0)]
    async with a_recording(tmp_path, notes=notes) as subject:
        subject.begin(1, groups, a_batch(groups), lambda group: 1 / 0)
        subject.trained({})
        subject.begin(2, groups, a_batch(groups))
        subject.trained({})
    assert len(notes) == 1
    assert "ZeroDivisionError" in notes[0]
    assert RecordedRun(tmp_path).steps == [2]


async def test_a_disk_that_is_too_slow_loses_records_and_not_memory(tmp_path):
    notes, gate = [], threading.Event()
    async with a_recording(tmp_path, notes=notes) as subject:
        subject._post(gate.wait)
        for _ in range(2 * recording.WAITING):
            subject.cut()
        gate.set()
    assert len(notes) == 1
    run = RecordedRun(tmp_path)
    assert len(list(run.timeline(1, 1))) < recording.WAITING + 2
    assert run.index.problems


async def test_what_another_machine_noted_is_in_the_step_under_way_under_its_name(tmp_path):
    async with a_recording(tmp_path) as subject:
        subject.happened_on("left", files.packed(made_segment(9)))
        subject.happened_on("left", b"no segment at all")
        subject.happened_on("left", files.packed(made_group(1, 0, 2)))
    found = [segment for segment in RecordedRun(tmp_path).timeline(1, 1) if segment.node == "left"]
    assert [segment.spans for segment in found] == [made_segment(9).spans]
    assert RecordedRun(tmp_path).index.problems == ()


async def test_a_group_says_which_machine_made_it(tmp_path):
    groups = [a_group(0), a_group(1)]
    async with a_recording(tmp_path) as subject:
        subject.nodes |= {0: "left", 1: ""}
        subject.begin(1, groups, a_batch(groups))
        subject.trained({})
    assert [recorded.node for recorded in RecordedRun(tmp_path).groups(1)] == ["left", ""]


async def test_a_run_that_is_cancelled_has_what_happened_before(tmp_path):
    timeline = Timeline(Clock())
    try:
        async with a_recording(tmp_path, timeline):
            timeline.instant("fleet", "last words")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    [segment] = RecordedRun(tmp_path).timeline(1, 1)
    assert [instant.name for instant in segment.instants] == ["last words"]


async def test_events_that_were_too_many_to_keep_are_told(tmp_path):
    timeline, notes = Timeline(Clock()), []
    async with a_recording(tmp_path, timeline, notes):
        for number in range(EVENTS + 3):
            timeline.span("reward", str(number), 0.0, 1.0)
    assert "3 events of the timeline are left out" in notes[0]
    assert "3 events" in RecordedRun(tmp_path).index.problems[0]
