"""The bench of a step: what it reads out of a timeline."""

import json
from collections import Counter

import pytest

from bench.benches.step import METRICS, SKIP, Run, at_rest, busy, clipped, duration, figures, union


def test_times_that_overlap_count_once():
    assert union([(3, 4), (0, 2), (1, 2.5), (1, 1.5)]) == [(0, 2.5), (3, 4)]
    assert duration(union([(3, 4), (0, 2), (1, 2.5)])) == 3.5
    assert clipped([(0, 2), (3, 4), (5, 9)], (1, 6)) == [(1, 2), (3, 4), (5, 6)]


def test_the_sides_of_a_step_are_those_of_the_timeline(tmp_path):
    """Two steps count. Of their 10 s rollouts run for 9, of which 1 is spent loading weights without a tool beside it;
    learning and loading take 4 s.
    """
    names = {0: "trajectories", 1: "tool calls", 2: "learner", 3: "weights", 4: "evaluation"}
    events = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}} for pid, name in names.items()]

    def span(track, name, begin, end):
        pid = next(pid for pid in names if names[pid] == track)
        events.append({"ph": "X", "pid": pid, "tid": 0, "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6})

    span("weights", f"version {SKIP}", 9, 10)
    span("trajectories", "generate", 8, 14)  # begun before
    span("tool calls", "ok", 13, 16)
    span("trajectories", "generate", 17, 20)
    span("learner", "step", 13, 15)
    span("weights", f"version {SKIP + 1}", 15, 16)
    span("weights", f"version {SKIP + 2}", 19, 20)
    span("evaluation", "step", 20, 30)
    span("trajectories", "generate", 20, 30)  # of the evaluation
    (tmp_path / "timeline.json").write_text(json.dumps({"traceEvents": events}))
    assert busy(tmp_path, SKIP + 2) == pytest.approx((5.0, 4.0, 2.0))


def test_engines_count_only_where_the_learner_computes():
    def sample(second, learner, replicas):
        return second / 10, Counter(learner=learner, replicas=replicas)

    rolling = [sample(n, 0.0, n / 10) for n in range(10)]
    learning = [sample(n, (n - 9) / 10, 0.9 + (n - 9) / 1000) for n in range(10, 30)]
    assert at_rest(rolling) == 0.0
    assert at_rest(learning) == pytest.approx(0.01)
    assert at_rest([*rolling, *learning]) < 0.2


def run_of(step_s, rollout_s, learn_s):
    return Run(
        step_s=step_s,
        rollout_s=rollout_s,
        learn_s=learn_s,
        cpu_s={"node": step_s},
        engines_at_learn=0.0,
        goodput=1.0,
        staleness_mean=0.0,
        tokens_per_s=1.0,
        accuracy=0.5,
        kl=0.0,
    )


def test_the_honest_figure_is_over_the_sides_that_had_the_cores_for_themselves():
    """The overlapped run's own rollout side is as long as its step."""
    strict, overlapped = run_of(3.0, 2.0, 1.0), run_of(2.4, 2.4, 1.5)
    row = figures(overlapped, strict, cores=2)
    assert row["over_max"] == pytest.approx(1.0)
    assert row["over_strict_max"] == pytest.approx(1.2)
    assert row["over_cpu"] == pytest.approx(2.0)
    assert row.keys() <= METRICS.keys()
    assert "over_strict_max" not in figures(overlapped, None, cores=2), "without a strict run"
