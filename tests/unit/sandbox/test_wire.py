"""Messages, verdicts and imports."""

from __future__ import annotations

import ast
import os
import signal
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import Limits, ToolResult, wire
from sandbox.host.slots import NO_REPORT
from sandbox.host.verdict import Outputs, cell_result, judge, make_result
from sandbox.inside import notebook
from sandbox.inside.guest import LENGTH
from sandbox.inside.slot import REPORT, SlotReport
from tests.support.paths import ROOT

LIMITS = Limits(wall_s=2, cpu_s=1, output_bytes=10, disk_bytes=100)


CELLS = st.builds(wire.Cell, st.binary(), st.binary(), st.just(LIMITS), st.booleans())
HISTORIES = st.none() | st.lists(CELLS)
STEPS = st.builds(wire.SessionStep, st.binary(min_size=16, max_size=16), st.integers(0, 1000), HISTORIES, st.booleans())
CALLS = st.builds(
    wire.RunRequest, st.integers(0, 2**60), st.binary(), st.binary(), st.just(LIMITS),
    st.sampled_from(["bare", "full"]),
    st.booleans(), st.none() | st.integers(0, 2**63 - 1), st.none() | STEPS,
)  # fmt: skip


@given(st.lists(CALLS, max_size=5))
def test_calls_round_trip(calls: list[wire.RunRequest]) -> None:
    message = wire.Run(calls)
    assert wire.decode_to_host(wire.encode(message)) == message


