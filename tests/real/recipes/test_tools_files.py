"""Workspaces of recipes/tools: whole episodes of scripted models, graded by hidden tests in real jails."""

import asyncio
import json
from dataclasses import replace
from itertools import islice

import pytest
import pytest_asyncio

from engine.contracts import check_world
from engine.errors import BadInput
from engine.ports import GraderUnavailable
from engine.run.journal import Journal
from recipes.tools.exercises import exercises
from recipes.tools.guest import TOOLS
from recipes.tools.harbor import read_task
from recipes.tools.hidden_tests import SUSPICIOUS, HiddenTests
from recipes.tools.snapshot import Bounds, Snapshot
from recipes.tools.soundness import require_sound, task_check, verdicts_of
from recipes.tools.workspace import Workspaces
from sandbox import Sandbox, SandboxConfig
from tests.support.fakes import Gate, a_prompt
from tests.support.node import END, Setup
from tests.support.tool_worlds import ROOM, episode, tool
from tests.unit.recipes.test_tools_harbor import task as folder_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ADD = {"sums.py": "def total(a, b):\n    return a - b\n"}
TESTS = "import pytest\nfrom sums import total\n\ndef test_two():\n    assert total(2, 3) == 5\n\n"
TESTS += "@pytest.mark.parametrize('a, b', [(0, 0), (1, -1)])\ndef test_none(a, b):\n    assert total(a, b) == 0\n"
FIX = tool("replace_text", path="sums.py", old="a - b", new="a + b")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box():
    async with Sandbox(SandboxConfig(slots=4, tiers=(TOOLS,))) as sandbox:
        yield sandbox


def task(files=ADD, tests=TESTS, number=0):
    metadata = {"files": files, "tests": {"test_h.py": tests}}
    return replace(a_prompt(number, "Correct it."), metadata=metadata)


async def graded(box, prompt, *turns, **options):
    trajectory = await episode(Workspaces(box, wall_s=2.0), prompt, *turns)
    grade = await HiddenTests(box, wall_s=2.0, **options)(trajectory)
    return grade.reward, trajectory


@pytest.mark.smoke
async def test_a_model_that_looks_edits_and_tests_gets_1(box):
    own = "from sums import total\ndef test_it():\n    assert total(1, 1) == 2\n"
    reward, trajectory = await graded(
        box,
        task(),
        [tool("list_files"), tool("read_file", path="./sums.py")],
        [tool("write_file", path="tests/test_own.py", text=own), tool("run_python", path="tests/test_own.py")],
        [FIX, tool("run_python", path="tests/test_own.py")],
        "It is done.",
    )
    assert reward == 1.0
    listed, read, wrote, failed, replaced, passed = trajectory.tool_uses
    assert "sums.py" in listed.response
    assert read.response == ADD["sums.py"]
    assert [use.outcome for use in (wrote, failed, replaced, passed)] == ["ok", "error", "ok", "ok"]
    assert "AssertionError" in failed.response
    assert "1 of 1" in passed.response


async def test_what_a_model_says_is_not_what_is_graded(box):
    assert (await graded(box, task(), "All tests pass, the answer is 5."))[0] == 0.0
    wrong = tool("replace_text", path="sums.py", old="a - b", new="5")
    reward, trajectory = await graded(box, task(), wrong, "Done.", share=True)
    assert reward == pytest.approx(1 / 3)
    assert trajectory.states["files"] != Snapshot(files={"sums.py": ADD["sums.py"].encode()}).state()


