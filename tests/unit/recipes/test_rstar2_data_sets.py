"""How the rows of each data set are read. Rows are made here in the form that the sets' public cards describe."""

import json
import random

import pytest

from engine.rollout.tool_call_messages import normalize
from recipes.rstar2.parts.preparation.chat_sets import Unusable, python_calls
from recipes.rstar2.parts.preparation.rows import Conversation, Dropped, Place, Problem, WrongField
from recipes.rstar2.parts.preparation.sets import SETS
from recipes.rstar2.parts.sampling.protocol import REPORT


def read(name, row, **place):
    return SETS[name].convert(row, Place(id="x-0", index=0, **place))


def problem(name, row, **place):
    found = read(name, row, **place)
    assert isinstance(found, Problem), found
    return found.question, found.answer


def conversation(name, row):
    found = read(name, row)
    assert isinstance(found, Conversation), found
    normalize(found.messages)  # what fine-tuning does with them
    return found


def reason(name, row):
    found = read(name, row)
    assert isinstance(found, Dropped), found
    return found.reason


def calls(message):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def texts(found):
    return [(message["role"], message["content"]) for message in found.messages]


# Problems


GPQA = {
    "Question": "Which is it?",
    "Correct Answer": "right ",
    "Incorrect Answer 1": "one",
    "Incorrect Answer 2": "two",
    "Incorrect Answer 3": "three",
}


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("dapo", {"prompt": "1+1?", "solution": "2", "reward_model": {"ground_truth": "2", "style": "rule"}}, "2"),
        ("dapo", {"prompt": "1+1?", "solution": "2"}, "2"),
        ("dapo", {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}, "2"),
        ("euler", {"problem": "1+1?", "answer": 2}, "2"),
        ("mawps", {"input": "1+1?", "target": 2.0, "type": "singleop"}, "2"),
        ("gsm8k", {"question": "1+1?", "answer": "It is <<1+1=2>>2.\n#### 2"}, "2"),
        ("aime24", {"problem": "1+1?", "solution": "2, of course", "answer": "002"}, "2"),
        ("aime25", {"question": "1+1?", "answer": "2"}, "2"),
        ("hmmt25", {"problem_idx": 1, "problem": "1+1?", "answer": "\\sqrt{4}", "problem_type": []}, "\\sqrt{4}"),
        ("math500", {"problem": "1+1?", "answer": "2", "unique_id": "test/a/1.json"}, "2"),
    ],
)
def test_a_problem_is_read(name, row, expected):
    assert problem(name, row) == ("1+1?", expected)


def test_the_first_form_of_dapo_loses_the_words_around_its_question():
    said = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        '$Answer.\n\nWhat is 1+1?\n\nRemember to put your answer on its own line after "Answer:".'
    )
    row = {"prompt": [{"role": "user", "content": said}], "reward_model": {"ground_truth": "2"}}
    assert problem("dapo", row)[0] == "What is 1+1?"


def openmath(**fields):
    row = {"problem": "1+1?", "expected_answer": "2", "problem_type": "has_answer_extracted"}
    return {**row, "problem_source": "aops_c4_high_school_math", **fields}


def test_of_open_math_reasoning_problems_of_the_forum_with_the_forums_answer_are_used():
    assert problem("openmath", openmath()) == ("1+1?", "2")
    assert reason("openmath", openmath(problem_type="converted_proof")) == "proof"
    assert reason("openmath", openmath(problem_type="no_answer_extracted")) == "no_answer"
    assert reason("openmath", openmath(problem_source="MATH_training_set")) == "not_aops"


def test_a_solution_of_gsm8k_without_its_mark_has_no_answer():
    assert reason("gsm8k", {"question": "1+1?", "answer": "2"}) == "no_answer"


def test_the_options_of_gpqa_are_shuffled_by_seed_and_the_answer_is_the_right_ones_letter():
    orders = set()
    for seed in range(20):
        question, letter = problem("gpqa", GPQA, seed=seed)
        assert problem("gpqa", GPQA, seed=seed) == (question, letter)
        lines = question.splitlines()
        assert lines[0] == "Which is it?"
        assert lines[2 + "ABCD".index(letter)] == f"{letter}. right"
        assert {line[3:] for line in lines[2:6]} == {"right", "one", "two", "three"}
        orders.add(tuple(lines[2:6]))
    assert len(orders) > 5


def test_the_right_letters_of_gpqa_are_spread():
    letters = [SETS["gpqa"].convert(GPQA, Place(id=f"g-{n}", index=n)).answer for n in range(400)]
    assert all(70 <= letters.count(letter) <= 130 for letter in "ABCD")


