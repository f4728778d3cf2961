"""One run's pace beside another's: the parts add up, intervals hold what they should, and odd pairs are named."""

import numpy as np
import pytest

from engine.diagnosis.comparison import MORE_TOKENS, SLOWER, compare

CONFIG = {"model": "/a/tiny/agent", "prompts_per_step": 16, "seed": 0, "versions": {"processor": "X, 2 cores"}}


def rows_of(steps=40, seed=0, sampling=1.0, tail=0.3, tokens=9000.0, noise=0.05):
    """Steps of two replicas. sampling, tail: seconds; a step's tokens and its sampling vary with its prompts."""
    random = np.random.default_rng(seed)
    prompts = np.random.default_rng(99).normal(1, 0.1, steps)  # both runs have the same ones
    rows = []
    for index in range(steps):
        busy = sampling * prompts[index] * (1 + noise * random.standard_normal())
        rest = {"idle/long_tail_s": tail * (1 + noise * random.standard_normal()), "idle/staleness_gate_s": 0.4}
        step_s = busy + sum(rest.values())
        row = {"step": index + 1, "time/step_s": step_s, "tokens/generated": tokens * prompts[index]}
        rows.append(row | {"replicas/busy_s": 2 * busy} | {name: 2 * value for name, value in rest.items()})
    return rows


def by_name(compared):
    return {part.name: part for part in compared.parts}


def test_the_parts_add_up_to_the_difference_of_the_runs():
    compared = compare(rows_of(), rows_of(seed=1, sampling=1.2, tail=0.5, tokens=11000), CONFIG, CONFIG)
    assert sum(part.seconds for part in compared.parts) == pytest.approx(compared.b_s - compared.a_s)
    assert compared.total.seconds == pytest.approx(compared.b_s - compared.a_s)


def test_a_longer_tail_is_named_with_an_interval_that_holds_it():
    compared = compare(rows_of(), rows_of(seed=1, tail=0.5), CONFIG, CONFIG)
    tail = by_name(compared)["waits for the last rollouts"]
    assert tail.is_sure
    assert tail.low < 0.2 < tail.high
    assert compared.parts[0] == tail
    assert not by_name(compared)[SLOWER].is_sure
    assert "waiting for the last rollouts" in compared.sentence
    assert not compared.unlike


def test_more_tokens_are_work_and_not_speed():
    compared = compare(rows_of(), rows_of(seed=1, sampling=1.3, tokens=11700.0), CONFIG, CONFIG)
    parts = by_name(compared)
    assert parts[MORE_TOKENS].seconds == pytest.approx(0.3, rel=0.1)
    assert abs(parts[SLOWER].seconds) < 0.03
    assert "+30 % tokens" in compared.sentence


def test_two_tries_of_one_run_seldom_differ():
    sure = [compare(rows_of(seed=n), rows_of(seed=100 + n), CONFIG, CONFIG).total.is_sure for n in range(20)]
    assert sum(sure) <= 4
    compared = compare(rows_of(seed=0), rows_of(seed=100), CONFIG, CONFIG)
    assert compared.sentence.startswith("No sure difference")


def test_steps_that_resemble_their_neighbours_are_fewer_than_they_seem():
    def drifting(seed):
        random, level, rows = np.random.default_rng(seed), 0.0, []
        for index in range(40):
            level = 0.5 * level + 0.08 * random.standard_normal()
            step_s = float(np.exp(level))
            rows.append({"step": index + 1, "time/step_s": step_s, "replicas/busy_s": step_s})
        return rows

    sure = [compare(drifting(seed), drifting(1000 + seed), {}, {}).total.is_sure for seed in range(50)]
    assert sum(sure) <= 5  # 5 % by chance; with steps drawn one by one 12 and more


def test_the_difficulty_of_prompts_that_both_have_does_not_widen_the_interval():
    """Steps differ by 10 % with their prompts, and by 1 % otherwise: of steps drawn apart, 3 % would not be found."""
    compared = compare(rows_of(noise=0.01), rows_of(seed=1, sampling=1.03, noise=0.01), CONFIG, CONFIG)
    assert compared.total.is_sure


def test_the_order_of_the_runs_changes_only_the_signs():
    runs = rows_of(), rows_of(seed=1, sampling=1.4, tokens=12000, tail=0.2)
    one, two = (by_name(compare(*pair, CONFIG, CONFIG)) for pair in (runs, runs[::-1]))
    assert {name: part.seconds for name, part in one.items()} == pytest.approx(
        {name: -part.seconds for name, part in two.items()}
    )


def test_another_machine_model_or_batch_is_said_and_other_options_are_listed():
    other = {**CONFIG, "model": "/b/large", "prompts_per_step": 4, "seed": 1, "lr": 1.0}
    other["versions"] = {"processor": "Y, 64 cores"}
    compared = compare(rows_of(), rows_of(seed=1), CONFIG, other)
    assert [clause.split()[0] for clause in compared.unlike] == ["model", "prompts_per_step", "processor"]
    assert compared.differs == ("lr (none, 1.0)",)
    assert "should not be compared" in compared.sentence


def test_a_copy_of_the_model_in_another_checkout_and_an_option_that_is_new_are_no_reason_against_it():
    old = {name: value for name, value in CONFIG.items() if name != "prompts_per_step"}
    compared = compare(rows_of(), rows_of(), old | {"model": "/elsewhere/agent/"}, CONFIG)
    assert not compared.unlike
    assert len(compared.differs) == 2


def test_few_steps_have_no_interval():
    compared = compare(rows_of(4), rows_of(4, seed=1, tail=0.6), CONFIG, CONFIG)
    assert compared.steps == 3
    assert compared.basis == "3 steps that both runs have, without the first, which warms up"
    assert compared.sentence.startswith("In 3 steps B took ")
    assert "may be chance" in compared.sentence
    assert compared.total.low is None
    assert all(part.low is None for part in compared.parts)


def test_runs_of_one_step_are_compared_by_it_and_it_is_said():
    compared = compare(rows_of(1), rows_of(1, seed=1, tail=0.6), CONFIG, CONFIG)
    assert compared.steps == 1
    assert compared.basis.startswith("the first step alone")
    assert "In 1 step B" in compared.sentence


@pytest.mark.parametrize("steps", [1, 4, 40])
def test_a_run_beside_itself_takes_as_long(steps):
    sentence = compare(rows_of(steps), rows_of(steps), CONFIG, CONFIG).sentence
    assert sentence.startswith("B takes as long for a step as A: 1.")
    assert "%" not in sentence


def test_what_one_run_did_not_record_is_not_called_a_difference():
    old = CONFIG | {"versions": {"torch": "1"}}
    compared = compare(rows_of(), rows_of(), old, CONFIG)
    assert compared.unlike == compared.differs == ()


def test_only_common_steps_count_without_the_first_and_resumed_ones():
    slow_start = rows_of()
    slow_start[0] |= {"time/step_s": 90.0}
    resumed = rows_of()
    resumed[9] |= {"time/step_s": 0.1, "rollout/trajectories_resumed": 7}
    compared = compare(slow_start, resumed[:30], CONFIG, CONFIG)
    assert compared.steps == 28
    assert compared.total.seconds == pytest.approx(0.0, abs=1e-9)


def test_runs_without_a_common_step_are_refused():
    with pytest.raises(ValueError, match="no step in common"):
        compare(rows_of(), [{"step": 0, "eval/accuracy": 0.5}], CONFIG, CONFIG)
