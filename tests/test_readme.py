"""The documents: their examples run as they are written, their links lead somewhere, their tables are complete."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import cast

import numpy as np
import pytest

from algo.contracts import check_loss
from bench.measuring.metric import Kind
from bench.measuring.result import Result
from engine.assembly.named_parts import load_reward, load_tool
from engine.assembly.parts import Parts
from engine.contracts import (
    check_group_reward,
    check_reward,
    check_selector,
    check_stateful_tool,
    check_tool,
    check_world,
)
from engine.gateway.agent import Endpoint
from engine.pipeline.pipeline import Pipeline, Stage
from engine.ports import Grade
from engine.recipe import Recipe
from engine.telemetry import metrics
from engine.telemetry.host_meter import HostMeter
from engine.telemetry.step_meter import StepMeter
from engine.telemetry.timeline import Timeline
from engine.tools.function_tool import FunctionTool
from engine.tools.mcp_tools import mcp_tools
from engine.types import Group, Trajectory
from sandbox import Sandbox
from tests.support import api_index, metric_tables
from tests.support.clients import FRAMEWORKS, PROGRAMS
from tests.support.fakes import a_prompt, a_trajectory
from tests.support.node import CHAT, Setup, served
from tests.support.paths import TINY
from tests.support.recorded_run import write_recorded_run

ROOT = Path(__file__).resolve().parents[1]
READMES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted(ROOT.glob("[a-z]*/*.md")),
]
TEXT = {path.relative_to(ROOT).as_posix(): path.read_text() for path in READMES}
BLOCKS_OF = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in TEXT.items()}
BLOCKS = [block for blocks in BLOCKS_OF.values() for block in blocks]


def example(word: str) -> str:
    [block] = [block for block in BLOCKS if block.startswith(f"# {word}:")]
    return block


def defined(word: str) -> dict:
    names: dict = {}
    exec(compile(example(word), f"README.md ({word})", "exec"), names)
    return names


def solved(answer: str, reward: float | None = None, sampled: int = 5) -> Trajectory:
    return replace(a_trajectory(sampled=sampled, reward=reward), text=f"<answer>\\boxed{{{answer}}}</answer>")


@pytest.mark.parametrize(
    "word",
    [
        "stage",
        "tool",
        "stateful tool",
        "world",
        "mcp tools",
        "reward",
        "weighted reward",
        "group reward",
        "judge",
        "loss",
        "selector",
        "advantage",
        "data",
    ],
)
def test_examples_are_short(word: str) -> None:
    assert len(example(word).splitlines()) < 28


def test_every_example_is_python() -> None:
    assert BLOCKS
    for block in BLOCKS:
        ast.parse(block)


def test_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    write_recorded_run(Path("runs/quickstart"))
    defined("record")
    said = capsys.readouterr().out
    assert "p_err" in said
    assert "train-3-1" in said


async def test_the_stage() -> None:
    passed = []

    async def groups(inbox, outbox) -> None:
        for rewards in ((1.0, 1.0), (1.0, 0.0), (1.0, None)):  # None: the grader failed
            members = tuple(solved("42", reward) for reward in rewards)
            await outbox.put(Group(prompt=members[0].prompt, trajectories=members, lease=0))

    async def note(inbox, outbox) -> None:
        async for group in inbox:
            passed.append(group.drop)

    stages = [Stage(name="groups", run=groups), defined("stage")["stage"], Stage(name="note", run=note)]
    await Pipeline(stages).run()
    assert passed == ["easy", None, "easy"]


async def test_the_tool() -> None:
    tool = defined("tool")["Lookup"]({"roc": "a giant bird"})
    assert (await tool({"word": "roc"})).text == "a giant bird"
    assert (await tool({"word": "cat"})).outcome == "error"
    await check_tool(tool, {"word": "roc"})


async def test_the_stateful_tool() -> None:
    notes = defined("stateful tool")["Notes"]()
    async with notes.open() as pad:
        await pad({"text": "one"})
        assert (await pad({"text": "two"})).text == "one\ntwo"
    async with notes.open() as pad:
        assert (await pad({"text": "three"})).text == "three"
    await check_stateful_tool(notes, {"text": "one"})


async def test_the_world() -> None:
    names = defined("world")
    prompt = replace(solved("42").prompt, metadata={"on": False})
    async with names["Lamps"]().open(prompt) as lamp:
        assert (await lamp.call("press", {})).text == "on"
        assert lamp.state() == b"on"
    await check_world(names["Lamps"](), prompt, "press", {})


async def test_the_reward() -> None:
    brief = defined("reward")["Brief"]()
    assert await brief(solved("42")) == pytest.approx(0.995)
    assert await brief(solved("41")) == 0.0
    assert await brief(replace(solved("42"), sampled_T=np.ones(5000, np.bool_))) > 0
    await check_reward(brief, [solved("42"), solved("41")])


async def test_the_rewards_of_several_parts_and_of_a_whole_group() -> None:
    weighted = defined("weighted reward")["reward"]
    assert await weighted(solved("42")) == Grade(reward=1.0, scores={"correct": 1.0, "words": 1.0})
    await check_reward(weighted, [solved("42"), solved("41")])
    half = defined("group reward")["ShorterHalf"]()
    group = [solved("42", sampled=9), solved("42", sampled=3), solved("41", sampled=1), solved("42", sampled=5)]
    assert await half(group) == [0.0, 1.0, 0.0, 1.0]
    await check_group_reward(half, [group])


def test_the_judge_and_the_mcp_tools_name_what_is_there() -> None:
    assert defined("judge")["config"].max_requests == 20_000
    assert defined("mcp tools")["mcp_tools"] is mcp_tools


def test_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "readme_loss.py").write_text(example("loss"))
    monkeypatch.syspath_prepend(tmp_path)
    check_loss(importlib.import_module("readme_loss").Hinge(margin=0.5))


def test_the_selector() -> None:
    selector = defined("selector")["ShortestSuccesses"](keep=1)
    group = [solved("42", 1.0, sampled=3), solved("41", 0.0), solved("42", 1.0, sampled=9)]
    assert selector(group, np.random.default_rng(0)) == [0, 1]
    check_selector(selector, [group, group[:1], []])


def test_the_advantage() -> None:
    made = defined("advantage")
    members = tuple(solved("42", reward) for reward in (1.0, 0.0))
    groups = [made["select"](Group(prompt=members[0].prompt, trajectories=members, lease=lease)) for lease in (0, 1)]
    batch = made["join_batch"](1, groups)
    assert batch.advantages_B.tolist() == pytest.approx([3**0.5 / 2, -(3**0.5) / 2] * 2, abs=1e-3)


def test_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(name: str, rows: list[dict]) -> None:
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    write("word_problems.jsonl", [{"question": f"{n} + 1?", "answer": n + 1} for n in range(6)])
    write("puzzles.jsonl", [{"text": "Which bird?", "solution": "roc"}])
    monkeypatch.chdir(tmp_path)
    names = defined("data")
    drawn = [next(names["prompts"]) for _ in range(8)]
    assert [prompt.source for prompt in drawn].count("puzzles") == 2
    assert not {prompt.id.partition("#")[0] for prompt in drawn} & {prompt.id for prompt in names["held_out"]}


def test_the_sandbox_alone() -> None:
    [block] = [block for block in BLOCKS_OF["sandbox/README.md"] if "asyncio.run(" in block]
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "ok 42\n\n21\n", done.stderr


def test_the_sandboxs_page_makes_a_tier_and_a_session() -> None:
    """What follows the first block of the page goes on from it: the session is one of the sandbox above it."""
    tier, session = BLOCKS_OF["sandbox/README.md"][1:]
    body = textwrap.indent(session, "        ")
    whole = f"{tier}\n\nimport asyncio\n\n\nasync def main():\n    async with box:\n{body}\n\nasyncio.run(main())\n"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "21\n", done.stderr


def test_the_losses_of_the_algorithms_page_are_losses() -> None:
    [block] = BLOCKS_OF["algo/README.md"]
    exec(compile(block, "algo/README.md", "exec"), {})


async def test_the_reward_and_the_tool_for_train_on_file(tmp_path: Path) -> None:
    [block] = [block for block in BLOCKS if block.startswith("# my.py:")]
    (tmp_path / "my.py").write_text(block)
    tool, reward = load_tool(f"{tmp_path}/my.py:lookup"), load_reward(f"{tmp_path}/my.py:score")
    assert tool.parameters["properties"]["word"]["description"] == "what to look up"
    await check_tool(tool, {"word": "Roc"})
    await check_reward(reward, [solved("42"), solved("41")])


async def test_the_evaluation_of_a_recipe_without_a_learner(tmp_path: Path) -> None:
    """The whole program runs in tests/real/recipes/test_pages.py."""
    async with Setup(["<answer>\\boxed{42}</answer><|im_end|>"]) as node:
        parts = Parts(
            rollout=node.config,
            seed=3,
            chat=CHAT,
            fleet=node.fleet,
            timeline=node.timeline,
            sandbox_if_any=cast(Sandbox, node.runner),
        )
        found, [right, wrong] = await defined("evaluate")["evaluate"](
            parts, [a_prompt(1), replace(a_prompt(2), answer="41")]
        )
    assert (found["eval/accuracy"], right.reward, wrong.reward) == (0.5, 1.0, 0.0)
    shutil.copytree(TINY, tmp_path / "checkpoint")
    config = defined("evaluate a recipe")["serving_config"](tmp_path)
    assert (config.rollout.max_tokens, config.sandbox.slots) == (230, 8)


async def test_the_cells_of_the_notebooks_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them run in a real kernel in tests/real/recipes/test_pages.py."""
    names = {"__name__": "a_cell"}
    monkeypatch.setitem(sys.modules, "a_cell", ModuleType("a_cell"))
    exec(compile(example("notebook recipe"), "a cell", "exec"), names)
    assert isinstance(names["mine"], Recipe)
    await check_tool(FunctionTool(names["python"]), {"code": "print(1)"})
    await check_reward(names["calls"], [solved("42")])
    (tmp_path / "runs/notebook").mkdir(parents=True)
    (tmp_path / "runs/notebook/metrics.jsonl").write_text('{"step": 0}\n{"step": 1, "reward": 0.5}\n')
    monkeypatch.chdir(tmp_path)
    assert defined("notebook results")["curve"] == {1: 0.5}


