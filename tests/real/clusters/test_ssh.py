"""recipes/clusters/ssh.sh with a real sshd of this machine: nodes are killed, drained and left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

STUB = """#!/bin/bash
mark=$PWD/${SSH_CONNECTION// /-}.$$
trap 'mv "$mark" "$mark.drained"; exit 0' TERM
trap 'mv "$mark" "$mark.hung-up"; exit 1' HUP
echo "$*" >"$mark"
while true; do sleep 0.05; done
"""


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[str]:
    """Yields an ssh command for the hosts of a server of this machine, which lets this user in."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("sshd or ssh is not installed")
    keys = tmp_path / "ssh"
    keys.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where it confines itself
    port = free_port()
    options = ["ListenAddress=127.0.0.1", f"Port={port}", f"HostKey={keys}/host", "UsePAM=no", "StrictModes=no"]
    options += [f"AuthorizedKeysFile={keys}/user.pub", f"PidFile={keys}/pid"]
    arguments = [word for option in options for word in ("-o", option)]
    with subprocess.Popen([server, "-D", "-e", "-f", "/dev/null", *arguments], stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"listening" in process.stderr.readline()
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        yield f"ssh -p {port} -i {keys}/user {known}"
        process.kill()


def test_by_ssh_a_node_that_is_killed_is_started_again_and_one_that_is_drained_stays_away(
    ssh: str, tmp_path: Path
) -> None:
    """When the script ends, the connections end, and with them the nodes."""
    program = tmp_path / "checkout/.venv/bin/rocstar"
    program.parent.mkdir(parents=True)
    program.write_text(STUB)
    program.chmod(0o755)
    here = {**os.environ, "ROCSTAR_SSH": ssh, "ROCSTAR_FOLDER": str(tmp_path / "checkout"), "AGAIN_S": "0.1"}
    command = ["recipes/clusters/ssh.sh", "tcp://lead:5700", "127.0.0.1", "127.0.0.1"]
    script = subprocess.Popen(
        command, cwd=ROOT, env={**here, "ROCSTAR_NODE": "slots=4"}, start_new_session=True, stderr=subprocess.PIPE
    )
    with script:
        killed, drained = until(lambda: marks(tmp_path, 2))
        assert killed.read_text() == "node lead=tcp://lead:5700 keys=keys slots=4\n"
        os.kill(pid(drained), signal.SIGTERM)
        os.kill(pid(killed), signal.SIGKILL)
        [again] = until(lambda: [mark for mark in marks(tmp_path) if mark not in (killed, drained)])
        assert drained.with_name(f"{drained.name}.drained").exists()
        script.terminate()
        until(lambda: again.with_name(f"{again.name}.hung-up").exists())
    assert [mark for mark in marks(tmp_path) if Path("/proc", str(pid(mark))).exists()] == []


CONNECTION = """#!/bin/bash
mark=$FOLDER/connection.$$
trap 'mv "$mark" "$mark.ended"; exit 255' TERM
echo "$*" >"$mark"
while true; do sleep 0.05; done
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_end_of_the_script_ends_its_connections_and_nothing_beside_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    """A program that starts the script without a terminal has it in its own process group."""
    connection = tmp_path / "ssh"
    connection.write_text(CONNECTION)
    connection.chmod(0o755)
    (tmp_path / "checkout").mkdir()
    here = {**os.environ, "ROCSTAR_SSH": str(connection), "FOLDER": str(tmp_path / "checkout")}
    command = ["recipes/clusters/ssh.sh", "tcp://lead:5700", "one", "two"]
    with subprocess.Popen(["sleep", "60"], process_group=0) as beside:
        script = subprocess.Popen(command, cwd=ROOT, env=here, process_group=beside.pid)
        try:
            there = until(lambda: marks(tmp_path, 2))
            script.send_signal(number)
            assert script.wait(30) == (130 if number == signal.SIGINT else 143)
            for mark in there:
                until(mark.with_name(f"{mark.name}.ended").exists)
            assert beside.poll() is None
        finally:
            beside.kill()
            script.kill()
            for mark in marks(tmp_path):
                with suppress(ProcessLookupError):
                    os.kill(pid(mark), signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def marks(folder: Path, count: int = 0) -> list[Path]:
    there = [path for path in (folder / "checkout").glob("*.*") if path.suffix[1:].isdecimal() and path.stat().st_size]
    return there if len(there) >= count else []


def pid(mark: Path) -> int:
    return int(mark.suffix[1:])


def until(value: Callable[[], Any]) -> Any:
    """Waits until there is a value, and returns it."""
    deadline = time.monotonic() + 30
    while not (current := value()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return current
