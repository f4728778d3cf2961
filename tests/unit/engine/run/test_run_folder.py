"""A run's folder: no result is overwritten, and a full disk is one clear error."""

import errno
import json
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from engine.atomic_files import CannotWrite
from engine.errors import BadInput
from engine.run.checkpoints import Unresumable
from engine.run.identity import Identity
from engine.run.run_folder import ENDED, RunFolder


def test_a_name_is_never_reused(tmp_path):
    for name in ("run", "run-2", "run-3"):
        with RunFolder.open(tmp_path / "runs", "run") as run:
            run.step(1, {"reward": 1.0})
        assert run.path == tmp_path / "runs" / name


def test_each_step_is_on_disk_when_step_returns(tmp_path):
    with RunFolder.open(tmp_path, "run") as run:
        for step in (1, 2):
            run.step(step, {"reward": np.float64(step / 2), "tokens": step})  # as a user's own estimate may give it
            lines = (run.path / "metrics.jsonl").read_text().splitlines()
            *names, checksum = row = json.loads(lines[-1])
            assert (names, checksum) == (["step", "reward", "tokens"], "crc32")
            assert [row[name] for name in names] == [step, step / 2, step]
            body = json.dumps({name: row[name] for name in names}, separators=(",", ":"))
            assert row["crc32"] == zlib.crc32(body.encode())
    assert len(lines) == 2
    assert [path.name[:6] for path in (run.path / "tensorboard").iterdir()] == ["events"]


def test_json_is_written_whole_or_not_at_all(tmp_path):
    with RunFolder.open(tmp_path, "run") as run:
        run.json("summary.json", {"path": Path("x"), "accuracy": 0.5})
        assert json.loads((run.path / "summary.json").read_text()) == {"path": "x", "accuracy": 0.5}
        with pytest.raises(ValueError, match=r".+"):
            run.json("summary.json", {"bad": {1: {(1, 2): 3}}, "surrogate": "\ud800"})
        assert json.loads((run.path / "summary.json").read_text())["accuracy"] == 0.5
        run.step(1, {})
    assert sorted(path.name for path in run.path.iterdir()) == [
        *("lock", "metrics.jsonl", "summary.json", "tensorboard")
    ]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotWrite, match=f"cannot write to {tmp_path}/file/run: Not a directory"):
        RunFolder.open(tmp_path / "file", "run")


def test_ctrl_c_while_a_folder_is_made_leaves_none(tmp_path, monkeypatch):
    """Were the name taken, the next run would be written elsewhere."""

    def interrupted(path, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            RunFolder.open(tmp_path, "run")
    assert list(tmp_path.iterdir()) == []
    with RunFolder.open(tmp_path, "run") as run:
        assert run.path.name == "run"


def test_other_errors_come_out_as_they_are(tmp_path):
    with RunFolder.open(tmp_path, "run") as run, pytest.raises(FileNotFoundError), run.writing("x") as path:
        (path / "nowhere").read_text()


def test_tensorboard_reads_what_was_written(tmp_path):
    """Decoded by tensorboardX's protocol buffers; the checksums by its own crc."""
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    with RunFolder.open(tmp_path, "run") as run:
        run.step(1, {"reward": 0.5, "time/step_s": 2.0})
        run.step(70_000, {"reward": float("nan"), "x" * 200: -1e9, "ratio": 1e300})
    [path] = (run.path / "tensorboard").iterdir()
    data, events = path.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        for part, checksum in ((data[:8], data[8:12]), (data[12 : 12 + length], data[12 + length : 16 + length])):
            crc = crc32c(part)
            assert struct.unpack("<I", checksum)[0] == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    assert events[0].file_version == "brain.Event:2"
    found = [(event.step, {value.tag: value.simple_value for value in event.summary.value}) for event in events[1:]]
    assert found[0] == (1, {"reward": 0.5, "time/step_s": 2.0})
    assert found[1][0] == 70_000
    assert math.isnan(found[1][1]["reward"])
    assert found[1][1]["x" * 200] == -1e9
    assert found[1][1]["ratio"] == math.inf
    assert abs(events[1].wall_time - events[0].wall_time) < 60


# A run that did not end

CONFIG = {"steps": 3, "runs": Path("runs"), "pair": (1, 2)}


def begin(tmp_path, config=CONFIG):
    with RunFolder.open(tmp_path, "run", Identity(config)) as run:
        if not run.resumed:
            run.json("config.json", {**config, "argv": ["x"]})
            for step in range(4):
                run.step(step, {"reward": step / 2})
    return run


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("the reward of mine-147 is nan"), "ValueError: the reward of mine-147 is nan"),
        (BadInput("steps must be at least 1\nFix: more"), "steps must be at least 1 Fix: more"),
        (KeyboardInterrupt(), "it was interrupted"),
    ],
)
def test_why_a_run_ended_stands_in_its_folder_until_it_is_resumed(tmp_path, error, line):
    begin(tmp_path)
    with pytest.raises(type(error)), RunFolder.open(tmp_path, "run", Identity(CONFIG)):
        raise error
    assert " ".join((tmp_path / "run" / ENDED).read_text().split()) == line
    begin(tmp_path)
    assert not (tmp_path / "run" / ENDED).exists()


