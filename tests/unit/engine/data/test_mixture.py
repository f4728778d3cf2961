"""Mixtures that follow what was learnt, and sources that end, fail or are late."""

import threading
from collections import Counter
from itertools import islice

import pytest

from engine.data.mixture import Late, PassRateBand, Prefetched, mixture
from engine.rollout.rollout import RolloutConfig
from engine.run.step_history import StepHistory
from engine.types import Prompt, PromptLimits
from tests.support.fakes import a_prompt


class Source:
    """An endless stream, or one of so many prompts; fails at the prompts that it is told."""

    def __init__(self, name, count=None, fails=()):
        self.name, self.count, self.fails, self.at = name, count, set(fails), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.count:
            raise StopIteration
        if self.at in self.fails:
            self.fails.discard(self.at)
            raise OSError("the network is down")
        self.at += 1
        return Prompt(id=f"{self.name}-{self.at - 1}", messages=(), answer="", source=self.name)

    def skip(self, count):
        self.at += count
        return count


def drawn(stream, count):
    return [prompt.id for prompt in islice(stream, count)]


def learnt(rows, *, prompts_per_step=1, max_staleness=0):
    return StepHistory(lambda: rows, prompts_per_step=prompts_per_step, max_staleness=max_staleness)


def test_a_band_draws_less_of_what_is_solved_or_hopeless():
    band = PassRateBand(low=0.2, high=0.8, outside=0.5, steps=2)
    rows = [{"reward/a": 1.0, "reward/b": 0.0}, {"reward/a": 0.5, "reward/b": 0.1}, {"reward/a": 0.5}]
    assert band.weights({"a": 2.0, "b": 1.0, "c": 3.0}, rows) == {"a": 2.0, "b": 0.5, "c": 3.0}


def test_a_curriculum_changes_the_shares_from_step_to_step_and_a_resumed_run_draws_the_same():
    rows = [{"step": step, "reward/easy": 1.0, "reward/fit": 0.5} for step in range(1, 21)]
    options = {"curriculum": PassRateBand(outside=0.25), "steps": learnt(rows, prompts_per_step=10)}
    whole = drawn(mixture({Source("easy"): 1, Source("fit"): 1}, **options), 200)
    assert Counter(name.split("-")[0] for name in whole[:10]) == {"easy": 5, "fit": 5}, "nothing is known yet"
    assert Counter(name.split("-")[0] for name in whole[10:110])["easy"] == pytest.approx(20, abs=1)
    for passed in (1, 10, 57, 130):
        again = mixture({Source("easy"): 1, Source("fit"): 1}, **options)
        assert again.skip(passed) == passed
        assert drawn(again, 200 - passed) == whole[passed:]


def test_under_staleness_a_step_is_drawn_by_what_is_surely_known():
    seen = []

    class Spy:
        def weights(self, given, steps):
            seen.append(len(steps))
            return given

    history = learnt([{"step": step} for step in range(1, 101)], prompts_per_step=2, max_staleness=1)
    drawn(mixture({Source("a"): 1}, curriculum=Spy(), steps=history), 8)
    assert seen == [0, 0, 1, 2]


def test_a_source_with_a_small_share_is_drawn_even_where_steps_are_smaller_than_its_turn():
    options = {"curriculum": PassRateBand(), "steps": learnt([], prompts_per_step=2)}
    found = drawn(mixture({Source("rare"): 1, Source("common"): 19}, **options), 200)
    assert Counter(name.split("-")[0] for name in found) == {"rare": 10, "common": 190}


@pytest.mark.parametrize("steps", [None, list, [{"reward/a": 1.0}]])
def test_a_curriculum_is_refused_without_the_history_of_the_run(steps):
    with pytest.raises(ValueError, match=r"steps=job\.steps"):
        mixture({Source("a"): 1}, curriculum=PassRateBand(), steps=steps)


def test_weights_that_are_all_zero_are_those_that_were_given():
    class Nothing:
        def weights(self, given, steps):
            return dict.fromkeys(given, 0.0)

    assert drawn(mixture({Source("a"): 1}, curriculum=Nothing(), steps=learnt([])), 2) == ["a-0", "a-1"]


def test_a_source_that_fails_is_named_once_and_asked_again_while_the_others_go_on(caplog):
    stream = mixture({Source("broken", fails=[1]): 1, Source("whole"): 1})
    found = drawn(stream, 200)
    counts = Counter(name.split("-")[0] for name in found)
    assert counts["broken"] > 80
    assert counts["whole"] >= 100
    assert len(set(found)) == 200
    [record] = caplog.records
    assert "broken" in record.getMessage()
    assert "network is down" in record.getMessage()


def test_a_source_that_ends_is_named(caplog):
    assert len(drawn(mixture({Source("short", count=3): 1, Source("long", count=10): 1}), 100)) == 13
    assert "short" in caplog.records[0].getMessage()


def test_when_every_source_fails_the_run_is_told():
    with pytest.raises(RuntimeError, match="no source"):
        next(mixture({Source("a", fails=[0]): 1, Source("b", fails=[0]): 1}))


def test_a_slow_source_is_late_and_comes_back():
    gate = threading.Event()

    def slow():
        gate.wait(10)
        yield from (a_prompt(text=f"slow {n}") for n in range(3))

    source = Prefetched(slow(), name="slow", deadline_s=0.01)
    with pytest.raises(Late):
        next(source)
    stream = mixture({source: 1, Source("quick"): 1})
    assert all(name.startswith("quick") for name in drawn(stream, 10))
    gate.set()
    found = list(islice(stream, 200))
    assert sum(prompt.messages != () for prompt in found) == 3


def test_a_source_read_ahead_is_skipped_before_it_is_read():
    source = Prefetched(Source("far"))
    assert source.skip(1000) == 1000
    assert next(source).id == "far-1000"


def test_a_prompts_limits_are_within_those_of_the_run():
    config = RolloutConfig(max_tokens=100, max_turns=10)
    prompt = Prompt(id="p", messages=(), answer="", limits=PromptLimits(max_tokens=50, max_turns=2))
    limited = config.limited_for(prompt)
    assert (limited.max_tokens, limited.max_turns) == (50, 2)
    with pytest.raises(ValueError, match=r"prompt p: limits\.max_tokens must be at most the run's 40, got 50"):
        RolloutConfig(max_tokens=40).limited_for(prompt)
    with pytest.raises(ValueError, match=r"limits\.max_turns"):
        PromptLimits(max_turns=0)