async def test_the_agents_of_the_recipes_page_are_agents() -> None:
    async with served(["42<|im_end|>"]) as node:
        url = f"{node.address}/sessions/a"
        endpoint = Endpoint(openai_url=f"{url}/v1", anthropic_url=url, key="session-a", model="tiny")
        said = await defined("agent")["agent"](a_prompt(text="What is 6 * 7?"), endpoint)
        assert said == "42"
    for program in ("program", "claude code"):
        assert "{prompt}" in defined(program)["agent"].argv


def test_every_page_with_examples_is_run() -> None:
    """By the tests above; README.md has a recipe's stages, which are the quick start's. A new block needs a test."""
    found = {name: len(blocks) for name, blocks in BLOCKS_OF.items() if blocks}
    pages = {"README.md": 1, "algo/README.md": 1, "sandbox/README.md": 3}
    assert found == pages | {
        "recipes/README.md": 15,  # of the gallery, which test_gallery.py compares with the recipes, and my.py
        "recipes/agents.md": 4,
        "recipes/parts.md": 13,
        "recipes/runs.md": 1,
        "recipes/evaluating.md": 2,
        "recipes/notebook.md": 3,
    }


def test_the_table_of_clients_says_what_was_run() -> None:
    """The versions are those that are pinned, and the code of a cell is in a script."""
    table = TEXT["recipes/agents.md"].partition("\n## Clients\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", table, re.MULTILINE)][1:]
    shown = [version for row in rows for version in row[1].split(", ")]
    tried = {re.sub(r"\[.*\]", "", pin).replace("==", " ") for pins in FRAMEWORKS.values() for pin in pins}
    assert sorted(shown) == sorted(tried)
    scripts = "".join(path.read_text() for path in (ROOT / "tests/slow/harnesses/clients").glob("*.py"))
    for code in re.findall(r"`([^`]*endpoint\.[^`]*)`", table):
        assert _without_space(code) in _without_space(scripts), code