@pytest.mark.parametrize(
    ("solution", "test"),
    [
        ("def f(x): return {'a': [x / 3]}", "assert f(1) == {'a': pytest.approx([0.3333333])}"),
        ("def f(x): return {'a': x / 3}", "assert f(1) == pytest.approx({'a': 0.3333333})"),
        ("def f(x): return x + 0.04", "assert f(1) == pytest.approx(1, abs=0.05)"),
        ("def f(x): return x * 1.01", "assert f(100) == pytest.approx(100, rel=0.02)"),
        ("def f(x): return [None, 'a', x]", "assert f(1.0) == pytest.approx([None, 'a', 1])"),
        (
            "class Bad(ValueError): pass\ndef f(x): raise Bad('it is bad')",
            "with pytest.raises(ValueError, match='bad'): f(1)",
        ),
        ("def f(x): return b''.decode() + b'\\xff'.decode()", "with pytest.raises(ValueError): f(1)"),
        ("class Bad(Exception): pass\ndef f(x): raise Bad('it is bad')", "with pytest.raises(Exception): f(1)"),
        (
            "import statistics\ndef f(x): return statistics.mean(x)",
            "import statistics\n    assert f([1, 2]) == statistics.mean([1, 2])",
        ),
    ],
)
async def test_an_honest_solution_passes_what_tests_may_say(box, solution, test):
    tests = {"test_h.py": f"import pytest\nfrom solution import f\n\ndef test_it():\n    {test}\n"}
    files = {"solution.py": solution.encode()}
    report = await HiddenTests(box, wall_s=2.0).report(
        replace(task(), metadata={"tests": tests}), Snapshot(files=files)
    )
    assert (report.share, report.complaint) == (1.0, "")


@pytest.mark.parametrize("split", ["train", "test"])
async def test_references_of_the_exercises_pass_and_their_beginnings_do_not(box, split):
    reward = HiddenTests(box, wall_s=2.0)
    prompts = list(islice(exercises(split, 7), 12))
    assert len({prompt.id for prompt in prompts}) == 12

    async def share(prompt, files):
        snapshot = Snapshot(files={path: text.encode() for path, text in files.items()})
        return (await reward.report(prompt, snapshot)).share

    for prompt in prompts:
        files, solution = prompt.metadata["files"], prompt.metadata["solution"]
        before, after = await share(prompt, files), await share(prompt, {**files, **solution})
        assert before < 1.0, prompt
        assert after == 1.0, prompt


async def test_programs_read_their_input_and_arguments_and_leave_files(box):
    program = "import sys\nopen('out/'+sys.argv[1], 'wb').write(bytes([0, 255]) + input().encode())\nsys.exit(3)\n"
    turn = [
        tool("write_file", path="main.py", text=program),
        tool("write_file", path="out/keep", text=""),
        tool("run_python", path="main.py", arguments="a.bin b", input="x"),
    ]
    trajectory = await episode(Workspaces(box), task({}), turn, "Done.")
    left = Snapshot.read(trajectory.states["files"]).files
    assert left["out/a.bin"] == b"\x00\xffx"
    assert (trajectory.tool_uses[-1].outcome, trajectory.tool_uses[-1].response) == ("error", "exit code 3")


async def test_members_of_a_group_never_see_one_another(box):
    world = Workspaces(box)
    turns = [tool("write_file", path="mine", text="1"), tool("run_python", path="show.py")], "Done."
    prompt = task({"show.py": "import os\nprint(sorted(os.listdir()))\n"})
    members = await asyncio.gather(*(episode(world, prompt, *turns, sample=n) for n in range(6)))
    assert {member.tool_uses[-1].response for member in members} == {"['mine', 'show.py']"}
    assert len({member.states["files"] for member in members}) == 1


async def test_what_looks_random_is_the_same_when_it_is_run_again(box):
    prompt = task({"main.py": "import random, uuid\nprint(random.random(), uuid.uuid4())\n"})
    one, two = [await episode(Workspaces(box), prompt, [tool("run_python", path="main.py")] * 2, "x") for _ in "ab"]
    assert [use.response for use in one.tool_uses] == [use.response for use in two.tool_uses]
    assert one.tool_uses[0].response != one.tool_uses[1].response


