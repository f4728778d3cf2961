"""What the model is told of a program that failed: all of the message, where it happened, what was printed before."""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tools.python_feedback import FEEDBACKS, judge_feedback, message_feedback, traceback_feedback
from engine.tools.python_tool import PythonTool
from recipes.rstar2.parts.sampling.protocol import RELEASE, REPORT
from sandbox.wire import ToolResult
from tests.support.fakes import ScriptedRunner
from tests.support.odd_texts import ODD_TEXTS, in_no_time

ZERO = """Traceback (most recent call last):
  File "/tmp/main.py", line 2, in <module>
    print(x / 0)
          ~~^~~
ZeroDivisionError: division by zero
"""
LINES = """Traceback (most recent call last):
  File "/tmp/main.py", line 1, in <module>
    raise ValueError('first\\n  second')
ValueError: first
  second
"""
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/tmp/main.py", line 2, in <module>
  |     raise ExceptionGroup('g', [ValueError(1), TypeError('t')])
  | ExceptionGroup: g (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | ValueError: 1
    +---------------- 2 ----------------
    | TypeError: t
    +------------------------------------
"""
SYNTAX = """  File "/tmp/main.py", line 2
    print(x
         ^
SyntaxError: '(' was never closed
"""
CHAINED = """Traceback (most recent call last):
  File "<cell 1>", line 2, in <module>
KeyError: 'k'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "<cell 1>", line 4, in <module>
  File "/usr/lib/python3.11/json/decoder.py", line 353, in raw_decode
json.decoder.JSONDecodeError: Expecting value
"""
EXIT = "bye\n"


def failed(stderr, stdout=""):
    return ToolResult(outcome="error", stdout=stdout, stderr=stderr, exit_code=1, wall_s=0.014)


@pytest.mark.parametrize("stderr", [ZERO, LINES, GROUP, SYNTAX, CHAINED, EXIT])
def test_the_traceback_is_told_whole_below_what_was_printed(stderr):
    assert traceback_feedback("", failed(stderr)).output == stderr.rstrip()
    assert traceback_feedback("", failed(stderr, "so far 41\n")).output == f"so far 41\n{stderr.rstrip()}"


@pytest.mark.parametrize(
    ("stderr", "message"),
    [
        (ZERO, "ZeroDivisionError: division by zero"),
        (LINES, "ValueError: first\n  second"),
        (GROUP, GROUP.rstrip()),
        (SYNTAX, "SyntaxError: '(' was never closed"),
        (CHAINED, "json.decoder.JSONDecodeError: Expecting value"),
        (EXIT, "bye"),
        ("main.py:1: Warning\n" + ZERO, "ZeroDivisionError: division by zero"),
        ('  File "cut off', '  File "cut off'),
    ],
)
def test_a_message_is_told_with_all_its_lines_and_without_the_frames(stderr, message):
    assert message_feedback("", failed(stderr, "so far 41\n")).output == f"so far 41\n{message}"


async def test_a_long_output_is_cut_in_its_middle_and_keeps_the_end_of_the_traceback():
    tool = PythonTool(ScriptedRunner(lambda code: failed(ZERO, "7 " * 5000)), output_chars=200)
    text = (await tool({"code": "x"})).text
    assert len(text) == 200
    assert text.startswith("7 7 7")
    assert text.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("outcome", ["ok", "error", "timeout"])
def test_an_output_that_the_sandbox_cut_says_so(outcome):
    result = ToolResult(outcome=outcome, stdout="x" * 65536, truncated=True)
    for feedback in (traceback_feedback, message_feedback):
        told = feedback("", result)
        assert "too much output" in told.note
        assert "\n" not in told.note
        assert feedback("", ToolResult(outcome=outcome, stdout="x")).note == ""


def released(code, result):
    """As the published code writes it of what Code Judge answers."""
    return judge_feedback(code, result).output


def test_the_release_tells_what_its_judge_does():
    ok = ToolResult(outcome="ok", stdout="4\n", stderr="a warning\n", display="7", wall_s=0.016)
    assert released("", ok) == "Tool call success\nstdout: 4\n7\n\nstderr: a warning\n\nexecution time: 0.02s"
    assert released("", ToolResult(outcome="ok")) == "Tool call success\nexecution time: 0.00s"
    late = ToolResult(outcome="timeout", stdout="4\n", wall_s=4.0)
    assert released("", late) == "Tool call failure\nreason: worker_timeout\nstdout: 4\n\nexecution time: 4.00s"
    long = released("", ToolResult(outcome="ok", stdout="y" * 1001 + "\n"))
    assert f"stdout: {'y' * 1000}\nexecution" in long


@pytest.mark.parametrize(
    ("code", "stderr", "told"),
    [
        ("x = 1\ny = x / 0", ZERO, "ZeroDivisionError at line 2: division by zero\n  y = x / 0\n"),
        ("x = 1\nprint(x / 0)", ZERO, "ZeroDivisionError: division by zero\n"),  # a last expression: no place
        ("1 / 0", ZERO.replace("line 2", "line 1"), "ZeroDivisionError at line 1: division by zero\n  1 / 0\n"),
        (
            "x = 1\nprint(x",
            SYNTAX,
            "SyntaxError at line 2: '(' was never closed (<unknown>, line 2)\n  print(x\n",
        ),
        ("a\nb\nc\nd = json.loads(s)", CHAINED, "JSONDecodeError: Expecting value\n"),
        ("sys.exit('bye')", EXIT, "bye\n"),
        ("raise g", GROUP, GROUP),
    ],
)
def test_the_release_places_an_error_in_its_code(code, stderr, told):
    expected = f"Tool call failure\nreason: \nstderr: {told}\nexecution time: 0.01s"
    assert released(code, failed(stderr)) == expected


async def test_each_protocol_has_its_own_words():
    runner = ScriptedRunner(lambda code: failed(ZERO, "so far 41\n"))
    code = {"code": "x = 1\nprint(x / 0)"}
    assert (await REPORT.tool(runner, stateful=False)(code)).text == f"so far 41\n{ZERO.rstrip()}"
    assert (await RELEASE.tool(runner, stateful=False)(code)).text == (
        "Tool call failure\nreason: \nstdout: so far 41\n\nstderr: ZeroDivisionError: division by zero\n\n"
        "execution time: 0.01s"
    )


@given(ODD_TEXTS, ODD_TEXTS, st.sampled_from(["", ZERO, SYNTAX, GROUP]))
def test_no_text_is_too_odd_to_be_told(code, text, prefix):
    for outcome in ("ok", "error", "timeout", "memory", "output", "killed", "lost"):
        result = ToolResult(outcome=outcome, stdout=text, stderr=prefix + text, display=text)
        for feedback in FEEDBACKS.values():
            in_no_time(partial(feedback, code, result))
