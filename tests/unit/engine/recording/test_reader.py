"""A recorded run is read back as it was written, also while it is written, damaged, or thinned."""

import zlib

import msgspec
import pytest

from engine.encoding import encode, frame
from engine.errors import BadInput
from engine.recording import files
from engine.recording.reader import RecordedRun
from engine.recording.records import FORMAT
from tests.support.recorded_run import made_group, made_segment, made_tokens, write_recorded_run, write_step


def test_a_run_is_read_back_as_it_was_written(tmp_path):
    write_recorded_run(tmp_path, steps=3, groups=4, samples=4)
    run = RecordedRun(tmp_path)
    assert run.is_there
    assert run.index.whole == (1, 2, 3)
    assert run.steps == [1, 2, 3]
    made = [made_group(2, group, 4, whole=group < 3) for group in range(4)]
    assert [encode(recorded) for recorded in run.groups(2)] == [encode(recorded) for recorded in made]
    assert [row.step for row in run.rows()] == [1, 2, 3]
    assert run.timeline_steps == [1, 2, 3]
    assert [segment.spans for segment in run.timeline(2, 3)] == [made_segment(step).spans for step in (2, 3)]


def test_tokens_of_one_group_are_read_to_the_last_bit(tmp_path):
    write_recorded_run(tmp_path, steps=1)
    found, written = RecordedRun(tmp_path).tokens(1, 2), made_tokens(made_group(1, 2, 4))
    assert found.number == 2
    for theirs, ours in zip(found.trajectories, written.trajectories, strict=True):
        assert encode(theirs) == encode(ours)


def test_a_group_that_is_not_whole_has_its_tokens_and_no_numbers(tmp_path):
    write_recorded_run(tmp_path, steps=1)
    [part] = RecordedRun(tmp_path).tokens(1, 3).trajectories[0]
    assert len(part.token_ids_T) == len(part.sampled_T) == 60
    assert part.logprobs_T is part.learner_logprob_gradient_T is None


def test_the_tokenizer_beside_it_reads_the_tokens(tmp_path):
    from tokenizers import Tokenizer

    write_recorded_run(tmp_path, steps=1)
    run = RecordedRun(tmp_path)
    [part] = run.tokens(1, 0).trajectories[0]
    assert Tokenizer.from_file(str(run.tokenizer)).decode(part.token_ids_T.tolist())


def test_rows_are_read_on_from_where_they_were(tmp_path):
    write_recorded_run(tmp_path, steps=2)
    run = RecordedRun(tmp_path)
    assert [row.step for row in run.rows()] == [1, 2]
    write_step(run.folder, 3)
    assert [row.step for row in run.rows()] == [1, 2, 3]


def test_a_step_that_was_trained_again_counts_once(tmp_path):
    write_recorded_run(tmp_path, steps=2)
    run = RecordedRun(tmp_path)
    write_step(run.folder, 2, groups=2)
    assert [(row.step, len(row.groups)) for row in run.rows()] == [(1, 4), (2, 2)]


def test_a_torn_file_gives_what_is_whole_of_it(tmp_path):
    write_recorded_run(tmp_path, steps=2)
    run = RecordedRun(tmp_path)
    for path in (files.step_path(run.folder, 2), files.timeline_path(run.folder, 2), files.rows_path(run.folder)):
        path.write_bytes(path.read_bytes()[:-5])
    assert len(run.groups(2)) == 4
    assert run.tokens(2, 2) is not None
    assert run.tokens(2, 3) is None
    assert [segment.step for segment in run.timeline(1, 2)] == [1]
    assert [row.step for row in run.rows()] == [1]


def test_any_cut_of_a_step_file_is_read_without_an_error(tmp_path):
    write_recorded_run(tmp_path, steps=1, groups=2, samples=2)
    run, path = RecordedRun(tmp_path), files.step_path(files.folder_of(tmp_path), 1)
    whole = path.read_bytes()
    for end in range(0, len(whole), 97):
        path.write_bytes(whole[:end])
        assert len(run.groups(1)) <= 2
        run.tokens(1, 1)


def test_what_is_not_there_is_nothing(tmp_path):
    run = RecordedRun(tmp_path)
    assert (run.is_there, run.index, run.tokenizer, run.steps, run.rows()) == (False, None, None, [], [])
    assert (run.groups(1), run.tokens(1, 0), run.timeline_steps, list(run.timeline(0, 9))) == ([], None, [], [])


def test_a_record_of_another_version_says_so_to_whoever_opens_it(tmp_path):
    write_recorded_run(tmp_path, steps=2)
    run = RecordedRun(tmp_path)
    assert run.fault is None
    path = files.index_path(run.folder)
    path.write_bytes(path.read_bytes().replace(b'"format":%d' % FORMAT, b'"format":1'))
    assert "format 1" in run.fault
    with pytest.raises(BadInput, match="format 1"):
        run.find(2)


def test_a_step_is_asked_for_by_its_number_or_the_last_one_is_meant(tmp_path):
    run = RecordedRun(tmp_path)
    with pytest.raises(BadInput, match="record"):
        run.find()
    write_recorded_run(tmp_path, steps=3)
    assert (run.find(), run.find(2)) == (3, 2)
    with pytest.raises(BadInput, match=r"step 7.*1, 2, 3"):
        run.find(7)


def test_a_kind_of_record_that_is_not_known_is_left_out(tmp_path):
    write_recorded_run(tmp_path, steps=1)
    run = RecordedRun(tmp_path)
    other = msgspec.msgpack.encode({"type": "Future"})
    with files.timeline_path(run.folder, 1).open("ab") as file:
        file.write(frame(zlib.compress(other)))
    assert len(list(run.timeline(1, 1))) == 1


def test_a_timeline_is_read_on_while_it_grows(tmp_path):
    write_recorded_run(tmp_path, steps=1)
    run = RecordedRun(tmp_path)
    first, offset = run.timeline_after(1, 0)
    assert len(first) == 1
    assert run.timeline_after(1, offset) == ([], offset)
    files.append_to(files.timeline_path(run.folder, 1), made_segment(1))
    more, _ = run.timeline_after(1, offset)
    assert [segment.spans for segment in more] == [made_segment(1).spans]