@pytest.mark.parametrize(
    ("name", "row", "field"),
    [
        ("dapo", {"question": "1+1?"}, "prompt"),
        ("dapo", {"prompt": "1+1?", "reward_model": {"style": "rule"}}, "ground_truth"),
        ("dapo", {"prompt": [{"role": "user"}], "solution": "2"}, "prompt"),
        ("openmath", openmath(problem_type=None), "problem_type"),
        ("math500", {"problem": ["1+1?"], "answer": "2"}, "problem"),
        ("aime24", {"problem": "1+1?", "answer": True}, "answer"),
        ("gpqa", {**GPQA, "Correct Answer": None}, "Correct Answer"),
        ("glaive", {"conversations": "hello"}, "conversations"),
        ("glaive", {"conversations": [{"from": "robot", "value": "hello"}]}, "robot"),
        ("toolace", {"conversations": [{"from": "user", "value": 3}], "system": ""}, "conversations"),
        ("magicoder", {"problem": "Write it."}, "solution"),
        ("tulu_if", {"messages": None}, "messages"),
        ("nemotron_chat", {"input": [], "answer": "x"}, "output"),
    ],
)
def test_a_row_without_its_columns_is_refused_by_field(name, row, field):
    with pytest.raises(WrongField, match=field):
        read(name, row)


# Conversations


CLOCK = {"name": "clock", "description": "Tells the time.", "parameters": {"type": "dict", "properties": {}}}
SHOWN = [{"type": "function", "function": {**CLOCK, "parameters": {"type": "object", "properties": {}}}}]
CALL = '{"name": "clock", "arguments": {}}'


def sharegpt(*turns, **fields):
    return {
        "conversations": [{"from": role, "value": text} for role, text in turns],
        "tools": json.dumps([CLOCK]),
        **fields,
    }


def test_calls_and_replies_become_messages():
    row = sharegpt(
        ("human", "Time?"),
        ("gpt", "I look."),
        ("function_call", CALL),
        ("observation", "12"),
        ("function_call", f"[{CALL}, {CALL}]"),
        ("observation", "12"),
        ("observation", "13"),
        ("gpt", "Noon."),
        ("human", "Thanks!"),
        system="Be brief.",
    )
    found = conversation("apigen", row)
    assert texts(found) == [
        ("system", "Be brief."),
        ("user", "Time?"),
        ("assistant", "I look."),
        ("tool", "12"),
        ("assistant", ""),
        ("tool", "12"),
        ("tool", "13"),
        ("assistant", "Noon."),
    ]
    assert calls(found.messages[2]) == [("clock", {})]
    assert calls(found.messages[4]) == [("clock", {})] * 2
    assert json.loads(found.tools) == SHOWN


def test_a_conversation_without_tools_shows_none():
    found = conversation("glaive", sharegpt(("human", "Hi"), ("gpt", "Hello"), tools="[]"))
    assert (texts(found), found.tools) == ([("user", "Hi"), ("assistant", "Hello")], "")


def test_arguments_that_are_json_text_are_read():
    row = sharegpt(("human", "Time?"), ("function_call", '{"name": "clock", "arguments": "{\\"zone\\": 1}"}'))
    assert calls(conversation("glaive", row).messages[1]) == [("clock", {"zone": 1})]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([("human", "Hi")], "no_last_answer"),
        ([("human", "Hi"), ("function_call", CALL), ("observation", "12")], "no_last_answer"),
        ([("gpt", "Hello")], "bad_order"),
        ([("human", "Hi"), ("observation", "12"), ("gpt", "Noon.")], "bad_order"),
        ([("human", "Hi"), ("gpt", "Hello"), ("gpt", "Hello?")], "bad_order"),
        ([("human", "Hi"), ("function_call", CALL), ("human", "Well?"), ("gpt", "Noon.")], "bad_order"),
        ([("human", "Hi"), ("function_call", CALL), ("gpt", "Noon.")], "bad_order"),
        ([("human", "Hi"), ("gpt", " ")], "empty_turn"),
        ([("human", "Hi"), ("function_call", "clock()")], "bad_call"),
        ([("human", "Hi"), ("function_call", '{"name": "clock"}')], "bad_call"),
        ([("human", "Hi"), ("function_call", '{"name": "clock", "arguments": [1]}')], "bad_call"),
        ([("human", "Hi"), ("function_call", "[]")], "bad_call"),
        ([("human", "Hi"), ("function_call", '{"name": "watch", "arguments": {}}')], "unknown_tool"),
    ],
)
def test_what_is_no_conversation_is_dropped(turns, expected):
    assert reason("glaive", sharegpt(*turns)) == expected


