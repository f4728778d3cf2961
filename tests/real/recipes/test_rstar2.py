"""The recipe of rStar2-Agent on the tiny agent, as a user runs it: its stages, its filter and its evaluation, killed
and gone on with. The chat is the agent's own (protocol=none), since it knows no other.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from engine.errors import BadInput
from recipes.rstar2.parts.sampling.rows import RowFile
from recipes.tiny.task import Split, prompts
from tests.support.paths import ROCSTAR, ROOT, TINY
from tests.support.replay import one_of_several_turns, replayed
from tests.support.runs import Run, metrics, numbers

BUDGET = ["protocol=none", "sandbox.slots=4", "replicas=1"]
STAGES = [
    *("stage=all", "steps=2,2,1", "prompts_per_step=4", "group_size=2", "filter_samples=2", "learner.lr=5e-4"),
    *("rollout.max_tokens=230", "rollout.max_turns=4", "checkpoint_every=1", "replica.kv_blocks=512"),
    *("eval_every=2", "eval_samples=1", "eval_max_tokens=230", "eval_turns=4"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.jsonl and test.jsonl with rows as the release has them."""
    folder = tmp_path_factory.mktemp("data")
    splits: tuple[tuple[Split, int], ...] = (("train", 24), ("test", 6))
    for split, count in splits:
        rows = [
            {
                "data_source": "rstar_tiny",
                "agent_name": "rstar2_agent",
                "prompt": list(prompt.messages),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": prompt.answer},
                "extra_info": {"split": split, "index": index},
            }
            for index, prompt in enumerate(islice(prompts(split, 0), count))
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def program(name: str, *words: str, model: Path = TINY) -> list[str]:
    return [sys.executable, "-u", str(ROOT / "recipes" / "rstar2" / f"{name}.py"), *BUDGET, f"model={model}", *words]


def rl(data: Path, runs: Path, *words: str) -> list[str]:
    files = [f"data={data / 'train.jsonl'}", f"eval_sets={data / 'test.jsonl'}", f"runs={runs}"]
    return program("rl", *files, *STAGES, *words)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finished(command: list[str], within_s: float) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages without an interruption."""
    runs = tmp_path_factory.mktemp("runs")
    finished(rl(data, runs), 500)
    return runs / "rstar2"


@pytest.mark.timeout(600)
def test_the_stages_follow_each_other(undisturbed: Path, data: Path) -> None:
    rows = {number: metrics(undisturbed / f"stage-{number}") for number in (1, 2, 3)}
    assert [[row["step"] for row in rows[number]] for number in rows] == [[0, 1, 2], [0, 1, 2], [0, 1]]
    rates = [[row["learner/lr"] for row in rows[number] if "reward" in row] for number in rows]
    peak = 5e-4 / 20
    assert rates[0] == pytest.approx([peak, 2 * peak])
    assert rates[1] == pytest.approx([3 * peak, 4 * peak]), "the second stage goes on with the optimizer"
    assert rates[2] == pytest.approx([peak]), "the third begins a new one"
    assert all("eval/accuracy/test" in rows[number][0] for number in rows)
    kept = (undisturbed / "filter" / "filtered.jsonl").read_text().splitlines()
    assert set(kept) <= set((data / "train.jsonl").read_text().splitlines())
    solved = [json.loads(line) for line in (undisturbed / "filter" / "samples.jsonl").read_text().splitlines()]
    assert len(solved) == 24
    assert len(kept) == sum(row["solved"] < 2 for row in solved)


@pytest.mark.timeout(300)
def test_a_trajectory_of_a_stage_is_made_again_as_it_was(undisturbed: Path) -> None:
    """With the stage's own tool, budget and first weights, which are those of the stage before."""
    run = undisturbed / "stage-3"
    again = replayed(run, *one_of_several_turns(run), "turn=1", "start=true")
    assert again["first_difference"] is None
    assert again["again"] == again["recorded"]


@pytest.mark.timeout(900)
def test_a_chain_that_is_killed_in_its_second_stage_ends_as_if_nothing_had_happened(
    undisturbed: Path, data: Path, started: list[Run], tmp_path: Path
) -> None:
    first = Run(rl(data, tmp_path))
    started.append(first)
    first.until("stage-2")
    first.until("step   1")
    first.process.kill()
    assert first.end() == -9
    assert first.left() == []
    last = Run(rl(data, tmp_path))
    started.append(last)
    assert last.end(within_s=400) == 0, last.text()
    folder = tmp_path / "rstar2"
    assert f"stage 1 has ended: {folder / 'stage-1'}" in last.text()
    assert f"resuming {folder / 'stage-2'} at step" in last.text()
    for number in (1, 2, 3):
        assert numbers(folder / f"stage-{number}") == numbers(undisturbed / f"stage-{number}")
    assert (folder / "filter" / "filtered.jsonl").read_bytes() == (
        undisturbed / "filter" / "filtered.jsonl"
    ).read_bytes()


@pytest.mark.timeout(400)
def test_a_stage_whose_groups_are_made_on_a_node_ends_as_on_one_machine(
    undisturbed: Path, data: Path, started: list[Run], tmp_path: Path
) -> None:
    """The node has neither the data nor the model."""
    address = f"tcp://127.0.0.1:{free_port()}"
    words = [word for word in rl(data, tmp_path) if not word.startswith(("stage=", "steps="))]
    lead = Run([*words, "stage=1", "steps=2", f"nodes={address}", "nodes_only=true"])
    started.append(lead)
    node = Run([*ROCSTAR, "node", f"lead={address}", "name=one", "replicas=1"])
    started.append(node)
    assert lead.end(within_s=300) == 0, lead.text()
    assert node.end() == 0, node.text()
    assert "joined the run" in node.text()
    assert numbers(tmp_path / "rstar2" / "stage-1") == numbers(undisturbed / "stage-1")


SAMPLED = ["max_tokens=230", "turns=4", "temperature=1", "in_flight=4", "replica.kv_blocks=512"]


@pytest.mark.timeout(400)
def test_a_filter_that_is_killed_goes_on_and_keeps_what_the_chain_kept(
    undisturbed: Path, data: Path, started: list[Run], tmp_path: Path
) -> None:
    """The chain has filtered the same rows with the same weights, without an interruption."""
    words = [f"output={tmp_path}", f"data={data / 'train.jsonl'}", "n=2", *SAMPLED]
    command = program("filter", *words, model=undisturbed / "stage-2" / "checkpoint")
    first = Run(command)
    started.append(first)
    first.until("5 of 24 problems")
    first.process.kill()
    assert first.end() == -9
    assert first.left() == []
    there = (tmp_path / "samples.jsonl").read_text().count("\n")
    assert 5 <= there < 24
    assert f"{there + 1} of 24" not in first.text()
    last = Run(command)
    started.append(last)
    assert last.end() == 0, last.text()
    assert "3 of 24 problems" not in last.text(), "those that had a row are not sampled again"
    rows = [sorted((each / "samples.jsonl").read_text().splitlines()) for each in (undisturbed / "filter", tmp_path)]
    assert rows[0] == rows[1]
    kept = [(each / "filtered.jsonl").read_bytes() for each in (undisturbed / "filter", tmp_path)]
    assert kept[0] == kept[1]


@pytest.mark.timeout(400)
def test_an_evaluation_that_is_interrupted_goes_on_with_the_rows_that_it_has(
    data: Path, started: list[Run], tmp_path: Path
) -> None:
    words = [f"sets={data / 'test.jsonl'},{data / 'train.jsonl'}", "samples=2", "stateful=true", *SAMPLED]
    command = program("evaluate", f"output={tmp_path}", *words)
    first = Run(command)
    started.append(first)
    first.until("5 of 24 problems")
    first.process.send_signal(signal.SIGINT)
    assert first.end() == 130
    assert "evaluate.py" in first.text().splitlines()[-1], "the command that goes on"
    assert first.left() == []
    rows = {path: path.read_text() for path in tmp_path.glob("*.samples.jsonl")}
    assert len(rows) == 2
    last = Run(command)
    started.append(last)
    assert last.end() == 0, last.text()
    assert "6 of 6 problems" not in last.text()
    assert all(path.read_text().startswith(text) for path, text in rows.items())
    for word in ("avg@k", "6 x 2", "24 x 2", "truncated"):
        assert word in last.text()
    evaluation = json.loads((tmp_path / "evaluation.json").read_text())
    assert evaluation["sets"]["test"]["problems_failed"] == 0
    assert evaluation["config"]["data"].keys() == {"test", "train"}
    assert evaluation["versions"]["torch"]
    shown = finished(command, 60)
    assert "starting" not in shown
    assert "avg@k" in shown


OPENED = """
import sys
from pathlib import Path
from recipes.rstar2.parts.sampling.rows import RowFile
with RowFile(Path(sys.argv[1])) as file:
    list(file.rows())  # opens and closes the file once more
    print("open", flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_write_one_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-c", OPENED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(BadInput, match=str(path)):
            RowFile(path)
        other.communicate("")
    with RowFile(path):
        pass
