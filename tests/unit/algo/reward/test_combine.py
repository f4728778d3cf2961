"""Weighted sums, monitors and rewards by name: what is summed, what is only looked at, what fails a trajectory."""

import asyncio
from dataclasses import replace

import pytest

from algo.reward.combine import ByName, EachAlone, GroupByName, Weighted, WeightedGroup
from engine import contracts
from engine.errors import BadInput
from engine.ports import Grade, GraderUnavailable
from engine.stages.grading import graded, graded_together
from engine.telemetry.noted_warnings import noted_warnings
from engine.telemetry.timeline import Timeline
from tests.support.fakes import Clock, a_prompt, a_trajectory

GROUP = [a_trajectory(0), a_trajectory(1, sampled=9)]


def gives(value):
    """value: what is answered, or an error."""

    async def reward(trajectory):
        if isinstance(value, BaseException):
            raise value
        return value

    return reward


async def hangs(trajectory):
    await asyncio.Event().wait()


async def lengths(trajectory):
    return float(trajectory.sampled_tokens)


class Together:
    sees_group = True

    def __init__(self, *grades):
        self.grades = grades

    async def __call__(self, trajectories):
        if isinstance(self.grades[0], Exception):
            raise self.grades[0]
        return self.grades


GONE = GraderUnavailable("the judge died")


async def test_a_weighted_sum_has_its_parts_as_scores():
    judge = gives(Grade(reward=0.5, scores={"tokens": 80.0}))
    reward = Weighted({"correct": (1.0, gives(1.0)), "style": (0.5, judge), "tokens": (-0.1, lengths)})
    assert await reward(a_trajectory()) == Grade(
        reward=1.0 + 0.25 - 0.4, scores={"correct": 1.0, "style": 0.5, "style/tokens": 80.0, "tokens": 4.0}
    )
    await contracts.check_reward(reward, GROUP)


async def test_a_part_that_cannot_grade_leaves_no_reward():
    reward = Weighted({"correct": (1.0, gives(1.0)), "style": (0.5, gives(GONE))})
    with pytest.raises(GraderUnavailable, match="the judge died"):
        await reward(a_trajectory())


@pytest.mark.parametrize("monitor", [gives(GONE), hangs])
async def test_a_monitor_that_fails_or_hangs_is_a_missing_score_and_changes_nothing_else(monitor):
    reward = Weighted({"correct": (1.0, gives(1.0)), "style": (0.0, monitor)}, monitor_s=0.01)
    found = await graded(a_trajectory(), reward, Timeline(Clock()))
    assert (found.reward, found.error, found.scores) == (1.0, None, {"correct": 1.0, "style": None})


async def test_a_monitor_is_looked_at_and_not_summed():
    reward = Weighted({"correct": (1.0, gives(1.0)), "words": (0.0, lengths)})
    assert await reward(a_trajectory()) == Grade(reward=1.0, scores={"correct": 1.0, "words": 4.0})


@pytest.mark.parametrize(
    ("parts", "options", "named"),
    [
        ({"style": (0.0, gives(1.0))}, {}, "style"),
        ({}, {}, "weight"),
        ({"style": (float("nan"), gives(1.0))}, {}, "style"),
        ({"": (1.0, gives(1.0))}, {}, "name"),
        ({"style": (1.0, Together(1.0))}, {}, "WeightedGroup"),
        ({"style": (1.0, gives(1.0))}, {"monitor_s": 0.0}, "monitor_s"),
    ],
)
def test_a_sum_that_means_nothing_is_refused(parts, options, named):
    with pytest.raises(ValueError, match=named):
        Weighted(parts, **options)


async def test_a_sum_may_have_parts_that_see_the_group():
    reward = WeightedGroup(
        {"better": (1.0, Together(0.0, 1.0)), "tokens": (0.1, lengths), "seen": (0.0, Together(5, 6))}
    )
    assert await reward(GROUP) == [
        Grade(reward=pytest.approx(0.4), scores={"better": 0.0, "tokens": 4.0, "seen": 5.0}),
        Grade(reward=pytest.approx(1.9), scores={"better": 1.0, "tokens": 9.0, "seen": 6.0}),
    ]
    await contracts.check_group_reward(WeightedGroup({"tokens": (1.0, lengths)}), [GROUP])


