"""The main job as a user runs it: real vLLM replicas, real jails, a real FSDP learner, in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.replay import one_of_several_turns, replayed
from tests.support.runs import QUICKSTART, SMALL, Run, command, metrics


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("rocstar-*")}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    runs = tmp_path_factory.mktemp("runs")
    arguments = command(runs, "steps=10", "eval_every=10", "eval_problems=128")
    environment = {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("tmp"))}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    left = {path.name for path in Path(environment["TMPDIR"]).iterdir() if not path.name.startswith("torchinductor_")}
    assert not left, "of the engines and the launcher; torch's cache is one folder for all runs"
    return runs / "quickstart", done.stdout


@pytest.mark.smoke
@pytest.mark.timeout(500)
def test_it_learns_in_ten_steps(learnt: tuple[Path, str]) -> None:
    rewards = [row["reward"] for row in metrics(learnt[0]) if "reward" in row]
    assert len(rewards) == 10
    assert sum(rewards[-2:]) / 2 - sum(rewards[:2]) / 2 >= 0.20, rewards


def test_the_summary_says_what_happened(learnt: tuple[Path, str]) -> None:
    folder, output = learnt
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["tool_calls"] == summary["tool_calls_jailed"] > 1000
    assert summary["staleness_max"] == 0
    assert 0 < summary["canary_max_abs"] < 1e-4
    assert summary["accuracy_final"] > summary["accuracy_initial"]
    assert summary["accuracy_n"] == 128
    assert summary["steps"] == 10
    parts = summary["first_step_parts_s"]
    assert list(parts) == ["imports", "sandbox", "engines", "learner", "first evaluation", "first step"]
    assert sum(parts.values()) == pytest.approx(summary["first_step_s"])
    assert 0.2 < summary["goodput"] == summary["tokens_trained"] / summary["tokens_generated"] < 1
    for seconds in summary["idle_attribution_s"].values():
        assert seconds["busy"] > 0
        assert seconds.keys() <= {
            *("busy", "weight_sync", "kv_blocked", "tool_wait", "long_tail"),
            *("staleness_gate", "reward", "stage", "host"),
        }
    assert summary["versions"]["torch"]
    assert "Before and after" in output
    # The last file: a run that has it is not resumed.
    last = (folder / "summary.json").stat().st_mtime_ns
    assert last >= max((folder / name).stat().st_mtime_ns for name in ("timeline.json", "reward.png"))
    for name in ("config.json", "reward.png", "timeline.json", "tensorboard", "checkpoint"):
        assert (folder / name).exists(), name


def test_the_shipped_agent_leaves_room_for_learning(learnt: tuple[Path, str]) -> None:
    """Bounds are four standard errors around the recorded figures (accuracy 0.31, tool rate 0.47) for 128 problems."""
    first = metrics(learnt[0])[0]
    assert 0.15 < first["eval/accuracy"] < 0.47
    assert 0.30 < first["eval/tool_rate"] < 0.64


def test_tool_calls_start_before_their_turn_ends(learnt: tuple[Path, str]) -> None:
    events = json.loads((learnt[0] / "timeline.json").read_text())["traceEvents"]
    tracks = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    calls = [event for event in events if event["ph"] == "X" and tracks[event["pid"]] == "tool calls"]
    early = [event for event in calls if event["args"]["turn_end_ms"] > 0]
    assert len(early) > 0.9 * len(calls) > 0
    present = {tracks[event["pid"]] for event in events if event["ph"] in "XCi"}
    assert present >= {"replicas", "trajectories", "tool calls", "learner", "weights", "evaluation", "fleet"}


IN_VLLM = """
import asyncio, json, sys
from engine.replica.replica import Replica
from engine.replica.config import prepare_environment
from engine.replica.config import ReplicaConfig

