"""What listens where, in every kind of run: only what the table of engine/README.md says, and never beyond loopback.

Each program runs where the machine's name means an address that is not on loopback, as it does on most machines: what
listens "on this machine" then is open to the network. Options that name an address are given one on loopback.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.conversations import chat_row, installed, sum_row, write_rows
from tests.support.listeners import Listener, Watch
from tests.support.paths import ROCSTAR, ROOT, TINY
from tests.support.runs import QUICKSTART, Run
from tests.support.viewed_runs import write_viewed_run

README = ROOT / "engine" / "README.md"
LAN = "10.99.0.1"
SMALL = [
    "steps=1",
    "eval_problems=2",
    "prompts_per_step=2",
    "group_size=2",
    "replicas=1",
    "slots=2",
    "learner.threads=1",
]
FREE = "a free one"
# A holder of the namespaces says that it is ready, and stays.
APART = f"""
ip link set lo up && ip addr add {LAN}/32 dev lo && mount --bind "$1" /etc/hosts && echo ready && exec sleep 3600
"""

Start = Callable[..., Run]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The words before a command that runs it where this machine's name means LAN."""
    names = tmp_path_factory.mktemp("names") / "hosts"
    names.write_text(f"127.0.0.1 localhost\n{LAN} {socket.gethostname()}\n")
    words = ["unshare", "--net", "--mount", "sh", "-c", APART, "sh", str(names)]
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("another name of the machine takes root, unshare, nsenter and ip")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        yield ["nsenter", "--net", "--mount", f"--target={holder.pid}"]
        holder.kill()


