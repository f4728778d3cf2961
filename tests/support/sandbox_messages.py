"""Hypothesis strategies for what a hostile or broken end of the wire sends."""

from __future__ import annotations

from hypothesis import strategies as st

from sandbox import Limits, ToolResult, wire

NUMBERS = st.one_of(st.integers(-3, 60), st.integers(-(2**63), 2**64 - 1))
RESULTS = st.builds(
    ToolResult,
    outcome=st.sampled_from(["ok", "error", "timeout", "lost", "killed"]),
    stdout=st.just("evil"),
    exit_code=st.one_of(st.none(), NUMBERS),
    wall_s=st.floats(),
    queue_s=st.floats(),
    session_state=st.sampled_from([None, "kept", "lost"]),
    jailed=st.booleans(),
)
ANSWERS = st.lists(st.builds(wire.CallResult, id=NUMBERS, result=RESULTS), max_size=9)
CALLS = st.builds(
    wire.RunRequest, id=NUMBERS, code=st.binary(max_size=20), stdin=st.binary(max_size=5),
    limits=st.just(Limits(wall_s=0.2)),
    tier=st.sampled_from(["", "bare", "nonesuch", "\0"]), seed=st.one_of(st.none(), NUMBERS),
    step=st.one_of(st.none(), st.builds(wire.SessionStep, st.binary(max_size=17), NUMBERS, st.none(), st.booleans())),
)  # fmt: skip
TO_NODE = st.one_of(
    st.builds(wire.Results, ANSWERS),
    st.builds(wire.Results, ANSWERS).map(lambda results: wire.Results(results.results * 2)),
    st.builds(wire.Hello, NUMBERS, st.sampled_from(["full", "", "x"]), st.lists(st.sampled_from(["bare", "x"]))),
    st.builds(wire.Refused, st.text(max_size=9)),
    st.just(wire.Alive()),
)
TO_HOST = st.one_of(
    st.builds(wire.Run, st.lists(CALLS, max_size=4)),
    st.builds(wire.CancelCalls, st.lists(NUMBERS, max_size=4)),
    st.builds(wire.EndSessions, st.lists(st.binary(max_size=17), max_size=4)),
    st.just(wire.Ping()),
    st.just(wire.Reconnect()),
)


def spoiled(message: bytes, at: int, how: str) -> bytes:
    at %= len(message) + 1
    match how:
        case "cut":
            return message[:at]
        case "flip":
            return message[:at] + bytes([(at * 37 + 11) % 256]) + message[at + 1 :]
        case "double":
            return message + message
        case "nest":
            return message[:at] + b"\x91" * 2000 + message[at:]
    return message


def frames(messages: st.SearchStrategy[wire.ToHost | wire.ToClient]) -> st.SearchStrategy[list[bytes]]:
    """A message on the wire: as it should be, spoiled, of the wrong direction, or bytes of any kind; in some frames."""
    encoded = st.one_of(messages, messages, TO_NODE, TO_HOST).map(wire.encode)
    how = st.sampled_from(["whole", "whole", "cut", "flip", "double", "nest"])
    one = st.one_of(st.builds(spoiled, encoded, st.integers(0, 500), how), st.binary(max_size=40))
    return st.one_of(one.map(lambda frame: [frame]), one.map(lambda frame: [b"", frame]), st.lists(one, min_size=1))