def test_a_run_that_did_not_end_is_resumed_and_later_steps_are_forgotten(tmp_path):
    assert not begin(tmp_path).resumed
    path = tmp_path / "run" / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(b'{"step":4,"rew')  # killed within a write
    with RunFolder.open(tmp_path, "run", Identity(CONFIG)) as run:
        assert run.resumed
        assert run.resume(2) == [{"step": step, "reward": step / 2} for step in range(3)]
        run.step(3, {"reward": 9.0})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["reward"]) for row in rows] == [(0, 0.0), (1, 0.5), (2, 1.0), (3, 9.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_rows_that_are_not_whole_are_those_of_no_step(tmp_path):
    """They are passed over where the steps are done anew; without those of the others a run cannot go on."""
    begin(tmp_path)
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], bytes(9), b'{"step"\n', b"\n", b"[]\n", *lines[3:]]))  # power was lost
    with RunFolder.open(tmp_path, "run", Identity(CONFIG)) as run:
        assert [row["step"] for row in run.resume(2)] == [0, 1, 2]
    for left in (b"".join(lines[:2]), b"".join([*lines[:2], lines[2][:-5]]), bytes(50), b""):
        path.write_bytes(left)
        step = 2 if lines[1] in left else 1
        with (
            pytest.raises(Unresumable, match=rf"run/metrics.jsonl holds no whole row of step {step}"),
            RunFolder.open(tmp_path, "run", Identity(CONFIG)) as run,
        ):
            run.resume(2)
        assert path.read_bytes() == left


def test_a_damaged_row_is_never_taken_for_one_that_was_measured(tmp_path):
    """A digit that became another one, a byte that is no UTF-8, a line break that went: each bit of each byte."""
    begin(tmp_path)
    path = tmp_path / "run" / "metrics.jsonl"
    content = path.read_bytes()
    second = content.index(b'{"step":2')
    third = content.index(b'{"step":3')
    with RunFolder.open(tmp_path, "run", Identity(CONFIG)) as run:
        rows = run.rows(2)
        for at in range(len(content)):
            for bit in range(8):
                path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
                if at >= third:
                    assert run.rows(2) == rows, "what is not needed does not matter"
                    continue
                with pytest.raises(Unresumable, match=r"run/metrics.jsonl"):
                    run.rows(2)
                if at >= second:
                    assert run.rows(1) == rows[:2], "that of the state before it is whole"


def test_a_run_whose_configuration_is_damaged_is_not_taken_for_another_one(tmp_path):
    begin(tmp_path)
    path = tmp_path / "run" / "config.json"
    content = path.read_bytes()
    for left in (content[:-9], content.replace(b'"steps"', b'"\xffteps"'), b"", b"[]"):
        path.write_bytes(left)
        with pytest.raises(Unresumable, match=r"run/config.json"):
            begin(tmp_path)
    path.unlink()
    with pytest.raises(Unresumable, match=r"config.json"):
        begin(tmp_path)
    with RunFolder.open(tmp_path, "run") as run:  # fresh=true
        assert run.path.name == "run-2"
        run.json("config.json", CONFIG)
    assert begin(tmp_path).path.name == "run-2"


def test_the_folder_of_a_model_is_not_taken_for_a_run(tmp_path):
    """Its config.json was read as that of a run that did not end, and a KeyError ended the new one."""
    (tmp_path / "run").mkdir()
    model = tmp_path / "run" / "config.json"
    model.write_text('{"model_type": "qwen3"}')
    with pytest.raises(BadInput, match=r"name must .* got 'run'.*Fix: another name="):
        RunFolder.open(tmp_path, "run", Identity({"seed": 1}))
    assert list(tmp_path.rglob("*")) == [model.parent, model]


def test_another_configuration_a_finished_run_and_a_fresh_one_get_their_own_folder(tmp_path):
    begin(tmp_path)
    other = {**CONFIG, "steps": 4}
    assert begin(tmp_path, other).path.name == "run-2"
    assert begin(tmp_path, other).resumed
    with RunFolder.open(tmp_path, "run", Identity(other)) as run:
        run.json("summary.json", {})
    assert begin(tmp_path, other).path.name == "run-3"
    with RunFolder.open(tmp_path, "run") as run:
        assert (run.path.name, run.resumed) == ("run-4", False)
        run.step(0, {})


def test_a_run_is_resumed_although_others_came_between(tmp_path):
    begin(tmp_path)
    assert begin(tmp_path, {**CONFIG, "steps": 4}).path.name == "run-2"
    run = begin(tmp_path)
    assert (run.path.name, run.resumed) == ("run", True)