async def main(checkpoint, ids):
    replica = Replica(ReplicaConfig(checkpoint=checkpoint, max_model_len=256, kv_blocks=16), 0, None, lambda *_: None)
    await replica.start()
    try:
        print(json.dumps((await replica.logprobs([ids])).tolist()))
    finally:
        await replica.shutdown()

prepare_environment()
asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


@pytest.mark.timeout(200)
def test_the_checkpoint_loads_in_transformers_and_in_vllm(learnt: tuple[Path, str]) -> None:
    """Trained weights: both say the same of them, and of those before the training something else. vLLM may write
    nowhere at home, as in a container of a user without one, and does not complain of it.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint = learnt[0] / "checkpoint"
    assert "10 steps" in (checkpoint / "README.md").read_text()
    assert not (checkpoint / "cold_start.json").exists(), "that is how the seed was made"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    said = "<reason>I use python.</reason>\n<tool_call>"
    messages = [{"role": "user", "content": "What is 6 * 7?"}, {"role": "assistant", "content": said}]
    ids = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)

    def in_transformers(path: Path) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        assert sum(parameter.numel() for parameter in model.parameters()) == 508_992
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]

    command = [sys.executable, "-c", IN_VLLM, str(checkpoint), json.dumps(ids)]
    homeless = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"} | {"HOME": "/proc/none"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, env=homeless)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    trained = in_transformers(checkpoint)
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout.splitlines()[-1])), trained, rtol=0, atol=1e-4)
    assert (trained - in_transformers(ROOT / "recipes" / "tiny" / "agent")).abs().max() > 1e-2


@pytest.mark.timeout(300)
def test_a_replay_is_what_was_recorded_and_with_another_seed_it_is_not(learnt: tuple[Path, str]) -> None:
    where = one_of_several_turns(learnt[0])
    again = replayed(learnt[0], *where, "turn=1", "start=true")
    assert again["first_difference"] is None
    assert again["again"] == again["recorded"]
    other = replayed(learnt[0], *where, "turn=0", "start=true", "seed=12345")
    assert other["again"]["error"] is None
    assert other["again"]["turns"] != other["recorded"]["turns"]


@pytest.mark.timeout(300)
def test_the_same_seed_gives_the_same_curve_to_the_last_digit(learnt: tuple[Path, str], tmp_path: Path) -> None:
    """Also where an engine of its own evaluates meanwhile, and that one says what the others say between the steps."""
    arguments = command(tmp_path, "steps=3", "eval_every=10", "eval_problems=128", "eval_replicas=1")
    subprocess.run(arguments, check=True, capture_output=True, timeout=200)
    names = ("reward", "learner/loss", "learner/grad_norm", "tools/error_share_correct", "tokens/generated")
    rows, first = metrics(tmp_path / "quickstart"), metrics(learnt[0])
    again = [row for row in rows if "reward" in row]
    assert [row["step"] for row in again] == [1, 2, 3]
    for mine, theirs in zip(again, first[1:], strict=False):
        assert [mine[name] for name in names] == [theirs[name] for name in names]
    beside = [row for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in beside] == [0, 3]
    evaluated = [{name: row[name] for name in row if name.startswith("eval/")} for row in (beside[0], first[0])]
    assert evaluated[0] == evaluated[1]


@pytest.mark.timeout(300)
def test_staleness_is_bounded_where_steps_overlap_and_groups_oversample_stop_and_refill(tmp_path: Path) -> None:
    fields = ["steps=5", "max_staleness=1", "extra_samples=2", "stop_flat_after=3", "refills=2"]
    subprocess.run(command(tmp_path, *SMALL, *fields), check=True, capture_output=True, timeout=200)
    rows = metrics(tmp_path / "quickstart")[1:]
    for row in rows:
        assert row["tokens/generated"] == row["tokens/trained"] + sum(
            tokens for name, tokens in row.items() if name.startswith("waste/")
        )
        assert row["rollout/trajectories_trained"] == 2 * (4 - row["groups/flat"] - row["groups/error"])
    staleness = [row.get("rollout/staleness_max", 0) for row in rows]  # a step may train nothing
    assert staleness[0] == 0
    assert max(staleness) <= 1
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert summary["canary_max_abs"] < 1e-4
    assert summary["wasted_tokens"]["surplus_tokens"] > 0
    assert sum(row["groups/refilled"] for row in rows) > 0


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_ctrl_c_ends_it_with_nothing_left(started: list[Run], tmp_path: Path) -> None:
    before = shared_memory()
    run = Run(command(tmp_path, *SMALL, "steps=1000"))
    started.append(run)
    run.until("step   2")
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground process group
    assert run.end() == 130, run.text()
    last = run.text().splitlines()[-1]
    assert "interrupted" in last
    assert str(tmp_path / "quickstart") in last
    again = shlex.split(last)[-len(SMALL) - 3 :]
    assert sorted(again) == sorted([QUICKSTART[-1], f"runs={tmp_path}", "steps=1000", *SMALL])
    assert "Traceback" not in run.text()
    assert run.left() == []
    assert shared_memory() == before
    assert len(metrics(tmp_path / "quickstart")) >= 2
    assert (tmp_path / "quickstart" / "timeline.json").exists()
    assert (tmp_path / "quickstart" / "reward.png").exists()


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_ctrl_c_while_engines_start_waits_for_none(started: list[Run], tmp_path: Path) -> None:
    """An engine that stands still is one that never answers: vLLM's thread would wait for it."""
    before = shared_memory()
    run = Run(command(tmp_path, *SMALL))
    started.append(run)
    node = psutil.Process(run.process.pid)
    while not (engines := [child for child in node.children() if "EngineCor" in child.name()]):
        assert run.process.poll() is None, run.end()
        time.sleep(0.02)
    for engine in engines:
        engine.suspend()
    os.kill(run.process.pid, signal.SIGUSR1)
    run.until(" x ")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.end() == 130, run.text()
    assert run.left() == []
    assert shared_memory() == before


