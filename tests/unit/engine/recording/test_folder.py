"""The record on the disk as it grows: rotation, what a killed run left, a disk that is full."""

import errno
import os
from dataclasses import replace

import pytest
from msgspec import structs

from engine.encoding import encode
from engine.recording import files
from engine.recording.folder import RecordFolder
from engine.recording.policy import RecordConfig
from engine.recording.reader import RecordedRun
from engine.recording.records import FORMAT
from tests.support.recorded_run import made_group, made_row, made_segment, made_tokens


def write(folder, step, groups=1, samples=2):
    made = [made_group(step, group, samples) for group in range(groups)]
    records = [*made, *(made_tokens(group) for group in made)]
    folder.write_segment(made_segment(step))
    folder.write_step(made_row(step, made), [files.packed(record) for record in records])


def with_id(recorded, prompt_id):
    prompt = replace(recorded.group.prompt, id=prompt_id)
    return structs.replace(recorded, group=replace(recorded.group, prompt=prompt))


def opened(run, **config):
    folder = RecordFolder(run, RecordConfig(**config))
    folder.open("{}")
    return folder


def test_a_step_is_read_as_it_was_written_and_the_index_names_it(tmp_path):
    write(opened(tmp_path), 1, groups=3)
    run = RecordedRun(tmp_path)
    assert [encode(recorded) for recorded in run.groups(1)] == [encode(made_group(1, n, 2)) for n in range(3)]
    assert run.tokens(1, 2).number == 2
    assert (run.index.whole, run.index.last, run.index.problems) == ((1,), 1, ())
    assert run.tokenizer.read_text() == "{}"


def test_old_steps_are_thinned_with_their_timeline_and_leave_a_row(tmp_path):
    folder = opened(tmp_path, newest=2, every=4)
    for step in range(1, 11):
        write(folder, step)
    run = RecordedRun(tmp_path)
    assert run.steps == run.timeline_steps == list(run.index.whole) == [1, 4, 8, 9, 10]
    assert [row.step for row in run.rows()] == list(range(1, 11))


def test_the_folder_stays_within_its_budget(tmp_path):
    folder = opened(tmp_path, newest=40, every=1, max_mb=1)
    for step in range(1, 60):
        write(folder, step, groups=4, samples=8)
        there = sum(path.stat().st_size for path in folder.folder.rglob("*") if path.suffix in (".rec", ".seg", ".log"))
        assert there <= 1 << 20
        assert RecordedRun(tmp_path).index.total_bytes == there
    assert RecordedRun(tmp_path).steps[-1] == 59


def test_rows_that_take_too_much_are_thinned_and_the_reader_notices(tmp_path):
    folder, run = opened(tmp_path, newest=3, every=1, max_mb=1), RecordedRun(tmp_path)
    made = [with_id(made_group(1, 0, 2), os.urandom(4000).hex()) for _ in range(5)]  # 20 kB a row
    seen = []
    for step in range(1, 21):
        folder.write_step(made_row(step, made), [])
        seen.append([row.step for row in run.rows()])
    assert files.rows_path(run.folder).stat().st_size <= (1 << 20) // 8
    assert seen[-1][-4:] == [17, 18, 19, 20]
    there = [row.step for row in RecordedRun(tmp_path).rows()]
    assert there[-3:] == [18, 19, 20]
    assert set(there) < set(range(1, 21))
    assert set(there) <= set(seen[-1])


def test_a_killed_run_is_gone_on_with_and_what_it_tore_is_cut_off(tmp_path):
    folder = opened(tmp_path)
    for step in (1, 2):
        write(folder, step)
    run = RecordedRun(tmp_path)
    for path in (files.rows_path(run.folder), files.timeline_path(run.folder, 2)):
        with path.open("ab") as file:
            file.write(files.packed(made_segment(2))[:-20])
    (run.folder / "steps" / "step-000003.draft").write_bytes(b"half of a step")
    again = opened(tmp_path)
    write(again, 2)
    write(again, 3)
    run = RecordedRun(tmp_path)
    assert run.steps == [1, 2, 3]
    assert [row.step for row in run.rows()] == [1, 2, 3]
    assert [segment.step for segment in run.timeline(1, 3)] == [1, 2, 2, 3]
    assert not list(run.folder.rglob("*.draft"))


def test_a_run_that_an_earlier_version_recorded_goes_on_in_todays_format_and_says_so(tmp_path):
    write(opened(tmp_path), 1)
    path = files.index_path(files.folder_of(tmp_path))
    path.write_bytes(path.read_bytes().replace(b'"format":%d' % FORMAT, b'"format":1'))
    write(opened(tmp_path), 2)
    run = RecordedRun(tmp_path)
    assert run.fault is None
    assert "format 1" in run.index.problems[0]
    assert len(run.groups(2)) == 1


def test_a_step_that_is_trained_again_takes_the_place_of_the_first(tmp_path):
    folder = opened(tmp_path)
    write(folder, 1, groups=3)
    write(folder, 1, groups=2)
    run = RecordedRun(tmp_path)
    assert len(run.groups(1)) == 2
    assert [len(row.groups) for row in run.rows()] == [2]


def test_a_full_disk_leaves_what_was_whole_and_no_draft(tmp_path, monkeypatch):
    folder = opened(tmp_path)
    write(folder, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write(folder, 2)
    monkeypatch.undo()
    run = RecordedRun(tmp_path)
    assert run.steps == [1]
    assert not [path for path in run.folder.rglob("*.draft") if path.parent.name == "steps"]
    write(folder, 3)  # there is room again
    assert RecordedRun(tmp_path).steps == [1, 3]