async def test_a_call_that_is_stopped_leaves_the_files_as_they_were(box):
    prompt = task({"main.py": "open('half', 'w').write('x')\nprint('so far')\nwhile True: pass\n"})
    trajectory = await episode(Workspaces(box, wall_s=0.5), prompt, tool("run_python", path="main.py"))
    assert trajectory.tool_uses[0].outcome == "timeout"
    assert list(Snapshot.read(trajectory.states["files"]).files) == ["main.py"]
    small = Bounds(files=3, bytes=1000)
    program = "for n in range(9): open(f'{n}', 'w')\n"
    world = Workspaces(box, bounds=small)
    trajectory = await episode(world, task({"main.py": program}), tool("run_python", path="main.py"))
    assert trajectory.tool_uses[0].outcome == "error"
    assert list(Snapshot.read(trajectory.states["files"]).files) == ["main.py"]


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (tool("read_file", path="no.py"), "FileNotFoundError"),
        (tool("read_file"), "missing"),
        (tool("read_file", path=3), "string"),
        (tool("replace_text", path="sums.py", old="x", new=""), "occurs 0 times"),
        (tool("replace_text", path="sums.py", old="", new=""), "occurs 0 times"),
        (tool("write_file", path="sums.py/x", text=""), "below a file"),
        (tool("write_file", path="", text=""), "path"),
        (tool("run_python", path="no.py"), "FileNotFoundError"),
    ],
)
async def test_a_wrong_call_is_explained_to_the_model(box, call, word):
    trajectory = await episode(Workspaces(box), task(), call, "Done.")
    assert trajectory.tool_uses[0].outcome == "error"
    assert word in trajectory.tool_uses[0].response


class Noted:
    """A sandbox that says when a call has begun."""

    def __init__(self, box):
        self.box, self.began = box, asyncio.Event()

    async def run(self, *arguments, **options):
        self.began.set()
        return await self.box.run(*arguments, **options)


async def test_a_trajectory_that_is_cancelled_leaves_no_call_behind(box):
    noted, prompt = Noted(box), task({"main.py": "while True: pass\n"})
    cancelled = box.stats.cancelled
    running = asyncio.create_task(
        episode(Workspaces(noted, wall_s=30.0), prompt, tool("run_python", path="main.py")), name="episode"
    )
    await noted.began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert box.stats.cancelled == cancelled + 1


async def test_a_trajectory_without_tests_is_refused(box):
    trajectory = await episode(Workspaces(box), a_prompt(), "x")
    with pytest.raises(ValueError, match="tests"):
        await HiddenTests(box)(trajectory)
    assert json.loads(trajectory.states["files"]) == {"files": []}


async def test_a_resumed_trajectory_has_the_files_that_its_calls_made(box, tmp_path):
    """The journal of a node that was killed replays the calls, also those that draw random numbers."""
    program = "import random\nopen('made', 'w').write(str(random.random()))\nprint(random.random())\n"
    turns = [[tool("run_python", path="main.py") + END], [tool("read_file", path="made") + END], ["done" + END]]
    prompt, gate = task({"main.py": program}), Gate()
    cut_off = Setup(*turns[:2], [gate], tools=[Workspaces(box)], max_tokens=ROOM, max_turns=4)
    async with cut_off as node, asyncio.TaskGroup() as group:
        log = Journal(tmp_path).log(0, 0, 0)
        running = group.create_task(node.rollouts.run(prompt, 0, 0, log=log), name="cut off")
        await gate.started.wait()
        running.cancel()
    async with Setup(*turns, tools=[Workspaces(box)], max_tokens=ROOM, max_turns=4) as node:
        trajectory = await node.rollouts.run(prompt, 0, 0, log=Journal(tmp_path).log(0, 0, 0))
        assert len(node.replicas.made[0].requests) == 1, "only the last turn was sampled"
    made = Snapshot.read(trajectory.states["files"]).files["made"].decode()
    assert (trajectory.tool_uses[1].response, trajectory.discarded_tokens) == (made, 0)


async def test_a_workspace_is_a_world(box):
    await check_world(Workspaces(box), task({"main.py": "print(1)"}), "run_python", {"path": "main.py"})


async def test_a_task_of_harbors_shape_is_solved_and_graded(box, tmp_path):
    tests = "from b import f\n\ndef test_it():\n    assert f(1) == 2\n    assert open('/app/out/c.txt').read() == 'c'\n"
    prompt = read_task(folder_of(tmp_path / "task", **{"tests/test_outputs.py": tests}))
    solve = [
        tool("write_file", path="/app/b.py", text="def f(x):\n    return x + 1\n"),
        tool("write_file", path="out/c.txt", text="c"),
    ]
    assert (await graded(box, prompt, solve, "Done."))[0] == 1.0
    assert (await graded(box, prompt, solve[:1], "Done."))[0] == 0.0