async def test_a_member_without_a_grade_of_one_part_has_no_reward_and_the_others_have():
    reward = WeightedGroup({"better": (1.0, Together(None, 1.0)), "tokens": (0.0, Together(3.0, None))})
    first, second = await graded_together(GROUP, reward, Timeline(Clock()))
    assert (first.reward, first.error is None) == (None, False)
    assert (second.reward, second.scores) == (1.0, {"better": 1.0, "tokens": None})


async def test_a_part_that_gives_too_few_grades_is_a_bug():
    with pytest.raises(ValueError, match="'better' gave 1 grades for 2"):
        await WeightedGroup({"better": (1.0, Together(1.0))})(GROUP)


async def test_graded_alone_the_reason_is_told_when_nobody_could_be():
    async def second_only(trajectory):
        if trajectory.sample == 0:
            raise GONE
        return 1.0

    assert await EachAlone(second_only)(GROUP) == [None, 1.0]
    with pytest.raises(GraderUnavailable, match="the judge died"):
        await EachAlone(gives(GONE))(GROUP)
    with pytest.raises(LookupError):
        await EachAlone(gives(LookupError("a bug")))(GROUP)


def named(name, sample=0):
    return a_trajectory(sample, prompt=replace(a_prompt(), reward=name))


async def test_a_prompt_names_its_reward():
    reward = ByName({"": gives(1.0), "code": gives(2.0)})
    assert [await reward(named(name)) for name in ("", "code")] == [1.0, 2.0]
    await contracts.check_reward(reward, GROUP)


async def test_a_reward_that_is_not_there_is_refused_with_the_prompt():
    for reward, given in (
        (ByName({"code": gives(1.0)}), named("maths")),
        (GroupByName({"code": lengths}), [named("maths")]),
    ):
        with pytest.raises(BadInput, match=r"prompt p0: no reward 'maths' .*'code'"):
            await reward(given)
    with pytest.raises(ValueError, match="GroupByName"):
        ByName({"code": Together(1.0)})


async def test_a_prompt_may_name_a_reward_that_sees_the_group():
    reward = GroupByName({"": lengths, "better": Together(0.0, 1.0)})
    assert await reward(GROUP) == [4.0, 9.0]
    assert await reward([named("better", 0), named("better", 1)]) == (0.0, 1.0)
    await contracts.check_group_reward(reward, [GROUP])


@pytest.mark.parametrize(
    "monitor",
    [
        gives(ValueError("a bug")),
        gives(None),
        gives("no number"),
        gives({"score": 1.0}),
        gives(float("nan")),
        gives(asyncio.CancelledError()),
        gives(TimeoutError("of its own")),
        Together(KeyError("x")),
        Together(1.0, 2.0, 3.0),
    ],
)
async def test_a_monitor_with_a_bug_changes_nothing(monitor):
    reward = WeightedGroup({"correct": (1.0, gives(1.0)), "look": (0.0, monitor), "tokens": (0.0, lengths)})
    for _ in range(2):
        grades = await graded_together(GROUP, reward, Timeline(Clock()))
        assert [member.reward for member in grades] == [1.0, 1.0]
        assert [member.scores["look"] for member in grades] == [None, None]
        assert [member.scores["tokens"] for member in grades] == [4.0, 9.0]


async def test_scores_of_a_monitor_that_are_no_numbers_are_left_out():
    monitor = gives(Grade(reward=1.0, scores={"good": 2.0, "bad": float("inf")}))
    grade = await Weighted({"correct": (1.0, gives(1.0)), "look": (0.0, monitor)})(a_trajectory())
    assert grade.scores == {"correct": 1.0, "look": 1.0, "look/good": 2.0}


async def test_the_first_bug_of_a_monitor_is_noted():
    notes = []
    reward = Weighted({"correct": (1.0, gives(1.0)), "look": (0.0, gives(KeyError("column")))})
    with noted_warnings(notes.append):
        for _ in range(3):
            await reward(a_trajectory())
    [note] = notes
    assert "look" in note
    assert "KeyError" in note
    await reward(a_trajectory())
    assert len(notes) == 1


async def test_a_part_that_counts_may_not_have_a_bug():
    with pytest.raises(KeyError):
        await Weighted({"correct": (1.0, gives(KeyError("column")))})(a_trajectory())
