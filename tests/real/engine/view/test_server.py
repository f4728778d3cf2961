"""The page over HTTP: to this machine's user alone, beside a run that goes on."""

import asyncio
import os
import re
import subprocess
import sys

import pytest
from aiohttp.test_utils import TestClient, TestServer

from engine.view.answers.trajectories import NotThere
from engine.view.programs import SELECTIONS, reverify, rivals
from engine.view.questions import Questions
from engine.view.run_files import RunFiles
from engine.view.server import make_app
from tests.support.paths import ROOT
from tests.support.viewed_runs import run_under_way, write_viewed_run


@pytest.fixture
def questions(tmp_path):
    write_viewed_run(tmp_path / "run")
    return Questions([RunFiles(tmp_path / "run")])


async def test_the_page_and_its_files_are_served(questions):
    async with TestClient(TestServer(make_app(questions, ()))) as client:
        page = await (await client.get("/")).text()
        for address in re.findall(r'"(/(?:static|plots)/[^"]+)"', page):
            assert (await client.get(address)).status == 200, address
        answer = await client.get("/api/runs")
        assert [run["last"] for run in (await answer.json())["runs"]] == [3]
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


async def test_another_sites_name_for_this_machine_is_refused(questions):
    async with TestClient(TestServer(make_app(questions, ()))) as client:
        for host, status in (("evil.example", 403), ("evil.example:8010", 403), ("localhost:8010", 200)):
            assert (await client.get("/api/runs", headers={"Host": host})).status == status


async def test_a_program_is_run_again_for_the_page_alone(questions):
    """The call that is asked for has none, so that nothing runs here."""
    asked = {"run": 0, "step": 1, "group": 1, "sample": 0, "call": 99}
    async with TestClient(TestServer(make_app(questions, ()))) as client:
        own = f"http://127.0.0.1:{client.port}"
        for origin, status in ((own, 404), ("http://evil.example", 403), ("", 403)):
            answer = await client.post("/api/run-again", json=asked, headers={"Origin": origin})
            assert answer.status == status, origin


async def test_what_is_not_there_is_a_line_and_no_failure_of_the_server(questions):
    async with TestClient(TestServer(make_app(questions, ()))) as client:
        for address, status in (("groups?run=0&step=77", 404), ("groups?run=0&step=x", 400), ("nonsense", 404)):
            answer = await client.get(f"/api/{address}")
            assert answer.status == status
            assert "problem" in await answer.json()


def test_a_run_runs_as_long_as_a_process_holds_its_folder(tmp_path):
    with run_under_way(tmp_path / "run"):  # by this process, of which the system does not tell itself
        look = "import sys; from engine.view.run_files import RunFiles; from pathlib import Path;"
        code = f"{look} print(RunFiles(Path({str(tmp_path / 'run')!r})).state)"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == "running"
    assert RunFiles(tmp_path / "run").state == "stopped"
    (tmp_path / "run" / "summary.json").write_text("{}")
    assert RunFiles(tmp_path / "run").state == "finished"


async def test_a_recorded_program_is_run_again_in_a_jail(questions):
    asked = {"run": 0, "step": 1, "group": 1, "sample": 0, "call": 0}
    async with TestClient(TestServer(make_app(questions, ()))) as client:
        own = {"Origin": f"http://127.0.0.1:{client.port}"}
        answer = await client.post("/api/run-again", json=asked, headers=own)
        found = await answer.json()
    assert (found["outcome"], found["stdout"]) == ("ok", "42\n")
    assert (found["recorded"]["outcome"], found["recorded"]["response"]) == ("error", "NameError: x")


def simulator(tmp_path, text):
    (tmp_path / "simulator.py").write_text(text)
    return (sys.executable, str(tmp_path / "simulator.py"))


async def test_the_simulator_is_asked_about_a_step_and_its_last_line_is_the_answer(tmp_path):
    command = simulator(tmp_path, "import sys, json; print('progress'); print(json.dumps({'rows': sys.argv[1:]}))")
    assert await rivals(command, tmp_path, 7) == {"rows": ["bench", "rivals", str(tmp_path), "step=7"]}


async def test_a_selection_is_asked_for_by_its_number(tmp_path):
    command = simulator(tmp_path, "import sys, json; print(json.dumps({'rows': sys.argv[1:]}))")
    answer = await reverify(command, tmp_path, 7, 0)
    assert answer == {"rows": ["reverify", str(tmp_path), "step=7", SELECTIONS[0]]}
    with pytest.raises(NotThere, match="no selection"):
        await reverify(command, tmp_path, 7, len(SELECTIONS))


async def test_a_simulator_that_fails_is_quoted(tmp_path):
    with pytest.raises(NotThere, match="status 1: nothing recorded"):
        await rivals(simulator(tmp_path, "print('{}'); raise SystemExit('nothing recorded')"), tmp_path, 7)
    with pytest.raises(NotThere, match="JSON"):
        await rivals(simulator(tmp_path, "print('nothing recorded')"), tmp_path, 7)


async def test_a_simulator_ends_with_the_question(tmp_path):
    os.mkfifo(tmp_path / "pid")
    said = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    text = f"import os, time; {said}; time.sleep(60)"
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(rivals(simulator(tmp_path, text), tmp_path, 7))
        process = int(await asyncio.to_thread((tmp_path / "pid").read_text))
        asked.cancel()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_neither_torch_nor_vllm_is_loaded_to_view_a_run(tmp_path):
    write_viewed_run(tmp_path / "run")
    code = (
        "import sys; from engine.commands.view import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "print(*sorted({'torch', 'vllm', 'transformers', 'IPython'} & set(sys.modules)))"
    )
    words = [str(tmp_path / "run"), f"export={tmp_path / 'run.html'}"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == ""