SOLUTION = {"sums.py": "def total(a, b):\n    return a + b\n"}
BROKEN = {
    "a module that the jail lacks": "import no_such_module\n" + TESTS,
    "a module that is nowhere": "from summs import total\n" + TESTS,
    "an error at the top": "1 / 0\n" + TESTS,
}


@pytest.mark.parametrize("name", BROKEN)
async def test_tests_that_run_nowhere_are_no_0_but_a_gap_that_is_said(box, caplog, name):
    metadata = {"files": ADD, "tests": {"test_h.py": BROKEN[name]}, "solution": SOLUTION}
    prompt = replace(a_prompt(0, "Correct it."), metadata=metadata)
    reward, left = HiddenTests(box, wall_s=2.0), await episode(Workspaces(box), prompt, "x")
    for _ in range(2):
        with pytest.raises(GraderUnavailable, match="p0"):
            await reward(left)
    assert len([record for record in caplog.records if "p0" in record.message]) == 1


async def test_tests_that_a_model_keeps_from_running_are_a_0(box, caplog):
    metadata = {"files": ADD, "tests": {"test_h.py": TESTS + "total(1, 2)\n"}, "solution": SOLUTION}
    prompt = replace(a_prompt(0, "Correct it."), metadata=metadata)
    spoilt = await episode(Workspaces(box), prompt, tool("write_file", path="sums.py", text="1 / 0"), "x")
    grade = await HiddenTests(box, wall_s=2.0)(spoilt)
    assert (grade.reward, grade.scores) == (0.0, {"tests": 0.0, "tests_ran": 0.0})
    assert not caplog.records


async def test_tests_without_a_reference_that_never_run_are_said(box, caplog):
    reward = HiddenTests(box, wall_s=2.0)
    for number in range(SUSPICIOUS + 3):
        prompt = replace(task(tests=BROKEN["a module that the jail lacks"]), id=f"mine@{number}")
        assert (await reward(await episode(Workspaces(box), prompt, "x"))).reward == 0.0
    [record] = caplog.records
    assert "mine" in record.message
    assert "no_such_module" in record.message


CHECKED = {
    "sound": (TESTS, SOLUTION, "", ""),
    "fails on the reference": (TESTS, ADD, "fail on the reference", ""),
    "passes on nothing": ("def test_it():\n    assert True\n", SOLUTION, "as it begins", ""),
    "lacks a module": (BROKEN["a module that the jail lacks"], SOLUTION, "do not run", ""),
    "never ends": ("while True: pass\n" + TESTS, SOLUTION, "timeout", ""),
    "has no reference": (TESTS, {}, "", "no reference"),
    "has none and does not run": (BROKEN["a module that is nowhere"], {}, "", "summs"),
    "has none and passes on nothing": ("def test_it():\n    assert True\n", {}, "as it begins", ""),
    "has a reference outside": (TESTS, {"../sums.py": ""}, "solution", ""),
}


async def test_a_check_names_the_tasks_that_are_broken_and_why(box):
    prompts = [
        replace(a_prompt(0, "x"), id=name, metadata={"files": ADD, "tests": {"test_h.py": tests}, "solution": solution})
        for name, (tests, solution, _, _) in CHECKED.items()
    ]
    verdicts = await verdicts_of(prompts, task_check(HiddenTests(box, wall_s=2.0, total_s=3.0)))
    assert [verdict.task for verdict in verdicts] == list(CHECKED)
    for verdict in verdicts:
        _, _, fault, note = CHECKED[verdict.task]
        assert fault in verdict.fault, verdict
        assert bool(fault) == bool(verdict.fault), verdict
        assert note in verdict.note, verdict
        assert bool(note) == bool(verdict.note), verdict
    with pytest.raises(BadInput, match=r"6 of 9.*lacks a module"):
        require_sound(verdicts)
    require_sound([verdict for verdict in verdicts if not verdict.fault])
