"""The tiny task: splits that share no arithmetic, and demonstrations that say what a real run would say."""

import itertools
import json
import re
import traceback

import pytest

from recipes.tiny.task import Mix, Problem, demonstrations, problems, prompts


def take(stream, n):
    return list(itertools.islice(stream, n))


def test_splits_share_no_arithmetic_and_one_in_ten_is_for_testing():
    train, test = take(problems("train", 0), 3000), take(problems("test", 0), 3000)
    assert {(p.first, p.steps) for p in train}.isdisjoint({(p.first, p.steps) for p in test})
    assert {p.split for p in train} == {"train"}
    assert {p.split for p in test} == {"test"}
    everything = [Problem(first=a, steps=(("+", b),), question="") for a in range(10, 100) for b in range(10, 100)]
    assert 0.08 < sum(p.split == "test" for p in everything) / len(everything) < 0.12


def test_problems_depend_on_split_and_seed_only():
    assert take(problems("train", 7), 50) == take(problems("train", 7), 50)
    assert take(problems("train", 7), 50) != take(problems("train", 8), 50)
    assert take(problems("train", 7), 50) != take(problems("test", 7), 50)


def test_answers_are_whole_numbers_in_range_and_questions_hold_the_numbers():
    for problem in take(problems("train", 1), 2000):
        assert 1 <= problem.answer <= 99_999
        assert len(problem.steps) in (2, 3)
        numbers = [problem.first, *(n for _, n in problem.steps)]
        assert [int(digits) for digits in re.findall(r"\d+", problem.question)] == numbers


def test_answer_of_a_known_problem():
    assert Problem(first=63, steps=(("+", 43), ("//", 8)), question="").answer == 13
    assert Problem(first=10, steps=(("-", 9), ("*", 7)), question="").answer == 7


def test_prompts_carry_unique_ids_and_the_answer():
    few = take(prompts("test", 0), 100)
    assert len({prompt.id for prompt in few}) == 100
    assert [prompt.answer for prompt in few] == [str(problem.answer) for problem in take(problems("test", 0), 100)]
    assert few[0].messages[0]["role"] == "user"


def kind(demonstration):
    if len(demonstration) == 2:
        return "head"
    return "err" if len(demonstration) > 4 else "clean"


def test_demonstrations_follow_the_mix_and_never_touch_test_problems():
    mix = Mix(head=0.5, clean=0.2, err=0.3)
    demos = take(demonstrations(mix, 3), 3000)
    kinds = [kind(demo) for demo in demos]
    for name in ("head", "clean", "err"):
        assert abs(kinds.count(name) / len(kinds) - getattr(mix, name)) < 0.03
    train = {problem.question for problem in take(problems("train", 3), 3000)}
    assert {demo[0]["content"] for demo in demos} == train


def test_clean_demonstrations_answer_what_the_tool_printed_and_half_the_divisions_are_sloppy():
    sloppy = exact = 0
    for _, call, reply, last in take(demonstrations(Mix(head=0, clean=1, err=0), 0), 500):
        assert f"\\boxed{{{reply['content']}}}" in last["content"]
        code = json.loads(re.search("<tool_call>(.*)</tool_call>", call["content"])[1])["arguments"]["code"]
        exact += code.count("//")
        sloppy += code.replace("//", "").count("/")
    assert 0.4 < sloppy / (sloppy + exact) < 0.6


def test_failed_calls_read_as_a_real_interpreter_reports_them():
    seen, malformed = {}, 0
    demos = take(demonstrations(Mix(head=0, clean=0, err=1), 0), 400)
    for demo in demos:
        body = re.search("<tool_call>(.*)</tool_call>", demo[1]["content"])[1]
        if not body.endswith("}}"):
            malformed += 1
            with pytest.raises(json.JSONDecodeError) as caught:
                json.loads(body)
            assert demo[2]["content"] == f"FormatError: {caught.value.msg}"
        else:
            seen.setdefault(demo[2]["content"], json.loads(body)["arguments"]["code"])
        assert re.fullmatch(r"[\d.e+]+", demo[4]["content"]), "the second call succeeds"
    assert 0.08 < malformed / len(demos) < 0.22
    assert len(seen) == 3
    for reply, code in seen.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011 (reply says which)
            exec(code, {})
        assert "".join(traceback.format_exception_only(caught.value)).splitlines()[-1] == reply


def test_a_mix_that_does_not_add_up_is_refused():
    with pytest.raises(ValueError, match="add up to 1"):
        Mix(head=0.5, clean=0.2, err=0.2)