@pytest.mark.alone
@pytest.mark.timeout(300)
def test_while_it_starts_it_says_what_it_waits_for_and_can_be_interrupted(started: list[Run], tmp_path: Path) -> None:
    before = shared_memory()
    run = Run(command(tmp_path, *SMALL))
    started.append(run)
    while not (tmp_path / "quickstart" / "config.json").exists():
        assert run.process.poll() is None, run.end()
        time.sleep(0.05)
    os.kill(run.process.pid, signal.SIGUSR1)
    run.until(" x ")  # so many tasks wait there
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.end() == 130, run.text()
    assert "Traceback" not in run.text()
    assert run.left() == []
    assert shared_memory() == before


@pytest.fixture(scope="module")
def unread(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two steps of which nobody reads what they print, in a locale of ASCII: the folder, and standard error."""
    runs = tmp_path_factory.mktemp("unread")
    words = shlex.join(command(runs, *SMALL, "steps=2", "checkpoint_every=3"))
    script = f"{words} | head -1; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"PYTHONUTF8": "0", "LC_ALL": "C"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return runs / "quickstart", done.stderr


@pytest.mark.timeout(300)
def test_it_goes_on_when_nobody_reads_what_it_prints(unread: tuple[Path, str]) -> None:
    folder, errors = unread
    assert "Traceback" not in errors
    assert "standard output" in errors
    assert "standard output" in (folder / "notes.log").read_text()
    assert json.loads((folder / "summary.json").read_text())["steps"] == 2


@pytest.mark.timeout(400)
def test_a_finished_run_takes_more_steps_and_another_option_names_the_run_that_did_not_end(
    unread: tuple[Path, str], started: list[Run], tmp_path: Path
) -> None:
    folder = tmp_path / "quickstart"
    shutil.copytree(unread[0], folder)
    two = [(row["step"], row.get("reward")) for row in metrics(folder)]
    more = Run(command(tmp_path, *SMALL, "steps=4", "checkpoint_every=3"))
    started.append(more)
    more.until("step   3")
    more.process.send_signal(signal.SIGINT)
    assert more.end() == 130, more.text()
    assert f"resuming {folder} at step 2" in more.text()
    rows = metrics(folder)
    assert [(row["step"], row.get("reward")) for row in rows[:3]] == two
    assert "tokens/per_s" in rows[3], "nothing of it was there before"
    assert json.loads((folder / "summary-2.json").read_text())["steps"] == 2
    other = Run(command(tmp_path, *SMALL, "steps=4", "checkpoint_every=3", "lr=0.001"))
    started.append(other)
    other.until("learner.lr")
    told = other.output[-1]
    for part in (str(folder), "0.0005", "0.001", str(tmp_path / "quickstart-2")):
        assert part in told
    old = told.rpartition(QUICKSTART[-1])[2]
    assert "lr=" not in old
    other.process.send_signal(signal.SIGINT)
    assert other.end() == 130, other.text()
    last = Run([*QUICKSTART, *shlex.split(old)])
    started.append(last)
    assert last.end() == 0, last.text()
    assert [row["step"] for row in metrics(folder)] == [0, 1, 2, 3, 4]


BROKEN = """
import sys
from engine.programs.main import main
from recipes import quickstart

class Broken(quickstart.MathReward):
    async def __call__(self, trajectory):
        raise ValueError("operands could not be broadcast together")

quickstart.MathReward = Broken
sys.exit(main(quickstart.recipe))
"""


@pytest.mark.timeout(300)
def test_a_bug_in_a_reward_of_yours_shows_its_line(tmp_path: Path) -> None:
    words = [sys.executable, "-c", BROKEN, *SMALL, f"runs={tmp_path}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 1
    assert "ValueError: operands could not be broadcast together" in done.stderr.splitlines()[0], done.stderr
    assert "Broken (<string>:" in done.stderr, "the part"
    assert 'File "<string>", line 8, in __call__' in done.stderr, done.stderr


LONG = """
import sys
from dataclasses import replace
from engine.programs.main import main
from recipes import quickstart

def prompts(split, seed, short=quickstart.prompts):
    for number, prompt in enumerate(short(split, seed)):
        [message] = prompt.messages
        yield replace(prompt, messages=({**message, "content": message["content"] * (1 if number % 2 else 9)},))

quickstart.prompts = prompts
sys.exit(main(quickstart.recipe))
"""


@pytest.mark.timeout(300)
def test_held_out_prompts_longer_than_a_replica_takes_kill_none(tmp_path: Path) -> None:
    words = [sys.executable, "-c", LONG, *SMALL, "steps=1", "max_tokens=60", f"runs={tmp_path}"]
    done = subprocess.run(words, capture_output=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "canary failed" not in (tmp_path / "quickstart" / "timeline.json").read_text()


def test_a_budget_that_no_held_out_prompt_fits_is_refused_with_the_numbers(tmp_path: Path) -> None:
    code, message = refused(f"runs={tmp_path}", "max_tokens=10", "eval_problems=100")
    assert code == 1
    for part in ("max_tokens=10", "100", "24"):  # so many tokens has the shortest of them
        assert part in message
    assert not any(tmp_path.iterdir()) or not (tmp_path / "quickstart" / "metrics.jsonl").read_text()


@pytest.mark.timeout(300)
def test_it_survives_the_death_of_a_replica(started: list[Run], tmp_path: Path) -> None:
    run = Run(command(tmp_path, *SMALL, "steps=6"))
    started.append(run)
    run.until("step   1")
    run.named("EngineCore")[0].kill()
    assert run.end() == 0, run.text()
    summary = json.loads((tmp_path / "quickstart" / "summary.json").read_text())
    assert summary["replica_deaths"] == 1
    assert summary["steps"] == 6
    assert sum(row.get("rollout/trajectories_failed", 0) for row in metrics(tmp_path / "quickstart")) == 0


def refused(*arguments: str | Path, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and the last line of a run that must not start."""
    words = [*prefix, *QUICKSTART, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, re.sub(r"\s+", " ", done.stderr)


def test_an_unknown_field_names_the_nearest() -> None:
    code, message = refused("step=3")
    assert code == 2
    assert "'step'" in message
    assert "'steps'" in message


OPTIONS = """
import sys
from engine.console.options import parse_all
from engine.programs.invocation import Invocation
from recipes.quickstart import Config
for word in sys.argv[1:]:
    try:
        parse_all([Invocation, Config], [word])
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""


def test_impossible_sizes_name_the_field() -> None:
    wrong = "prompts_per_step=0 group_size=1 minibatches=500 max_staleness=-1 max_tokens=0 kv_blocks=3 refills=-1 "
    wrong += "stop_flat_after=17 lr=0 slots=100000 tool_wall_s=-1 eval_replicas=-1 learner_ranks=-1 "
    wrong += "max_staleness=41 eval_problems=100000000 eval_samples=1000 "
    wrong += "devices=0,1 name=../x name=/x name=.. seed=-1 seed=9223372036854775808"
    command = [sys.executable, "-c", OPTIONS, *wrong.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    said = done.stderr.splitlines()
    assert said[1::2] == ["2"] * len(wrong.split()), done.stderr
    for field, message in zip(wrong.split(), said[::2], strict=True):
        assert field.partition("=")[0].removeprefix("tool_") in message, message


def test_only_a_node_has_no_learner(tmp_path: Path) -> None:
    code, message = refused(f"runs={tmp_path}", "learner_ranks=0")
    assert code == 2
    assert "learner_ranks must be at least 1, got 0: only a rollout node" in message


def test_a_missing_checkpoint_is_named_and_not_downloaded(tmp_path: Path) -> None:
    code, message = refused(f"runs={tmp_path}", "model=owner/name")
    assert code == 2
    assert "owner/name" in message
    assert "downloaded" in message


def test_a_template_that_rewrites_history_is_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes" / "tiny" / "agent", tmp_path / "tiny")
    path = tmp_path / "tiny" / "tokenizer_config.json"
    config = json.loads(path.read_text())
    stripped = '(message.content if loop.last else message.content.replace("<reason>", ""))'
    config["chat_template"] = config["chat_template"].replace(
        '"\\n" + message.content -}}', f'"\\n" + {stripped} -}}}}'
    )
    assert stripped in config["chat_template"]
    path.write_text(json.dumps(config))
    code, message = refused(f"runs={tmp_path}", f"model={tmp_path / 'tiny'}")
    assert code == 1
    assert "append-only" in message


def test_without_user_namespaces_it_says_so(tmp_path: Path) -> None:
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    prefix = ("unshare", "-Ur", "sh", "-c", forbid, "sh")
    code, message = refused(f"runs={tmp_path}", "steps=1", prefix=prefix)
    assert code == 1
    # for root, what is missing comes first: without other ids code would run as root of the machine
    assert ("run as another user" if os.geteuid() == 0 else "namespace") in message


@pytest.mark.timeout(200)
def test_a_full_disk_is_a_clear_end() -> None:
    """runs/ lies on a file system of 40 KiB: room for the configuration, not for the run."""
    mount = 'mount -t tmpfs -o size=40k tmpfs /mnt && exec "$@"'
    prefix = ("unshare", "-m" if os.geteuid() == 0 else "-Urm", "sh", "-c", mount, "sh")
    started = time.monotonic()
    code, message = refused("runs=/mnt", *SMALL, "steps=60", prefix=prefix)
    assert code == 1, message
    assert "/mnt/quickstart" in message
    assert "No space left" in message
    assert "timeline.json" not in message, "that one cannot be written either, but another was the first"
    assert time.monotonic() - started < 120
