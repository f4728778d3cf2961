"""Files of a record that no run has written: copied, renamed, torn, changed, made by somebody with a purpose.

Nothing that reads them raises; what is wrong is left out, and the rest is there.
"""

import os
import random
import shutil
import struct
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.commands.replay import Place, recorded
from engine.commands.rollouts import Options, rollouts
from engine.encoding import frame, frames
from engine.errors import BadInput
from engine.numbered_files import numbered
from engine.recording import files
from engine.recording.reader import RecordedRun
from engine.recording.records import PartTokens
from engine.recording.rollouts import as_json, rollouts_of
from engine.recording.soundness import is_sound
from engine.recording.trace import write_trace
from engine.view.answers.trajectories import NotThere
from engine.view.export import export
from engine.view.questions import Questions
from engine.view.run_files import RunFiles
from tests.support.examples import examples
from tests.support.odd_texts import ODD_TEXTS
from tests.support.recorded_run import START, STEP_S, write_recorded_run
from tests.support.viewed_runs import write_viewed_run

STRAYS = (
    "step-000005 (copy).rec",
    "step-5.rec",
    "step-00000x.rec",
    "step-.rec",
    "step-٠٠٠٠٠٥.rec",
    "step-000005.rec.draft",
    "step-000005.seg (1)",
    f"step-{'9' * 200}.rec",
    "step-000001.rec~",
    "notes \x1b[2J.rec",
)


def ask_all(folder):
    """All that the page asks; returns what it was told of the first steps."""
    questions = Questions([RunFiles(folder)], follow=True)
    seen = questions.answer("runs", {})["runs"][0]
    told = {}
    for name, words in [
        ("about", {}),
        ("metrics", {}),
        ("now", {}),
        ("meanings", {}),
        ("in-flight", {}),
        ("run-list", {}),
        *((each, {"step": str(step)}) for each in ("groups", "placement", "tokens") for step in seen["recorded"][:4]),
        *((each, {"first": "0", "last": "9"}) for each in ("timeline", "tool-calls")),
        ("timeline", {"first": "0", "last": "9", "from": "0.1", "to": "0.9", "trajectories": "longest"}),
        ("owner", {"first": "0", "last": "9", "start": str(START + STEP_S), "end": str(START + STEP_S + 0.2)}),
        *(("decisions", {"step": str(step), "page": "0"}) for step in seen["recorded"][:4]),
        *(("members", {"step": str(step), "group": "1"}) for step in seen["recorded"][:4]),
        *(
            ("trajectory", {"step": str(step), "group": str(group), "sample": str(sample)})
            for step in seen["recorded"][:2]
            for group in range(3)
            for sample in (0, 1)
        ),
    ]:
        try:
            found = questions.answer(name, {"run": "0", **words})
        except (NotThere, ValueError):
            continue
        msgspec.json.encode(found, enc_hook=float)
        told[name, words.get("step"), words.get("group"), words.get("sample")] = found
    return seen, told


def read_all(folder):
    """All that a run or a program reads of a record; nothing raises."""
    run = RecordedRun(folder)
    assert run.index is None or run.index.newest is not None
    for step in run.steps:
        for rollout in rollouts_of(run, step, None):
            as_json(rollout)
    run.rows()
    segments = [*run.timeline(0, 1 << 40), *run.newest(1000)]
    write_trace(folder / "timeline.json", segments)
    msgspec.json.decode((folder / "timeline.json").read_bytes())


@pytest.fixture(scope="module")
def viewed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("viewed") / "run"
    write_viewed_run(folder, recorded=0)
    write_recorded_run(folder, steps=2, groups=2, samples=2)
    files.rows_path(files.folder_of(folder)).touch()
    return folder


@pytest.fixture
def run(viewed, tmp_path):
    return shutil.copytree(viewed, tmp_path / "run")


@pytest.mark.parametrize(
    "name", ["lock", "metrics.jsonl", "summary.json", "record/index.json", "record/steps/step-000001.rec"]
)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused_by_name_and_not_read(run, name, make):
    (run / name).unlink(missing_ok=True)
    make(run / name)
    for reads in (
        lambda: RunFiles(run),
        lambda: next(rollouts(Options(run=run))),
        lambda: recorded(run, Place(step=1, group=0, sample=0, turn=0)),
    ):
        with pytest.raises(BadInput, match=name):
            reads()


