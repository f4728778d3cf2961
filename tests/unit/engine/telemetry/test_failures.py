"""What could not be graded is said where the user looks, and is never a reward of 0."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from engine.commands.rollouts import panel
from engine.console.display import Display
from engine.stages.empty_batches import NothingToTrain, check_graded
from engine.telemetry import metrics
from engine.telemetry.failures import CAUSES, failures, summed_up
from engine.types import Boundary, Group, RolloutError
from tests.support.fakes import a_prompt, a_rollout, a_trajectory

SERVICE = RolloutError(boundary=Boundary.REWARD, message="service says 503")
LOST = RolloutError(boundary=Boundary.SANDBOX, message="no\x1b[2J host\nis left")


def members(*errors):
    return [a_trajectory(n, error=error, reward=None if error else 1.0) for n, error in enumerate(errors)]


def test_failures_are_counted_by_cause_with_the_first_of_each():
    found = failures(members(None, SERVICE, LOST, replace(SERVICE, message="again"), SERVICE))
    told = [(one.boundary, one.count, one.sample) for one in found]
    assert told == [("reward", 2, 1), ("sandbox", 1, 2), ("reward", 1, 3)]
    line = summed_up(found, 5)
    assert line.startswith("4 of 5 failed: reward: service says 503 (2); sandbox: no")
    assert line.isprintable()
    assert summed_up([], 5) == ""


def test_messages_that_differ_in_numbers_are_one_cause_and_many_causes_are_a_few():
    timed_out = [replace(SERVICE, message=f"no answer after {n}.5 s from 0x{n:x}") for n in range(9)]
    [one] = failures(members(*timed_out))
    assert (one.count, one.message) == (9, "no answer after 0.5 s from 0x0")
    other = [replace(SERVICE, message=chr(ord("a") + n)) for n in range(9)]
    assert [one.count for one in failures(members(*other))] == [1] * CAUSES + [9 - CAUSES]


class Fleet:
    """Stands for a fleet without replicas."""

    live, last = (), {}

    class config:
        replicas = 0


PACE = {"time/learn_s": 0.1, "time/sync_s": 0.1, "time/step_s": 1.0, "time/rollout_s": 0.8}
RATES = {"tokens/per_s": 1.0, "tools/calls_per_s": 0.0}


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_step_line_has_a_dash_and_says_what_failed(is_terminal):
    everyone = members(SERVICE, SERVICE)
    group = Group(prompt=a_prompt(), trajectories=tuple(everyone), lease=0, drop="error")
    found = metrics.step([group], 0) | PACE | RATES
    out = io.StringIO()
    console = Console(file=out, width=300, force_terminal=is_terminal, _environ={"TERM": "xterm"})
    with Display("run", 1, Fleet(), console) as display:
        display.step(1, found, failed=summed_up(failures(everyone), 2))
    said = out.getvalue()
    assert "2 of 2 failed: reward: service says 503" in said
    assert "0.000" not in said


def test_rollouts_say_what_failed():
    [lost] = members(LOST)
    out = io.StringIO()
    Console(file=out, width=200).print(panel(a_rollout(lost, drop="error")))
    assert "no grade" in out.getvalue()
    assert "sandbox: no" in out.getvalue()
    assert "\x1b" not in out.getvalue()


GRADED, NOT = {"reward": 0.0}, {}


@pytest.mark.parametrize(
    ("steps", "is_well"),
    [
        ([], True),
        ([GRADED], True),
        ([NOT], False),
        ([NOT, NOT], False),
        ([GRADED, NOT], True),
        ([GRADED, NOT, NOT, NOT], False),
        ([NOT, NOT, NOT, GRADED], True),
    ],
)
def test_a_run_whose_last_steps_could_not_be_graded_has_not_ended_well(steps, is_well):
    if is_well:
        check_graded(steps)
        return
    with pytest.raises(NothingToTrain, match=f"of {len(steps)} steps"):
        check_graded(steps)
