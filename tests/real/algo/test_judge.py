"""A judge that is slow, broken, expensive or confused is an error of ours, and never a reward."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from algo.reward.combine import Weighted
from algo.reward.judge import Judge, PairwiseJudge, RankingJudge
from algo.reward.judge_endpoint import JudgeConfig, judge_endpoint
from engine import contracts
from engine.atomic_files import CannotWrite
from engine.ports import Grade, GraderUnavailable
from engine.stages.grading import graded
from engine.telemetry.timeline import Timeline
from tests.support.fakes import Clock, Gate, a_prompt, a_trajectory, settle
from tests.support.judge_server import CLOSE, HANG, JudgeServer

GOOD = '{"score": 0.75}'


def says(text, sample=0, prompt=None):
    trajectory = a_trajectory(sample, prompt=prompt or a_prompt())
    return replace(trajectory, text=f"{text}<|im_end|>", end_of_turn="<|im_end|>")


class Waits:
    """Stands for asyncio.sleep."""

    def __init__(self):
        self.seconds = []

    async def __call__(self, seconds):
        self.seconds.append(seconds)


@asynccontextmanager
async def judged(*answers, file=None, server=None, tokens=10, **options):
    """(the endpoint, the server behind it, the waits between tries)."""
    waits = Waits()
    async with (server or JudgeServer(*answers, tokens=tokens)).serving() as server:
        config = JudgeConfig(**{"url": server.url, "model": "judge", "request_s": 5.0, **options})
        async with judge_endpoint(config, file, sleep=waits) as endpoint:
            yield endpoint, server, waits


async def test_a_judge_sees_question_reference_and_answer_and_its_score_is_the_reward():
    async with judged(GOOD) as (endpoint, server, _):
        assert await Judge(endpoint)(says("It is 42.")) == Grade(reward=0.75, scores={"judge_tokens": 10.0})
        [question] = server.questions
        assert all(part in question for part in ("What is 6 * 7?", "\n42\n", "It is 42.\n", '{"score": 0.5}'))
        assert "<|im_end|>" not in question
        assert (await Judge(endpoint, passing=0.5)(says("It is 42."))).reward == 0.25
        await contracts.check_reward(Judge(endpoint), [says("a"), says("b")])


async def test_what_an_answer_says_is_not_taken_for_a_placeholder():
    async with judged(GOOD) as (endpoint, server, _):
        judge = Judge(endpoint, template="{answer} | {reference} | {other} {first}", answer_chars=30)
        await judge(says("{reference}"))
        await judge(says("x" * 500))
    assert server.questions[0] == "{reference} | 42 | {other} {first}"
    assert re.fullmatch(r"x+\n\[\.\.\.\]\nx+ \| 42 \| \{other\} \{first\}", server.questions[1])
    assert len(server.questions[1]) < 60
    with pytest.raises(ValueError, match="answer"):
        Judge(endpoint, template="no place for it")


@pytest.mark.parametrize(
    "trouble",
    [
        (500, {}, "{}"),
        (429, {}, "{}"),
        (503, {}, "busy"),
        pytest.param(CLOSE, id="closed"),
        (200, {}, "no JSON"),
        (200, {}, '{"choices": []}'),
        (200, {}, "[]"),
        '{"score": 2}',
        "I like it",
    ],
    ids=str,
)
async def test_what_fails_once_is_asked_again(trouble):
    async with judged(trouble, GOOD) as (endpoint, server, _):
        assert (await Judge(endpoint)(says("x"))).reward == 0.75
        assert len(server.questions) == endpoint.counts["requests"] == 2


async def test_what_fails_always_is_unavailable_and_names_the_judge_and_the_cause():
    for trouble, cause in (((500, {}, "{}"), "500"), ("I like it", "I like it"), ((429, {}, "{}"), "429")):
        async with judged(trouble, tries=3) as (endpoint, server, _):
            with pytest.raises(GraderUnavailable) as caught:
                await Judge(endpoint)(says("x"))
            assert all(part in str(caught.value) for part in (server.url, "judge", cause, "3"))
            assert len(server.questions) == 3


async def test_waits_grow_and_a_server_may_say_when_to_come_back():
    async with judged((500, {}, ""), backoff_s=0.5, tries=4) as (endpoint, _, waits):
        with pytest.raises(GraderUnavailable):
            await Judge(endpoint)(says("x"))
    assert waits.seconds == [0.5, 1.0, 2.0]
    async with judged((429, {"Retry-After": "7"}, ""), (429, {"Retry-After": "900"}, ""), GOOD) as (endpoint, _, waits):
        await Judge(endpoint)(says("x"))
    assert waits.seconds == [7.0, 30.0]


async def test_a_judge_that_hangs_is_given_up_and_asked_again():
    async with judged(HANG, GOOD, request_s=0.2) as (endpoint, server, _):
        assert (await Judge(endpoint)(says("x"))).reward == 0.75
        assert len(server.questions) == 2


async def test_a_judge_that_nobody_is_behind_is_unavailable():
    async with judged(GOOD) as (_, server, _):
        pass
    config = JudgeConfig(url=server.url, model="judge", tries=2)
    async with judge_endpoint(config, sleep=Waits()) as endpoint:
        found = await graded(says("x"), Judge(endpoint), Timeline(Clock()))
    assert found.reward is None
    assert "APIConnectionError" in found.error.message


async def test_a_key_that_is_refused_is_not_tried_again_and_never_shown(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-secret")
    refusal = (401, {}, json.dumps({"error": {"message": "no such key: sk-secret"}}))
    async with judged(refusal, key_variable="JUDGE_KEY") as (endpoint, server, _):
        with pytest.raises(GraderUnavailable, match="401") as caught:
            await Judge(endpoint)(says("x"))
        assert server.keys == ["Bearer sk-secret"]
        assert "sk-secret" not in f"{caught.value} {caught.value.__cause__} {endpoint.config}"


async def test_the_budget_of_requests_is_never_exceeded_and_is_named_when_it_is_spent():
    async with judged((500, {}, ""), max_requests=5) as (endpoint, server, _):
        async with asyncio.TaskGroup() as tasks:
            for number in range(9):
                tasks.create_task(graded(says(f"x{number}"), Judge(endpoint), Timeline(Clock())))
        assert len(server.questions) == 5
        with pytest.raises(GraderUnavailable, match="max_requests=5"):
            await Judge(endpoint)(says("another"))


async def test_a_budget_of_tokens_is_named_when_it_is_spent():
    async with judged(GOOD, max_total_tokens=20) as (endpoint, server, _):
        judge = Judge(endpoint)
        assert [(await judge(says(text))).scores for text in ("a", "b")] == [{"judge_tokens": 10.0}] * 2
        with pytest.raises(GraderUnavailable, match="max_total_tokens=20"):
            await judge(says("c"))
        assert (await judge(says("a"))).reward == 0.75, "what was paid for is there"
        assert len(server.questions) == 2


class Both:
    """Requests that wait until two of them are there, and then for a third one that must not come."""

    def __init__(self):
        self.there = 0
        self.both = asyncio.Event()

    async def passed(self):
        self.there += 1
        if self.there == 2:
            self.both.set()
        await self.both.wait()
        await settle(100)


async def test_so_many_requests_are_in_flight():
    server = JudgeServer(GOOD)
    server.gate = Both()
    async with judged(server=server, in_flight=2) as (endpoint, _, _), asyncio.TaskGroup() as tasks:
        for number in range(6):
            tasks.create_task(Judge(endpoint)(says(f"x{number}")))
    assert (server.most, len(server.questions)) == (2, 6)


async def test_the_same_answer_is_paid_for_once_also_when_it_comes_twice_at_once():
    server = JudgeServer(GOOD)
    server.gate = Gate()
    async with judged(server=server) as (endpoint, _, _):
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(Judge(endpoint)(says("x", sample))) for sample in range(4)]
            await server.gate.started.wait()
            server.gate.release()
        assert [task.result().reward for task in running] == [0.75] * 4
        assert (len(server.questions), endpoint.counts["cached"]) == (1, 3)


async def test_one_that_is_cancelled_leaves_the_question_to_those_that_wait():
    server = JudgeServer(GOOD)
    server.gate = Gate()
    async with judged(server=server) as (endpoint, _, _):
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(Judge(endpoint)(says("x")))
            await server.gate.started.wait()
            second = tasks.create_task(Judge(endpoint)(says("x", 1)))
            await settle()
            first.cancel()
            server.gate.release()
        assert second.result().reward == 0.75


async def test_a_run_that_goes_on_pays_nothing_twice_and_its_budget_goes_on(tmp_path):
    file = tmp_path / "judge.jsonl"
    async with judged("I like it", GOOD, file=file) as (endpoint, _, _):
        await Judge(endpoint)(says("a"))
    with file.open("ab") as torn:
        torn.write(b'{"key": "abc')
    async with judged(GOOD, file=file, max_requests=3) as (endpoint, server, _):
        assert (await Judge(endpoint)(says("a"))).reward == 0.75
        assert server.questions == []
        assert (endpoint.counts["requests"], endpoint.counts["tokens"]) == (2, 20)
        await Judge(endpoint)(says("b"))
        with pytest.raises(GraderUnavailable, match="max_requests=3"):
            await Judge(endpoint)(says("c"))
    assert len(file.read_text().splitlines()) == 6, "three requests and their answers"
    assert all(json.loads(line) for line in file.read_text().splitlines())


async def test_a_request_that_never_returned_counts_in_the_run_that_goes_on(tmp_path):
    file = tmp_path / "judge.jsonl"
    server = JudgeServer(GOOD)
    server.gate = Gate()
    async with judged(server=server, file=file) as (endpoint, _, _):
        task = asyncio.create_task(Judge(endpoint)(says("a")))
        await server.gate.started.wait()
        task.cancel()
        await asyncio.wait([task])
    async with judged(GOOD, file=file, max_requests=1) as (endpoint, _, _):
        with pytest.raises(GraderUnavailable, match="max_requests=1"):
            await Judge(endpoint)(says("a"))


async def test_a_file_that_cannot_be_written_is_named_and_what_else_fails_is_not_blamed_on_it(tmp_path):
    full = tmp_path / "full.jsonl"
    full.symlink_to("/dev/full")
    async with judged(GOOD, file=full) as (endpoint, _, _):
        with pytest.raises(CannotWrite, match=r"full\.jsonl"):
            await Judge(endpoint)(says("a"))

    async def inside():
        async with judged(GOOD, file=tmp_path / "judge.jsonl"):
            raise PermissionError(13, "of something else")

    with pytest.raises(PermissionError):
        await inside()


async def test_only_so_many_answers_are_held():
    async with judged(GOOD, cached=2) as (endpoint, server, _):
        for text in ("a", "b", "c", "c", "a"):
            await Judge(endpoint)(says(text))
    assert len(server.questions) == 4


async def test_as_a_monitor_a_judge_without_budget_is_silent():
    async def right(trajectory):
        return 1.0

    async with judged(GOOD, max_requests=1) as (endpoint, _, _):
        reward = Weighted({"correct": (1.0, right), "style": (0.0, Judge(endpoint))})
        assert (await reward(says("a"))).scores == {"correct": 1.0, "style": 0.75, "style/judge_tokens": 10.0}
        assert await reward(says("b")) == Grade(reward=1.0, scores={"correct": 1.0, "style": None})


# Judges of groups


def numbers(question):
    """The answers of a question, which are numbers, in their order."""
    return [float(found) for found in re.findall(r"# Answer \w+\n(\S+)", question)]


def ranks(question):
    shown = numbers(question)
    return json.dumps({"ranking": sorted(range(1, len(shown) + 1), key=lambda at: -shown[at - 1])})


def compares(question):
    first, second = numbers(question)
    return json.dumps({"better": "A" if first > second else "B"})


def a_group(*texts):
    return [says(text, sample) for sample, text in enumerate(texts)]


async def test_a_ranking_gives_equal_answers_equal_rewards():
    async with judged(ranks) as (endpoint, server, _):
        judge = RankingJudge(endpoint)
        found = await judge(a_group("1", "5", "3", "5"))
        assert [grade.reward for grade in found] == [0.0, 1.0, 0.5, 1.0]
        assert sum(grade.scores["judge_tokens"] for grade in found) == 10.0
        assert [grade.reward for grade in await judge(a_group("7", "7"))] == [0.5, 0.5]
        assert len(server.questions) == 1
        await contracts.check_group_reward(judge, [a_group("1", "2", "3")])


async def test_the_order_of_a_ranking_is_drawn_by_the_prompt_and_not_by_the_samples():
    async with judged(ranks) as (endpoint, server, _):
        judge = RankingJudge(endpoint)
        await judge(a_group(*map(str, range(6))))
        await judge(a_group(*map(str, reversed(range(6)))))
        other = [replace(member, prompt=replace(member.prompt, id="p9")) for member in a_group(*map(str, range(6)))]
        await judge(other)
    orders = [numbers(question) for question in server.questions]
    assert len(orders) == 2, "the same answers of a prompt are the same question"
    assert orders[0] != orders[1]


@pytest.mark.parametrize("ranking", ["[1, 2]", "[1, 2, 2]", "[0, 1, 2]", '["1", "2", "3"]', "3", "[true, 2, 3]"])
async def test_a_ranking_that_is_not_one_is_no_grade(ranking):
    async with judged(f'{{"ranking": {ranking}}}', tries=1) as (endpoint, _, _):
        with pytest.raises(GraderUnavailable, match="ranking"):
            await RankingJudge(endpoint)(a_group("1", "2", "3"))


async def test_comparisons_are_asked_both_ways_round_and_the_share_that_is_won_is_the_reward():
    async with judged(compares) as (endpoint, server, _):
        judge = PairwiseJudge(endpoint)
        found = await judge(a_group("1", "5", "3"))
        assert [grade.reward for grade in found] == [0.0, 1.0, 0.5]
        asked = sorted(tuple(numbers(question)) for question in server.questions)
        assert asked == [(1, 3), (1, 5), (3, 1), (3, 5), (5, 1), (5, 3)]
        await contracts.check_group_reward(judge, [a_group("1", "2", "3")])


async def test_a_judge_that_prefers_a_place_prefers_nobody():
    async with judged('{"better": "A"}') as (endpoint, _, _):
        assert [grade.reward for grade in await PairwiseJudge(endpoint)(a_group("1", "2", "3"))] == [0.5] * 3


@pytest.mark.parametrize(("opponents", "requests"), [(1, 12), (2, 12), (3, 24), (5, 30), (99, 30)])
async def test_each_answer_meets_so_many_others(opponents, requests):
    async with judged(compares) as (endpoint, server, _):
        await PairwiseJudge(endpoint, opponents=opponents)(a_group(*"123456"))
    assert len(server.questions) == requests
    met = [number for question in server.questions for number in numbers(question)]
    assert all(met.count(number) >= 2 * min(opponents, 5) for number in range(1, 7))


async def test_a_comparison_that_fails_does_not_count():
    def partly(question):
        return "no idea" if 9.0 in numbers(question) else compares(question)

    async with judged(partly, tries=1) as (endpoint, _, _):
        found = await PairwiseJudge(endpoint)(a_group("1", "9", "3"))
        assert [grade and grade.reward for grade in found] == [0.0, None, 1.0]
    async with judged("no idea", tries=1) as (endpoint, _, _):
        with pytest.raises(GraderUnavailable, match="no idea"):
            await PairwiseJudge(endpoint)(a_group("1", "9", "3"))