def test_what_lies_about_in_the_folders_is_nobodys(run):
    before = ask_all(run)
    for place in ("record/steps", "record/timeline"):
        for name in STRAYS:
            for suffix in ("", ".seg"):
                (run / place / f"{name}{suffix}").write_bytes(b"no record")
        (run / place / "step-000077.rec").mkdir()
        (run / place / "step-000078.rec").symlink_to("nowhere")
    assert ask_all(run)[1].keys() == before[1].keys()
    assert RecordedRun(run).steps == before[0]["recorded"]
    read_all(run)


def test_only_exact_names_have_a_number(tmp_path):
    for name in ("step-000003.rec", "step-1234567.rec", "step-3.rec", "step-0000003.rec", "a", "step--00003.rec"):
        (tmp_path / name).touch()
    assert [*numbered(tmp_path, "step-{:06d}.rec")] == [3, 1234567]
    assert numbered(tmp_path / "gone", "step-{:06d}.rec") == {}


def test_a_step_under_another_number_is_not_that_step(tmp_path):
    write_recorded_run(tmp_path, steps=2)
    folder = files.folder_of(tmp_path)
    shutil.copy(files.step_path(folder, 2), files.step_path(folder, 9))
    shutil.copy(files.timeline_path(folder, 2), files.timeline_path(folder, 9))
    run = RecordedRun(tmp_path)
    assert run.groups(9) == []
    assert run.tokens(9, 0) is None
    assert [segment.step for segment in run.timeline(1, 9)] == [1, 2]
    assert run.groups(2)


def test_a_record_that_would_fill_the_memory_is_left_out(tmp_path):
    write_recorded_run(tmp_path, steps=1)
    payloads, _ = frames(files.step_path(files.folder_of(tmp_path), 1).read_bytes())
    size = len(zlib.decompress(payloads[0]))
    assert files.unpacked(payloads[0], size) is not None
    assert files.unpacked(payloads[0], size - 1) is None
    assert files.unpacked(payloads[0][:-1]) is None


@pytest.mark.parametrize("name", ["index.json", "tokenizer.json", "rows.log"])
@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"null", b"{}"])
def test_other_files_may_hold_anything(run, name, content):
    (run / "record" / name).write_bytes(content)
    read_all(run)
    ask_all(run)


@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("content", [b'{"replicas": "x", "steps": []}', b'{"argv": 3}', b'{"max_staleness": "x"}'])
def test_what_was_configured_may_be_anything(run, name, content):
    (run / name).write_bytes(content)
    ask_all(run)


def at_first(record, path, value):
    """The record with another value at this place, through lists by their first item."""
    name, *rest = path
    if isinstance(record, list):
        name = int(name) if isinstance(name, int) else 0
        rest = rest if isinstance(path[0], int) else path
    inner = at_first(record[name], rest, value) if rest else value
    if isinstance(record, list):
        return [*record[:name], inner, *record[name + 1 :]]
    return record | {name: inner}


TOKEN_IDS, LOGPROBS = (PartTokens.__struct_fields__.index(name) for name in ("token_ids_T", "logprobs_T"))
ODD_RECORDS = {
    "a track that there is not": ("timeline", 0, ["spans", 0, 0], "odd"),
    "a time that is none": ("timeline", 0, ["spans", 0, 4], float("nan")),
    "an end of all time": ("timeline", 0, ["end"], float("inf")),
    "a key that is a list": ("timeline", 0, ["spans", 0, 5], {"key": [1]}),
    "what is no JSON": ("timeline", 0, ["spans", 0, 5], {"a": msgspec.msgpack.Ext(5, b"b")}),
    "a column that is too short": ("timeline", 0, ["engine_steps", 0, "running"], b""),
    "another way to stop": ("steps", 1, ["group", "trajectories", 0, "stop"], "tired"),
    "another boundary": ("steps", 1, ["group", "trajectories", 0, "error"], {"boundary": "here", "message": "x"}),
    "tokens in two places": ("steps", 1, ["group", "trajectories", 0, "token_ids_T"], b"\0" * 8),
    "a turn beyond its tokens": ("steps", 1, ["group", "trajectories", 0, "turns", 0, "end"], 1 << 40),
    "a turn that ends first": ("steps", 1, ["group", "trajectories", 0, "turns", 0, "start"], 1 << 40),
    "a message without content": ("steps", 1, ["group", "prompt", "messages", 0], {"role": "user"}),
    "a prompt of another type": ("steps", 1, ["group", "prompt", "limits"], {"max_tokens": -1}),
    "a trajectory kept twice": ("steps", 1, ["group", "kept"], [0, 0]),
    "a trajectory kept that is not there": ("steps", 1, ["group", "kept"], [7]),
    "advantages of others": ("steps", 1, ["group", "advantages_K"], b"\0" * 16),
    "reasons of fewer trajectories": ("steps", 1, ["reasons"], []),
    "tokens below zero": ("steps", 3, ["trajectories", 0, 0, TOKEN_IDS], b"\xff" * 240),
    "numbers of other tokens": ("steps", 3, ["trajectories", 0, 0, LOGPROBS], b""),
    "tokens of fewer trajectories": ("steps", 3, ["trajectories"], []),
    "tokens without their numbers": ("steps", 3, ["trajectories", 0, 0, LOGPROBS], None),
}