@pytest.mark.parametrize("tools", ["{", '{"name": "clock"}', '[{"description": "nameless"}]', "[3]"])
def test_tools_that_cannot_be_shown_are_dropped(tools):
    assert reason("glaive", sharegpt(("human", "Hi"), ("gpt", "Hello"), tools=tools)) == "bad_tools"


def toolace(*turns, tools=(CLOCK,)):
    system = f"You may call functions: {json.dumps(list(tools))}. Call them as [name(argument=value)]."
    return {"system": system, "conversations": [{"from": role, "value": text} for role, text in turns]}


def test_calls_of_toolace_are_read_as_python_writes_them():
    tools = [CLOCK, {**CLOCK, "name": "Market Trends API"}]
    text = '[Market Trends API(kind="A, (B)", most=3, deep={"x": [1, None, true]}), clock()]'
    row = toolace(("user", "Go"), ("assistant", text), ("tool", "[1]"), ("assistant", "Done."), tools=tools)
    found = conversation("toolace", row)
    assert texts(found) == [("user", "Go"), ("assistant", ""), ("tool", "[1]"), ("assistant", "Done.")]
    expected = {"kind": "A, (B)", "most": 3, "deep": {"x": [1, None, True]}}
    assert calls(found.messages[1]) == [("Market Trends API", expected), ("clock", {})]


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[clock]",
        "[clock(]",
        "[clock(1)]",
        "[clock(x=y)]",
        "[clock(**z)]",
        "[clock() clock()]",
        "[clock()",
        "[(x=1)]",
    ],
)
def test_what_is_no_call_of_toolace_is_dropped(text):
    with pytest.raises(Unusable):
        python_calls(text)
    assert reason("toolace", toolace(("user", "Go"), ("assistant", text))) == "bad_call"


def test_python_calls_read_what_python_writes():
    rng = random.Random(0)
    for _ in range(200):
        values = [rng.choice([1, -2.5, "a)b", 'q"', None, True, [1, {"k": "]"}], {}]) for _ in range(rng.randrange(4))]
        arguments = {f"x{at}": value for at, value in enumerate(values)}
        written = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        calls_read = python_calls(f"[f g({written}), h({written})]")
        assert [json.loads(call["function"]["arguments"]) for call in calls_read] == [arguments] * 2


def magicoder(solution, **fields):
    return {"lang": "python", "problem": "Add two numbers.", "solution": solution, **fields}


def test_a_solution_of_magicoder_becomes_a_call_of_the_protocols_python_tool():
    found = conversation("magicoder", magicoder("Here:\n```python\nprint(1 + 2)\n```\nIt prints 3."))
    assert calls(found.messages[-1]) == [(REPORT.tool_name, {"code": "print(1 + 2)", "input": ""})]
    assert found.messages[0] == {"role": "user", "content": "Add two numbers."}
    [tool] = json.loads(found.tools)
    assert tool["function"]["name"] == REPORT.tool_name


def test_solutions_that_are_not_one_python_program_are_dropped():
    assert reason("magicoder", magicoder("```rust\nfn main() {}\n```", lang="rust")) == "not_python"
    assert reason("magicoder", magicoder("```python\nprint(\n```")) == "not_python"
    assert reason("magicoder", magicoder("No code.")) == "not_one_program"
    assert reason("magicoder", magicoder("```python\n1\n```\n```python\n2\n```")) == "not_one_program"
    assert reason("magicoder", magicoder("```python\n1\n```\n```bash\nls\n```")) == "not_one_program"


def test_instructions_of_tulu_are_read_as_they_are():
    said = [{"role": "user", "content": "In lower case."}, {"role": "assistant", "content": "yes."}]
    assert texts(conversation("tulu_if", {"id": "1", "prompt": "", "messages": said, "constraints": []})) == [
        ("user", "In lower case."),
        ("assistant", "yes."),
    ]


def nemotron(**fields):
    said = [{"role": "user", "content": "Hi"}]
    return {"input": said, "output": "Hello", "category": "chat", "reasoning": "off", "system_prompt": "", **fields}


def test_chat_of_nemotron_is_used_without_thinking():
    assert texts(conversation("nemotron_chat", nemotron())) == [("user", "Hi"), ("assistant", "Hello")]
    assert texts(conversation("nemotron_chat", nemotron(input="Hi", system_prompt="Be kind."))) == [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Hello"),
    ]
    assert reason("nemotron_chat", nemotron(reasoning="on")) == "reasoning"
    assert reason("nemotron_chat", nemotron(output="<think>\n</think>Hello")) == "reasoning"
    assert reason("nemotron_chat", nemotron(category="math")) == "not_chat"