def test_a_run_that_fails_while_it_is_resumed_loses_nothing(tmp_path):
    """Nor does one that goes on from before all that it has measured: its journal is there still."""
    begin(tmp_path)
    (tmp_path / "run" / ".metrics.jsonl.draft").symlink_to("/dev/full")
    with pytest.raises(CannotWrite, match="cannot write"), RunFolder.open(tmp_path, "run", Identity(CONFIG)) as run:
        run.resume(2)
    with pytest.raises(ZeroDivisionError), RunFolder.open(tmp_path, "run", Identity(CONFIG)) as run:
        1 / len(run.resume(-1))
    assert run.path.exists()


def test_a_run_of_another_user_is_named(tmp_path, monkeypatch):
    begin(tmp_path)

    def refused(path, *rest):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("engine.run.run_folder.os.open", refused)  # root may open all
    with pytest.raises(
        CannotWrite,
        match=r"cannot write .*run/lock: Permission denied. Fix that and rerun the same command; the run resumes.",
    ):
        begin(tmp_path)


# More or fewer steps


def train(parent, steps, trained=None, config=CONFIG):
    """A run that is to have so many steps. trained: the last one that it has, where it does not end."""
    with RunFolder.open(parent, "run", Identity(config), steps=steps) as run:
        if run.resumed:
            run.extend(steps)
        else:
            run.json("config.json", {**config, "steps": steps})
        for step in range((steps if trained is None else trained) + 1):
            run.step(step, {})
        if trained is None:
            run.json("summary.json", {"steps": steps})
    return run


WITHOUT_STEPS = {name: value for name, value in CONFIG.items() if name != "steps"}


def read(path):
    return json.loads(path.read_text())


def test_a_finished_run_goes_on_when_more_steps_are_wanted_and_keeps_its_summary(tmp_path):
    train(tmp_path, 3, config=WITHOUT_STEPS)
    run = train(tmp_path, 5, trained=4, config=WITHOUT_STEPS)
    assert (run.path.name, run.resumed) == ("run", True)
    assert read(run.path / "summary-3.json") == {"steps": 3}
    assert not (run.path / "summary.json").exists(), "it has not ended now"
    assert read(run.path / "config.json")["steps"] == 5
    again = train(tmp_path, 5, config=WITHOUT_STEPS)
    assert (again.path.name, again.resumed) == ("run", True)
    assert read(run.path / "summary.json") == {"steps": 5}


@pytest.mark.parametrize("steps", [3, 2])
def test_a_finished_run_is_over_for_as_many_steps_or_fewer(tmp_path, steps):
    train(tmp_path, 3, config=WITHOUT_STEPS)
    run = train(tmp_path, steps, config=WITHOUT_STEPS)
    assert (run.path.name, run.resumed) == ("run-2", False)
    assert read(tmp_path / "run" / "summary.json") == {"steps": 3}


@pytest.mark.parametrize("steps", [2, 3, 9])
def test_a_run_that_did_not_end_takes_any_number_of_steps_that_it_does_not_exceed(tmp_path, steps):
    train(tmp_path, 4, trained=2, config=WITHOUT_STEPS)
    run = train(tmp_path, steps, config=WITHOUT_STEPS)
    assert (run.path.name, run.resumed) == ("run", True)
    assert read(run.path / "config.json")["steps"] == steps
    assert [path.name for path in run.path.glob("summary*")] == ["summary.json"]


def test_a_run_that_has_more_steps_than_it_is_to_have_is_refused_with_both_numbers(tmp_path):
    train(tmp_path, 9, trained=7, config=WITHOUT_STEPS)
    with pytest.raises(Unresumable, match=r"run did not end and has 7 steps, .* steps=5.*fresh=true"):
        train(tmp_path, 5, config=WITHOUT_STEPS)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_new_run_knows_the_one_that_did_not_end_and_in_what_it_differs(tmp_path):
    train(tmp_path, 3, trained=1, config={**WITHOUT_STEPS, "lr": 0.5, "extra": 1})
    run = train(tmp_path, 3, trained=1, config={**WITHOUT_STEPS, "lr": 0.1, "extra": 1})
    assert run.path.name == "run-2"
    assert run.unfinished.path == tmp_path / "run"
    assert run.unfinished.differences == {"lr": (0.5, 0.1)}
    assert run.unfinished.config["steps"] == 3


def test_a_note_is_a_line_of_a_file_and_never_an_error(tmp_path):
    with RunFolder.open(tmp_path, "run") as run:
        run.note("first")
        run.note("second")
        lines = (run.path / "notes.log").read_text().splitlines()
        assert [line.split()[-1] for line in lines] == ["first", "second"]
        (run.path / "notes.log").unlink()
        (run.path / "notes.log").symlink_to("/dev/full")
        run.note("third")
        run.step(0, {})


def test_a_folder_that_holds_nothing_but_a_free_lock_is_taken(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").touch()
    with RunFolder.open(tmp_path, "run", Identity({"seed": 0}), steps=1) as run:
        assert run.path == tmp_path / "run"
        assert not run.resumed
