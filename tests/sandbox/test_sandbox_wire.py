"""Messages, verdicts and imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox_processes import ROOT

from sandbox import Limits, ToolResult, wire
from sandbox.slot import Report
from sandbox.verdict import judge

LIMITS = Limits(wall_s=2, cpu_s=1, output_bytes=10, disk_bytes=100)


@given(st.lists(st.tuples(st.integers(0, 2**60), st.binary(), st.binary()), max_size=wire.BATCH))
def test_calls_round_trip(calls: list[tuple[int, bytes, bytes]]) -> None:
    message = wire.Run([wire.Call(number, code, stdin, LIMITS) for number, code, stdin in calls])
    assert wire.decode_to_host(wire.encode(message)) == message


@given(st.text(), st.integers(0, 2**60))
def test_results_round_trip(text: str, number: int) -> None:
    result = ToolResult(outcome="ok", stdout=text, exit_code=0, wall_s=0.25, jailed=True)
    message = wire.Results([wire.CallResult(number, result)])
    assert wire.decode_to_client(wire.encode(message)) == message


@pytest.mark.parametrize("message", [wire.Hello(4, "full"), wire.Refused("why"), wire.Alive()])
def test_other_messages_round_trip(message: wire.ToClient) -> None:
    assert wire.decode_to_client(wire.encode(message)) == message


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"Limits.{name} must be positive, got 0"):
        Limits(**{name: 0})


@pytest.mark.parametrize(
    ("ended", "status", "cpu_s", "output", "oom", "outcome"),
    [
        (0, 0, 0.1, 0, False, "ok"),
        (0, 0, 0.1, 100, False, "ok"),
        (0, 1 << 8, 0.1, 99, False, "error"),
        (0, 1 << 8, 0.1, 100, False, "output"),
        (0, signal.SIGXFSZ, 0.1, 100, False, "output"),
        (1, signal.SIGKILL, 0.1, 0, False, "timeout"),
        (0, signal.SIGXCPU, 1.0, 0, False, "timeout"),
        (0, signal.SIGKILL, 1.9, 0, False, "timeout"),
        (0, signal.SIGKILL, 0.1, 0, False, "killed"),
        (0, signal.SIGKILL, 0.1, 0, True, "memory"),
        (0, signal.SIGRTMAX, 0.1, 0, False, "memory"),
        (0, signal.SIGSEGV, 0.1, 0, False, "killed"),
        (2, signal.SIGKILL, 0.1, 0, False, "killed"),
    ],
)
def test_verdicts(ended: int, status: int, cpu_s: float, output: int, oom: bool, outcome: str) -> None:
    assert judge(Report(ended, status, 0.1, cpu_s, 0), LIMITS, output, oom_killed=oom) == outcome


def test_import_is_light_and_the_jailed_part_is_standard_library_only() -> None:
    code = (
        "import sys, sandbox\nassert not {'torch', 'vllm', 'numpy', 'uvloop'} & set(sys.modules)\n"
        "assert not {'engine', 'algo'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    for name in ("linux", "guest", "slot", "zygote"):
        text = (ROOT / "sandbox" / f"{name}.py").read_text()
        modules = {
            line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))
        }
        assert modules - {""} <= sys.stdlib_module_names
    assert os.environ.get("PYTHONPATH") is None or ROOT
