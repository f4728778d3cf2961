"""A run outlives whoever reads what it prints, in processes of their own."""

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

PRINTS = """
import os, sys
from engine.process import streams
streams.prepare_descriptors()
streams.outlive_readers()
from pathlib import Path
from rich.console import Console

folder = Path(sys.argv[1])
console = Console()
print("early")
streams.listen(lambda line: (folder / "told").open("a").write(line + chr(10)))
for n in range(20):
    console.print("x" * 10_000, soft_wrap=True, highlight=False)
    print("y", flush=True)
    sys.stdout.flush()
os.system("echo from a child")
print("stderr works", file=sys.stderr)
(folder / "files").write_text(str([os.readlink(f"/proc/self/fd/{n}") for n in (0, 1, 2)]))
(folder / "done").write_text(chr(0x2581))
sys.exit(3)
"""


def run(folder, redirected, environment=None):
    """Exit code and standard error of PRINTS with its streams redirected by a shell."""
    words = ["bash", "-c", f'"$0" -c "$1" "$2" {redirected}; exit ${{PIPESTATUS[0]}}', sys.executable, PRINTS, folder]
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, capture_output=True, timeout=60, env={**os.environ, **(environment or {})}
    )
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize(
    ("redirected", "cause"),
    [("> /dev/full", "No space left"), ("| head -1", "Broken pipe"), ("| (exec 0<&-; sleep 0.2)", "Broken pipe")],
)
def test_a_stdout_that_takes_nothing_more_is_reported_once_and_the_program_goes_on(tmp_path, redirected, cause):
    code, said = run(tmp_path, redirected)
    assert code == 3, said
    told = (tmp_path / "told").read_text()
    assert told.count("\n") == 1
    assert "standard output" in told
    assert cause in told
    assert said == told + "stderr works\n", "no traceback, not at the end either"
    assert (tmp_path / "files").read_text().count("/dev/null") >= 1


@pytest.mark.parametrize("redirected", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_are_opened(tmp_path, redirected):
    code, said = run(tmp_path, redirected)
    assert code == 3, said
    assert said in ("stderr works\n", "")
    assert (tmp_path / "files").read_text().count("/dev/null") >= redirected.count("&-")


def test_both_streams_may_be_lost(tmp_path):
    code, _ = run(tmp_path, "2>&1 >/dev/full | head -1")
    assert code == 3
    code, _ = run(tmp_path, "2>/dev/full >/dev/full")
    assert code == 3
    told = (tmp_path / "told").read_text()
    assert "standard output" in told
    assert "standard error" in told


def test_text_files_are_utf8_in_any_locale(tmp_path):
    code, said = run(tmp_path, "> /dev/null", {"PYTHONUTF8": "0", "LC_ALL": "C"})
    assert code == 3, said
    assert (tmp_path / "done").read_bytes() == "▁".encode()


def test_a_stream_that_works_is_as_it_was(tmp_path):
    words = [sys.executable, "-c", PRINTS, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode == 3
    assert done.stdout.startswith(b"early\n" + b"x" * 10_000 + b"\ny\n")
    assert done.stdout.endswith(b"from a child\n")
    assert not (tmp_path / "told").exists()


def test_a_command_whose_reader_has_enough_ends_without_a_word():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "engine.programs.rocstar", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")  # what a shell says of SIGPIPE