@pytest.mark.parametrize(("folder", "frame_number", "place", "value"), ODD_RECORDS.values(), ids=ODD_RECORDS)
def test_a_record_that_is_not_sound_is_left_out(run, folder, frame_number, place, value):
    [path] = (run / "record" / folder).glob("step-000001.*")
    payloads, _ = frames(path.read_bytes())
    record = at_first(msgspec.msgpack.decode(zlib.decompress(payloads[frame_number])), place, value)
    payloads[frame_number] = zlib.compress(msgspec.msgpack.encode(record))
    path.write_bytes(b"".join(map(frame, payloads)))
    read_all(run)
    ask_all(run)
    record = RecordedRun(run)
    if folder == "timeline":
        assert [*record.timeline(1, 1)] == []
    else:
        assert record.tokens(1, 0) is None
    assert record.groups(2)  # the rest is there


def changed(value, dice):
    """The same with one place, somewhere in it, changed."""
    if isinstance(value, dict) and value and dice.random() < 0.95:
        key = dice.choice(sorted(value, key=str))
        if dice.random() < 0.05:
            return {name: inner for name, inner in value.items() if name != key}
        return value | {key: changed(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.95:
        at = dice.randrange(len(value))
        return [*value[:at], changed(value[at], dice), *value[at + 1 :]]
    odd = [
        None,
        True,
        -1,
        1 << 62,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "\ud7ff",
        b"",
        b"\0" * 7,
        [],
        {},
        [[]],
        {"a": []},
    ]
    if isinstance(value, bytes):
        odd += [value[:-1], value[: len(value) // 2 & ~7], value + value, bytes(255 - byte for byte in value)]
    if isinstance(value, int | float):
        odd += [value + 1, -value, value * 1000] if abs(value) < 1 << 50 else []
    if isinstance(value, str):
        odd += ["answer", "replicas", "error", "\x1b[2J"]
    return dice.choice(odd)


@examples(60, search=2000)
@given(st.integers(0, 2**32), st.sampled_from(["steps/step-000001.rec", "timeline/step-000001.seg", "rows.log"]))
def test_records_of_which_something_was_changed_are_read_or_left_out(viewed, tmp_path_factory, seed, name):
    """The frames are whole and their checksums right, as of somebody who means it."""
    dice = random.Random(seed)
    run = tmp_path_factory.mktemp("changed") / "run"
    shutil.copytree(viewed, run)
    path = run / "record" / name
    payloads, _ = frames(path.read_bytes())
    at = dice.randrange(len(payloads))
    record = msgspec.msgpack.decode(zlib.decompress(payloads[at]))
    for _ in range(dice.randint(1, 3)):
        record = changed(record, dice)
    payloads[at] = zlib.compress(msgspec.msgpack.encode(record))
    path.write_bytes(b"".join(map(frame, payloads)))
    read_all(run)
    ask_all(run)
    shutil.rmtree(run)


@examples(25, search=600)
@given(st.binary(max_size=200), ODD_TEXTS, st.integers(0, 2**32))
def test_bytes_that_are_no_record_are_left_out(viewed, tmp_path_factory, noise, text, seed):
    dice = random.Random(seed)
    run = tmp_path_factory.mktemp("torn") / "run"
    shutil.copytree(viewed, run)
    for path in sorted((run / "record").rglob("*.*")):
        if path.is_file() and dice.random() < 0.6:
            data = path.read_bytes()
            at = dice.randrange(len(data) + 1)
            odd = [
                noise,
                frame(noise or b"x"),
                frame(zlib.compress(noise)),
                struct.pack("<II", 1 << 31, 0),
                text.encode(errors="replace"),
            ]
            path.write_bytes(data[:at] + dice.choice(odd) + data[at + dice.randrange(9) :])
    read_all(run)
    ask_all(run)
    export(Questions([RunFiles(run)]), run / "page.html") if dice.random() < 0.1 else None
    shutil.rmtree(run)


def test_what_a_run_writes_is_sound(viewed):
    for path in (viewed / "record").rglob("step-*"):
        payloads, _ = frames(path.read_bytes())
        assert payloads
        assert all(is_sound(files.decode(zlib.decompress(payload))) for payload in payloads)