@given(st.lists(st.sampled_from([0, 1, wire.BATCH_BYTES // 3, 3 * wire.BATCH_BYTES]), max_size=300))
def test_batches_keep_every_call_in_order_and_bound_a_message(sizes: list[int]) -> None:
    big = bytes(3 * wire.BATCH_BYTES)
    step = wire.SessionStep(b"", 1, [wire.Cell(b"", b"", LIMITS)], False)
    calls = [
        wire.RunRequest(i, b"", memoryview(big)[:size], LIMITS, "bare", step=step)  # type: ignore[arg-type]
        for i, size in enumerate(sizes)
    ]
    messages = wire.batches(calls)
    assert [call.id for message in messages for call in message.calls] == list(range(len(sizes)))
    assert all(1 <= len(message.calls) <= wire.BATCH for message in messages)
    assert all(sum(sizes[call.id] for call in message.calls[:-1]) < wire.BATCH_BYTES for message in messages)
    full = [len(m.calls) == wire.BATCH or sum(sizes[c.id] for c in m.calls) >= wire.BATCH_BYTES for m in messages[:-1]]
    assert all(full), "a message goes out only when it is full"


def test_a_history_counts_for_the_size_of_a_message() -> None:
    step = wire.SessionStep(b"s" * 16, 1, [wire.Cell(bytes(wire.BATCH_BYTES), b"", LIMITS)], False)
    calls = [wire.RunRequest(i, b"", b"", LIMITS, "bare", step=step) for i in range(3)]
    assert [len(message.calls) for message in wire.batches(calls)] == [1, 1, 1]


@pytest.mark.parametrize(
    "message", [wire.CancelCalls([1, 2]), wire.EndSessions([b"s" * 16]), wire.Ping(), wire.Reconnect()]
)
def test_other_messages_to_a_host_round_trip(message: wire.ToHost) -> None:
    assert wire.decode_to_host(wire.encode(message)) == message


@given(st.text(), st.integers(0, 2**60))
def test_results_round_trip(text: str, number: int) -> None:
    result = ToolResult(outcome="ok", stdout=text, exit_code=0, wall_s=0.25, jailed=True)
    message = wire.Results([wire.CallResult(number, result)])
    assert wire.decode_to_client(wire.encode(message)) == message


@pytest.mark.parametrize("message", [wire.Hello(4, "full", ["bare"]), wire.Refused("why"), wire.Alive()])
def test_other_messages_round_trip(message: wire.ToClient) -> None:
    assert wire.decode_to_client(wire.encode(message)) == message


@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"Limits.{name} .*got 0"):
        Limits(**{name: 0})
    for value in (wire.MAX_LIMIT * 2, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"Limits.{name} "):
            Limits(**{name: value})
    assert getattr(Limits(**{name: wire.MAX_LIMIT}), name) == wire.MAX_LIMIT


class Real(float):
    """As numpy.float64: a float, and no message can hold it."""


@pytest.mark.parametrize("name", Limits.__struct_fields__)
@pytest.mark.parametrize("value", [True, None, "4", 2j, Real(2), 1e9])
def test_limits_are_of_the_types_that_a_host_takes(name: str, value: object) -> None:
    if value == 1e9 and name.endswith("_s"):
        Limits(**{name: 4})  # type: ignore[arg-type] # an int is as good
    else:
        with pytest.raises(ValueError, match=f"Limits.{name} .*got "):
            Limits(**{name: value})  # type: ignore[arg-type]
    right = wire.Run([wire.RunRequest(0, b"", b"", Limits(**{name: 4}), "bare")])  # type: ignore[arg-type]
    assert wire.decode_to_host(wire.encode(right)) == right


def test_code_beyond_its_limit_is_refused_by_name() -> None:
    assert wire.MAX_CODE_BYTES == notebook.MAX_CODE_BYTES == 8 << 20
    assert len(wire.encode_code("#" * wire.MAX_CODE_BYTES)) == 8 << 20
    for code in ("#" * (wire.MAX_CODE_BYTES + 1), "#" * (wire.MAX_CODE_BYTES - 1) + "\u00e4"):
        with pytest.raises(ValueError, match=r"code .*8388608.*8388609"):
            wire.encode_code(code)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, 1.5, "1", True])
def test_seeds_that_are_none(seed: object) -> None:
    with pytest.raises(ValueError, match="seed "):
        wire.check_seed(seed)  # type: ignore[arg-type]
    if seed != 2**64:  # which no msgpack holds
        call = msgspec.structs.replace(wire.RunRequest(0, b"", b"", LIMITS, "bare"), seed=seed)
        with pytest.raises(wire.BadMessage):
            wire.decode_to_host(wire.encode(wire.Run([call])))
    assert [wire.check_seed(right) for right in (None, 0, 2**63 - 1)] == [None, 0, 2**63 - 1]


@given(
    st.builds(
        SlotReport, st.integers(-3, 3), st.integers(-(2**40), 2**40), st.floats(), st.floats(), st.integers(-9, 2**62)
    ),
    st.integers(0, 200), st.booleans(),
)  # fmt: skip
def test_any_report_has_a_verdict_or_is_no_report(report: SlotReport, output_bytes: int, oom: bool) -> None:
    """ "ok" only for exit code 0 of what ended by itself."""
    try:
        outcome = judge(report, LIMITS, output_bytes, oom_killed=oom)
    except NO_REPORT:
        assert report.ended == 0  # a status that wait(2) does not give for an end
        return
    assert (outcome == "ok") == (
        report.ended == 0 and report.status & 0xFF7F == 0 and not report.cpu_s >= LIMITS.cpu_s
    )  # 0x80: it dumped core
    assert outcome != "lost"


FILES = st.lists(st.binary(max_size=60), min_size=0, max_size=4)
NUMBERS = st.one_of(st.integers(-2, 3), st.integers(-(2**63), 2**63 - 1))


@given(NUMBERS, NUMBERS, st.floats(), NUMBERS, NUMBERS, FILES, NUMBERS)
def test_any_report_with_any_files_is_a_result_or_no_report(
    ended: int, status: int, seconds: float, died: int, state: int, files: list[bytes], length: int
) -> None:
    """Results are bounded and can be sent; what is none ends in an error that slots.SlotHandle knows."""
    fds = [os.memfd_create("output") for _ in files]
    for fd, data in zip(fds, files, strict=True):
        os.write(fd, data)
        if fd == fds[-1]:
            os.ftruncate(fd, notebook.CODE_AT)
            os.pwrite(fd, LENGTH.pack(length), notebook.DISPLAY_AT if died & 1 else 0)
    plain = REPORT.pack(ended, status, seconds, seconds, state)
    of_cell = notebook.CELL_REPORT.pack(ended, status, seconds, seconds, died, state)
    try:
        for make in (
            lambda: make_result(SlotReport(*REPORT.unpack(plain)), LIMITS, Outputs(fds), lambda: False),
            lambda: cell_result(
                notebook.CellReport(*notebook.CELL_REPORT.unpack(of_cell)), LIMITS, Outputs(fds), lambda: False
            ),
        ):
            try:
                result = make()
            except NO_REPORT:
                continue
            assert all(len(text.encode()) <= 3 * 10 for text in (result.stdout, result.stderr, result.display or ""))
            message = wire.Results([wire.CallResult(1, result)])
            assert len(wire.decode_to_client(wire.encode(message)).results) == 1  # type: ignore[union-attr]
    finally:
        for fd in fds:
            os.close(fd)


@given(st.binary(max_size=60))
def test_bytes_of_another_size_are_no_report(message: bytes) -> None:
    for kind in (REPORT, notebook.CELL_REPORT):
        if len(message) != kind.size:
            with pytest.raises(NO_REPORT):
                kind.unpack(message)


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
    assert judge(SlotReport(ended, status, 0.1, cpu_s, 0), LIMITS, output, oom_killed=oom) == outcome


def test_what_runs_in_the_jail_is_standard_library_only() -> None:
    files = list((ROOT / "sandbox" / "inside").glob("*.py"))
    assert len(files) > 5
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        outside = {name for name in names if name != "sandbox.inside" and not name.startswith("sandbox.inside.")}
        assert {name.partition(".")[0] for name in outside} <= sys.stdlib_module_names, file
    assert os.environ.get("PYTHONPATH") is None or ROOT
