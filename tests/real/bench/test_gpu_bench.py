"""The bench of one GPU: a part that fails costs its row, and the cheap parts run here."""

import json
import subprocess
import sys

import pytest

from bench.benches.gpu import gpu, measures
from bench.benches.gpu.parts import Part, parts
from bench.catalogue import CATALOGUE
from bench.measuring.run import Shell
from engine.console.options import parse, parse_all
from recipes import train_on_file
from recipes.quickstart import Config
from tests.support.paths import ROOT, TINY

pytestmark = pytest.mark.campaign  # `make bench` runs them too


def part(code, **options):
    arguments = ("-c", code, "FILE")
    given = {
        "name": "p",
        "full": arguments,
        "rehearsal": arguments,
        "limit_s": 30.0,
        "read": lambda file: {"jail": json.loads(file.read_text())["jail"]},
    }
    return Part(**{**given, **options})


WRITES = "import json, sys; json.dump({'jail': 1.0}, open(sys.argv[1], 'w'))"


@pytest.mark.parametrize(
    ("code", "limit_s", "named"),
    [
        ("print('this is why'); raise SystemExit(3)", 30.0, "exit code 3, this is why"),
        ("import time; time.sleep(60)", 0.5, "not done"),
        ("pass", 30.0, "FileNotFoundError"),
        (WRITES.replace("jail", "other"), 30.0, "KeyError"),
    ],
)
def test_a_part_that_fails_says_why_and_leaves_no_result(tmp_path, code, limit_s, named):
    assert named in gpu.run(part(code), tmp_path / "p.json", limit_s=limit_s, rehearse=True)
    assert not (tmp_path / "p.json").exists()


def test_a_part_that_has_a_result_is_passed_over_and_none_begins_that_cannot_end(tmp_path):
    options = gpu.Options(into=tmp_path, minutes=1.0)
    rounds = []
    assert gpu.run_parts(options, [part(WRITES), part(WRITES, name="q", limit_s=61.0)], rounds.append) == []
    assert rounds == [{"p": {"jail": 1.0}}]
    assert gpu.run_parts(options, [part("raise SystemExit(1)")], rounds.append) == []
    again = gpu.Options(into=tmp_path, minutes=1.0, again=True)
    [failure] = gpu.run_parts(again, [part("raise SystemExit(1)")], rounds.append)
    assert failure.startswith("p: ")


def test_what_is_rehearsed_in_the_same_words_is_rehearsed_once(tmp_path):
    options, rounds = gpu.Options(into=tmp_path, rehearse=True), []
    gpu.run_parts(options, [part(WRITES), part(WRITES, name="q")], rounds.append)
    assert rounds == [{"p": {"jail": 1.0}}]


def test_what_says_whether_a_gpu_works_is_done_by_the_first_call_even_if_each_part_takes_its_limit():
    first, spent_s = [], 0.0
    for one in parts():
        spent_s += one.limit_s
        if spent_s <= 60 * gpu.Options().minutes:
            first.append(one.name)
    wanted = {"imports", "quickstart", "rl_1.7b_lora", "sleep", "learner_qwen3-1.7b_16k_full"}
    assert wanted <= set(first)


def test_parts_are_told_by_their_beginnings():
    wanted = gpu.Options(parts=("sleep", "weights")).wanted
    assert [one.name for one in wanted] == ["sleep", "weights_shm", "weights_adapter", "weights_nccl"]
    assert len({one.name for one in parts()}) == len(parts())
    with pytest.raises(ValueError, match=r"parts must be beginnings of .*, got 'nope'"):
        gpu.Options(parts=("sleep", "nope"))


@pytest.mark.timeout(300)
def test_the_cheap_parts_are_rehearsed_to_the_last_line(tmp_path):
    named = "parts=doctor,attention,experts,learner_qwen3-1.7b_4k_lora,learner_30b-a3b-4l_16k_full"
    arguments = ["-m", "bench", "gpu", "rehearse=true", named]
    command = [sys.executable, *arguments, f"into={tmp_path / 'results'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = json.loads(done.stdout.splitlines()[-1])["figures"]
    assert rows["doctor"] == {"jail": 1.0}
    assert rows["attention"]["difference"] < 1e-3
    assert rows["experts"]["difference"] < 1e-3
    assert rows["learner_qwen3-1.7b_4k_lora"]["training_tgs"] > 0
    assert rows["learner_30b-a3b-4l_16k_full"]["training_tgs"] > 0


@pytest.mark.timeout(300)
def test_the_learner_of_mixtures_is_compared_with_transformers(tmp_path):
    command = [sys.executable, "-m", "bench.benches.gpu.measures", "families", f"into={tmp_path / 'families.json'}"]
    subprocess.run(command, cwd=ROOT, timeout=280, check=True)
    measured = json.loads((tmp_path / "families.json").read_text())
    assert measured["failed"] == {}
    assert set(measured["families"]) == {"Qwen3Moe", "GptOss"}
    assert measured["logprobs"] < 1e-5
    assert measured["gradients"] < 1e-4


def test_what_a_part_asks_of_a_gpu_is_understood_where_there_is_none(tmp_path):
    """So that the first minute on a GPU is not spent on a wrong word."""
    understood = 0
    for one in parts():
        arguments = list(one.full)
        if arguments[1] == "bench":
            bench = CATALOGUE[arguments[2]].load().BENCH
            given = [word.replace("=cuda", "=cpu") for word in arguments[3:]]  # it looks whether there is one
            parse_all([bench.options, Shell], given)
            understood += 1
            continue
        options = parse(measures.Options, arguments[2:])
        if options.name in ("quickstart", "resume"):
            assert parse(Config, options.fields).training().devices.shared
        elif options.name in ("rollouts", "mismatch"):
            parse_all([CATALOGUE[options.name.rstrip("s")].load().BENCH.options, Shell], options.fields)
        elif options.name == "rl":
            data = tmp_path / "data.jsonl"
            data.write_text('{"question": "Count.", "answer": "1"}\n')
            model = TINY if options.shape == "qwen3-1.7b" else TINY.with_name("agent_moe")
            files = (f"data={data}", f"held_out={data}", f"reward={measures.EVEN}:even", "tools=", f"model={model}")
            config = parse(train_on_file.Config, [*options.fields, *files])
            assert config.training().devices.shared
            assert config.learner.lora_rank == 32
        understood += 1
    assert understood == len(parts())


def test_a_part_for_two_gpus_is_passed_over_where_there_is_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "gpus_here", lambda: 1)
    options, two = gpu.Options(into=tmp_path), part(WRITES, gpus=2)
    assert gpu.run_parts(options, [two], [].append) == []
    assert "it needs 2 GPUs and 1 are here" in capsys.readouterr().err
    assert not (tmp_path / "p.json").exists()
