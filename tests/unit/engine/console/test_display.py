import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from engine.console.display import SOLVED_STEPS, Display
from engine.replica.port import KvSample


def test_a_dumb_terminal_gets_a_line_per_step(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    written = io.StringIO()
    with Display("a run", 10, None, Console(file=written, force_terminal=True, width=100)) as display:
        display.phase("training")
        assert written.getvalue().startswith("training")


def test_each_replica_is_shown_with_its_kv_use_or_as_down():
    fleet = SimpleNamespace(config=SimpleNamespace(replicas=3), live=[0, 2], last={0: KvSample(100, 0, 0, 0)})
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100, color_system=None)
    with Display("a run [/b]", 10, fleet, console) as display:
        display.redraw()  # all that is free at the start is what the replica can use
        fleet.last[0] = KvSample(25, 7, 0, 0)
        display.phase("training")
        display.step(1, {"eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6, "eval/n": 64})
    lines = [line.strip("│ ") for line in written.getvalue().splitlines()]
    assert any(line.startswith("replica 0 KV") and line.endswith("75%  7 running") for line in lines)
    assert "a run [/b]" in written.getvalue()
    assert "replica 1  down" in lines
    assert not any(line.startswith("replica 2") for line in lines), "it serves, and has not stepped yet"
    assert "held-out accuracy  0.500  [0.400, 0.600]  n=64" in lines


def test_what_limits_the_run_is_a_line_of_the_live_view_only():
    fleet = SimpleNamespace(config=SimpleNamespace(replicas=0), live=[], last={})
    for live in (True, False):
        written = io.StringIO()
        console = Console(file=written, force_terminal=live, width=100, color_system=None)
        with Display("a run", 10, fleet, console) as display:
            display.limit("Tools limit this run [at last].")
        assert ("Tools limit this run [at last]." in written.getvalue()) == live


STEP = {"reward": 0.5, "tools/error_share_correct": 0.1, "tokens/goodput": 0.5, "time/learn_s": 1.0, "time/sync_s": 0.5}
STEP |= {"groups/all": 16, "groups/flat": 12, "groups/solved": 4}
PACE = {"tokens/per_s": 1234.0, "tools/calls_per_s": 56.0, "time/step_s": 4.0, "time/rollout_s": 2.5}


def lines_of(*steps, live):
    """What is written of a run with these steps, on a terminal or into a file."""
    fleet = SimpleNamespace(config=SimpleNamespace(replicas=0), live=[], last={})
    written = io.StringIO()
    console = Console(file=written, force_terminal=live, width=100, color_system=None)
    with Display("a run", 10, fleet, console) as display:
        for step, metrics in enumerate(steps, 1):
            display.step(step, metrics)
    return [line.strip("│ ") for line in written.getvalue().splitlines()]


@pytest.mark.parametrize("live", [True, False])
def test_a_distillation_shows_how_far_the_student_is_from_its_teacher(live):
    text = "\n".join(lines_of({**STEP, **PACE, "distill/kl": 1.234}, live=live))
    assert "KL to the teacher" in text
    assert "1.234" in text
    assert "KL to the teacher" not in "\n".join(lines_of({**STEP, **PACE}, live=live))


@pytest.mark.parametrize("live", [True, False])
def test_flat_groups_are_shown(live):
    assert any("12 of 16" in line for line in lines_of(STEP | PACE, live=live))


@pytest.mark.parametrize("live", [True, False])
def test_a_hint_is_given_when_nearly_all_groups_were_solved_for_several_steps(live):
    solved, unsolved = ({**STEP, **PACE, "groups/flat": 14, "groups/solved": number} for number in (14, 0))
    for steps, hinted in (
        ([solved] * (SOLVED_STEPS - 1), False),
        ([solved] * (SOLVED_STEPS + 2), True),
        ([unsolved] * (SOLVED_STEPS + 2), False),
        ([*[solved] * (SOLVED_STEPS - 1), unsolved, solved], False),
    ):
        hints = [line for line in lines_of(*steps, live=live) if "stop_flat_after" in line]
        assert (bool(hints) if live else len(hints)) == hinted, "a file gets it once"


@pytest.mark.parametrize("live", [True, False])
def test_a_step_without_rates_shows_none_not_even_those_of_the_step_before(live):
    text = "\n".join(lines_of(STEP | PACE, STEP | {"rollout/trajectories_resumed": 7}, live=live)[0 if live else 1 :])
    assert "tokens/s" not in text
    assert "7 trajectories" in text


def test_a_step_is_one_line_of_a_file():
    [line] = lines_of(STEP | PACE, live=False)
    assert "1,234 tokens/s" in line
    assert "step   1" in line


@pytest.mark.parametrize("live", [True, False])
def test_the_steps_of_a_run_that_an_older_version_began_are_shown(live):
    old = {name: value for name, value in (STEP | PACE).items() if not name.startswith("groups/all")}
    assert any("0.500" in line for line in lines_of(old, live=live))