def test_the_table_of_coding_programs_says_what_was_run() -> None:
    table = TEXT["recipes/agents.md"].partition("\n## Coding programs\n")[2].partition("\n## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.*) \|$", table, re.MULTILINE)][1:]
    shown = {row[0]: row[1].split(", ") for row in rows}
    tried = {name: [re.sub("==|(?<=.)@(?=[0-9])", " ", pin) for pin in pins] for name, pins in PROGRAMS.items()}
    assert shown == tried


def _without_space(code: str) -> str:
    return re.sub(r"\s", "", code)


def test_the_first_page_is_for_a_reader_with_one_minute() -> None:
    assert len(TEXT["README.md"].splitlines()) <= 200


UNITS = {"ms": 1e3, "us": 1e6, "%": 1e2, "MB": 1e-6, "GB": 1e-9}
NUMBER = re.compile(r"(\d[\d,]*(?:\.(\d+))?)(?: ?(ms|us|%|MB|GB)\b|(?<=\d) ?(%))?")


def claims() -> list[list[str]]:
    """The rows of the first page's results: claim, figure, what it stands beside, and where it was measured."""
    table = TEXT["README.md"].partition("## Results")[2].partition("\n## ")[0]
    return [
        [cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", table, re.MULTILINE)
    ][2:]


def shown(text: str) -> list[tuple[float, float, float]]:
    """Each number of a text: its value, half of its last digit, and what a metric's value is multiplied by."""
    return [
        (float(number.replace(",", "")), 0.5 * 10.0 ** -len(digits), UNITS.get(unit or percent, 1.0))
        for number, digits, unit, percent in NUMBER.findall(text)
    ]


@pytest.mark.parametrize("row", claims(), ids=lambda row: row[0])
def test_every_number_of_the_results_is_a_metric_of_a_kept_result(row: list[str]) -> None:
    _, figure, beside, measured = row
    [(file, names)] = re.findall(r"\]\((bench/results/\w+\.json)\): (.*)", measured)
    result, metrics = Result.read(ROOT / file), re.findall(r"`([^`]+)`", names)
    numbers = shown(f"{figure} {beside}")
    assert len(numbers) == len(metrics) > 0, "each number has a metric, in the same order"
    for (number, half, factor), name in zip(numbers, metrics, strict=True):
        value = result.figure(name) * (1.0 if name.startswith("config/") else factor)
        assert value == pytest.approx(number, abs=half * 1.0001), name


@pytest.mark.parametrize("row", claims(), ids=lambda row: row[0])
def test_a_result_that_the_first_page_quotes_can_be_trusted(row: list[str]) -> None:
    [file] = re.findall(r"\]\((bench/results/\w+\.json)\)", row[-1])
    result = Result.read(ROOT / file)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", result.date)
    assert re.fullmatch(r"[0-9a-f]{7,40}", result.commit), "a commit, and nothing that was not committed"
    assert result.environment.cpu
    for name in re.findall(r"`([^`]+)`", row[-1]):
        case, _, metric = name.rpartition("/")
        if case != "config":
            assert len(result.samples[case][metric]) >= 3
            assert not (result.disturbed and result.metrics[metric].kind is Kind.RATIO)


def headings(text: str) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", TEXT)
def test_links_lead_somewhere(name: str) -> None:
    lost = []
    for target in re.findall(r"\]\(([^)]+)\)", TEXT[name]):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        path = ((ROOT / name).parent / file).resolve() if file else ROOT / name
        if not path.exists() or (anchor and anchor not in headings(path.read_text())):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("name", TEXT)
def test_files_that_a_page_names_exist(name: str) -> None:
    """Paths of ours in backticks: from the root, or from the folder of the page."""
    named = re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|json|md|c|cfg|kafel|lock|png))`", TEXT[name])
    ours = [file for file in named if not file.startswith("runs/")]
    folders = (ROOT, (ROOT / name).parent)
    assert [file for file in ours if not any((folder / file).exists() for folder in folders)] == []


def test_the_index_is_that_of_the_sources() -> None:
    assert api_index.INDEX.read_text() == api_index.index(), "engine/api.md is old. Fix: make format"


def test_the_tables_of_metrics_are_those_of_the_sources() -> None:
    assert metric_tables.PAGE.read_text() == metric_tables.page(), "recipes/runs.md is old. Fix: make format"


def test_options_of_the_quick_start_that_pages_name_exist() -> None:
    command = [sys.executable, "recipes/quickstart.py", "--help"]
    known = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=True).stdout
    calls = re.findall(r'(?:recipes/quickstart\.py|make quickstart ARGS=")([^`"\n]*)', "\n".join(TEXT.values()))
    table = TEXT["recipes/README.md"].partition("## Options")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    named = set(re.findall(r"(?:^|\s)([\w.]+)=", " ".join(calls))) - {"over"}  # an option of `rocstar bench sweep`
    named |= {word for row in rows for word in re.findall(r"`([\w.]+)", row)} - {"grpo", "random"}
    assert named
    assert [option for option in sorted(named) if f"\n  {option}: " not in known] == []


def test_every_metric_of_a_step_and_of_an_evaluation_is_in_the_glossary() -> None:
    rows = re.findall(r"^\| (`.*?) \|", TEXT["recipes/runs.md"], re.MULTILINE)
    patterns = [word.replace("*", r"[\w ]+") for row in rows for word in re.findall(r"`([^`]+)`", row)]
    members = (solved("42", 1.0), solved("41", 0.0))
    members = tuple(replace(member, prompt=replace(member.prompt, source="gsm8k")) for member in members)
    group = Group(prompt=members[0].prompt, trajectories=members, lease=0, drop="flat")
    names = {*metrics.step([group], version=0), *metrics.evaluation(members)}
    names |= {*StepMeter(Timeline()).read(), *HostMeter().read()}
    assert len(names) > 30
    assert [name for name in names if "/" not in name] == ["reward"], "the others are shown by their groups"
    assert [name for name in sorted(names) if not any(re.fullmatch(pattern, name) for pattern in patterns)] == []
