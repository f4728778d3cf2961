"""Demonstrations of tool calls from the calculator marks of GSM8K."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algo.reward.answers import boxed_answer
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.tool_call_parser import MalformedCall, ToolCallParser
from recipes.rstar2.parts.preparation.demonstrations import (
    MAX_STEPS,
    NoArithmetic,
    evaluate,
    gsm8k_demonstration,
    program,
)
from recipes.rstar2.parts.preparation.rows import Dropped, Place, WrongField
from recipes.rstar2.parts.sampling.protocol import PROTOCOLS
from tests.support.conversations import installed

CLIPS = {
    "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many altogether?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nShe sold 48+24 = <<48+24=72>>72 altogether.\n#### 72",
}


def demonstration(row, protocol="report"):
    return gsm8k_demonstration(row, Place(id="gsm-0", index=0, protocol=protocol))


def reason(solution, question=""):
    found = demonstration({"question": question, "answer": solution})
    assert isinstance(found, Dropped)
    return found.reason


def code(solution, question=""):
    found = program(solution, question)
    assert not isinstance(found, Dropped), found
    return found


def test_marks_become_a_program_its_output_and_the_answer():
    user, calling, reply, answering = demonstration(CLIPS).messages
    assert user == {"role": "user", "content": CLIPS["question"]}
    [call] = calling["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"code": "a = 48/2\nb = 48+a\nprint(b)", "input": ""}
    assert reply == {"role": "tool", "content": "72.0"}
    assert boxed_answer(answering["content"]) == "72"


@pytest.mark.parametrize("name", ["report", "release"])
def test_the_call_is_of_the_protocols_tool_and_the_chat_template_renders_it(name, tmp_path):
    found = demonstration(CLIPS, name)
    [tool] = json.loads(found.tools)
    assert tool["function"]["name"] == PROTOCOLS[name].tool_name
    assert found.messages[1]["tool_calls"][0]["function"]["name"] == PROTOCOLS[name].tool_name
    chat = ChatTemplate.load(installed(tmp_path / "chat"), PROTOCOLS[name].chat())
    turns = [chat.decode(ids) for ids, learnt in chat.with_tools([tool]).conversation(found.messages) if learnt]
    assert len(turns) == 2
    assert "</reason>\n<tool_call>" in turns[0]
    assert turns[1].startswith(" The program prints 72.0")


def test_a_number_that_the_question_states_is_written_and_an_earlier_result_is_named():
    assert code("<<3*5=15>> <<15+20=35>>", "3 bags of 5, and 20 more") == ("a = 3*5\nb = a+20\nprint(b)", "35")
    assert code("<<3*5=15>> <<15+20=35>>", "3 bags of 5, 15 balls, 20 more")[0] == "a = 3*5\nb = 15+20\nprint(b)"


def test_a_number_within_another_one_is_not_named():
    assert code("<<2*6=12>> <<112+12.5=124.5>>")[0] == "a = 2*6\nb = 112+12.5\nprint(b)"


def test_money_and_thousands_are_plain_numbers():
    assert code("<<$1,000*2=2,000>> <<2000+$5=2005>>") == ("a = 1000*2\nb = a+5\nprint(b)", "2005")


def test_what_teaches_a_wrong_answer_is_dropped():
    assert reason("<<2+3=5>>\n#### 6") == "program_differs"
    assert reason("<<2+3=6>>\n#### 6") == "program_differs"


def test_what_is_no_program_is_dropped():
    assert reason("Five.\n#### 5") == "no_calculation"
    assert reason("<<x+3=5>>\n#### 5") == "no_arithmetic"
    assert reason("<<5/0=5>>\n#### 5") == "no_arithmetic"
    assert reason("<<2+3=five>>\n#### 5") == "no_arithmetic"
    assert reason("<<5/2=2.5>>\n#### 2.5") == "not_integer"
    assert reason("<<1+1=2>>" * (MAX_STEPS + 1) + "\n#### 2") == "many_steps"


def test_a_row_without_the_columns_of_gsm8k_is_refused():
    with pytest.raises(WrongField, match="answer"):
        demonstration({"question": "How many?"})


@pytest.mark.parametrize(
    "text",
    ["__import__('os').getcwd()", "2**9999999", "a", "'x'*9", "[1]", "True+1", "9" * 30 + "*2", "1;2", "(" * 500],
)
def test_nothing_but_arithmetic_is_computed(text):
    with pytest.raises(NoArithmetic):
        evaluate(text, {})


NUMBERS = st.integers(0, 1000) | st.decimals(0, 1000, places=2).map(float)
EXPRESSIONS = st.recursive(  # of so few numbers that no product is too large
    NUMBERS.map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda parts: f"({''.join(parts)})"),
    max_leaves=4,
)


@given(EXPRESSIONS)
def test_the_value_is_the_one_that_python_computes(text):
    assert repr(evaluate(text, {})) == repr(eval(text))


def broken(number, protocol="report", seed=0):
    """A demonstration whose first call fails. number: of its row, which decides the mistake."""
    return gsm8k_demonstration(
        CLIPS, Place(id=f"gsm-{number}", index=number, seed=seed, protocol=protocol, broken_calls=1.0)
    )


def mistake(conversation):
    return conversation.messages[2]["content"].splitlines()[-1].partition(":")[0]


@pytest.mark.parametrize("name", ["report", "release"])
def test_a_broken_call_is_answered_and_repaired_and_both_turns_are_learnt(name, tmp_path):
    chat = ChatTemplate.load(installed(tmp_path / "chat"), PROTOCOLS[name].chat())
    mistakes = set()
    for number in range(30):
        made, plain = broken(number, name), demonstration(CLIPS, name)
        [tool] = json.loads(made.tools)
        pieces = chat.with_tools([tool]).conversation(made.messages)
        turns = [chat.decode(ids) for ids, learnt in pieces if learnt]
        assert len(turns) == 3
        assert made.messages[3]["tool_calls"] == plain.messages[1]["tool_calls"]
        assert made.messages[4:] == plain.messages[2:]
        first = next(each for turn in turns for each in ToolCallParser().feed(turn))
        if isinstance(first, MalformedCall):
            mistakes.add("json")
            assert made.messages[2]["content"] == f"FormatError: {first.reason}"
        else:
            mistakes.add("code")
            assert first.name == PROTOCOLS[name].tool_name
            assert first.arguments["code"] != json.loads(_arguments_of(made.messages[3]))["code"]
    assert mistakes == {"json", "code"}


def _arguments_of(message):
    [call] = message["tool_calls"]
    return call["function"]["arguments"]


def test_the_share_of_broken_calls_is_the_one_that_is_asked_for():
    def count(share):
        rows = [
            gsm8k_demonstration(CLIPS, Place(id=f"gsm-{number}", index=number, broken_calls=share))
            for number in range(1000)
        ]
        return sum(len(row.messages) == 6 for row in rows)

    assert count(0.0) == 0
    assert 300 < count(0.35) < 400
    assert count(1.0) == 1000


def test_the_seed_and_the_row_decide_the_mistake():
    assert broken(3) == broken(3)
    assert {mistake(broken(number)) for number in range(30)} == {"SyntaxError", "NameError", "FormatError"}
    assert [broken(number) for number in range(30)] != [broken(number, seed=1) for number in range(30)]