@pytest.fixture
def start(apart: list[str], started: list[Run]) -> Start:
    def start(*words: object) -> Run:
        own = [f"--unset={name}" for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")]
        run = Run([*apart, "env", *own, *map(str, words)])
        started.append(run)
        return run

    return start


def documented(kind: str) -> set[tuple[str, str]]:
    """(process, port) of the table's rows in which this kind of run stands."""
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|", README.read_text(), re.MULTILINE)
    return {(process, _port(port)) for process, port, kinds in rows if kind in re.findall(r"`([^`]+)`", kinds)}


def _port(text: str) -> str:
    """The option that names it."""
    named = re.match(r"`([^`]+)`", text)
    return named[1] if named else FREE


def check(kind: str, seen: set[Listener], ports: dict[int, str] | None = None) -> None:
    """ports: those that options gave, with the option's name."""
    beyond = [each for each in seen if not each.on_loopback]
    assert not beyond, beyond
    assert {(each.owner, (ports or {}).get(each.port, FREE)) for each in seen} == documented(kind)


def finished(run: Run, name: str) -> set[Listener]:
    """What listened while it ran to its end."""
    with Watch(run.process.pid, name) as watch:
        assert run.end(200) == 0, run.text()
    return watch.seen


def serving(run: Run, name: str) -> set[Listener]:
    """What listens when it has said where."""
    with Watch(run.process.pid, name) as watch:
        run.until("http://")
        watch.look()
        run.process.terminate()
        run.end(30)
    return watch.seen


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def test_the_quick_start_with_two_ranks_of_the_learner(start: Start, tmp_path: Path) -> None:
    assert documented("quick start") == documented("two ranks")
    fields = [*SMALL, "learner_ranks=2", "checkpoint_every=1"]
    check("two ranks", finished(start(*QUICKSTART, f"runs={tmp_path}", *fields), "run"))


def test_an_agent_of_ones_own(start: Start, tmp_path: Path) -> None:
    recipe, [port] = ROOT / "recipes" / "agents" / "openai_agent.py", free_ports(1)
    words = [recipe, f"runs={tmp_path}", *SMALL, f"metrics_port={port}"]
    check("agent", finished(start(sys.executable, *words), "run"), {port: "metrics_port"})


def test_supervised_fine_tuning(start: Start, tmp_path: Path) -> None:
    model, data = installed(tmp_path / "model"), write_rows(tmp_path / "rows.jsonl", [sum_row(a, 3) for a in range(24)])
    chat = write_rows(tmp_path / "chat.jsonl", [chat_row(f"Hello {n}.") for n in range(8)])
    fields = ["steps=1", "batch_size=4", "held_out_rows=4", "max_tokens=500", "format_prompts=0", "learner.threads=1"]
    words = [
        ROOT / "recipes" / "rstar2" / "sft.py",
        f"model={model}",
        f"data={data},{chat}",
        f"runs={tmp_path}",
        *fields,
    ]
    check("sft", finished(start(sys.executable, *words), "run"))


def test_several_machines(start: Start, tmp_path: Path) -> None:
    """Rollout nodes, and ranks of the learner on another host; here they are processes of one machine."""
    nodes, meet = free_ports(2)
    fields = [f"nodes=tcp://127.0.0.1:{nodes}", "learner_hosts=2", f"learner_at=127.0.0.1:{meet}", f"runs={tmp_path}"]
    join = [*ROCSTAR, "node", f"lead=tcp://127.0.0.1:{nodes}"]
    with ExitStack() as stack:
        lead = start(*QUICKSTART, *fields, *SMALL, "nodes_only=true")
        others = [start(*join, "learner=true"), start(*join, "replicas=1", "slots=2")]
        names = ("run", "node", "node")
        pids = [run.process.pid for run in (lead, *others)]
        watches = [stack.enter_context(Watch(pid, name)) for pid, name in zip(pids, names, strict=True)]
        assert lead.end(200) == 0, lead.text()
        assert [run.end(30) for run in others] == [0, 0], others[0].text() + others[1].text()
    seen = set().union(*(watch.seen for watch in watches))
    check("several machines", seen, {nodes: "nodes", meet: "learner_at"})


def test_a_checkpoint_behind_an_api(start: Start) -> None:
    [port] = free_ports(1)
    words = ["gateway", TINY, f"port={port}", "max_tokens=200", "tools=true", "slots=2"]
    check("rocstar gateway", serving(start(*ROCSTAR, *words), "rocstar gateway"), {port: "port"})


def test_the_page_of_a_run(start: Start, tmp_path: Path) -> None:
    [port] = free_ports(1)
    write_viewed_run(tmp_path / "run")
    words = ["view", tmp_path / "run", f"port={port}"]
    check("rocstar view", serving(start(*ROCSTAR, *words), "rocstar view"), {port: "port"})


def test_the_sandbox_over_http(start: Start) -> None:
    [port] = free_ports(1)
    words = ["sandbox-http", f"port={port}", "slots=2"]
    check("rocstar sandbox-http", serving(start(*ROCSTAR, *words), "rocstar sandbox-http"), {port: "port"})


SANDBOX = """
import asyncio, sys
from sandbox import Sandbox, SandboxConfig

async def main():
    async with Sandbox(SandboxConfig(slots=0, listen=sys.argv[1], start_s=60)) as box:
        print((await box.run("print('ok')")).stdout)

asyncio.run(main())
"""


@pytest.mark.parametrize("loopback", ["127.0.0.1", "[::1]"])
def test_hosts_of_the_sandbox(start: Start, loopback: str) -> None:
    [port] = free_ports(1)
    address = f"tcp://{loopback}:{port}"
    node = start(sys.executable, "-c", SANDBOX, address)
    host = start(*ROCSTAR, "sandbox-host", f"connect={address}", "slots=1")
    with Watch(host.process.pid, "sandbox host") as of_host:
        seen = finished(node, "sandbox")
    assert node.text() == "ok\n\n"
    check("sandbox hosts", seen | of_host.seen, {port: "SandboxConfig.listen"})


def test_a_bench(start: Start) -> None:
    """It measures for longer than the test needs."""
    run = start(sys.executable, "-m", "bench", "learner", "quick=true")
    with Watch(run.process.pid, "bench") as watch:
        assert watch.first.wait(120)
    check("bench", watch.seen)
