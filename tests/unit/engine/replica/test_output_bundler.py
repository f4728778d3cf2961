"""Tokens that wait in an engine for company: none is lost, out of order, or late for whom it matters."""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.replica.output_bundler import BEGAN, LOGPROBS, OutputBundler
from engine.replica.port import BUNDLE

Logprobs = namedtuple("Logprobs", "ids logprobs ranks cumulated")  # as vLLM's LogprobsLists


def output(request, tokens, finish=None, prefill=None, routes=None):
    """As vLLM's EngineCoreOutput."""
    ids_T1 = np.array(tokens, np.int64)[:, None]
    logprobs = Logprobs(ids_T1, -ids_T1.astype(np.float32), ids_T1[:, 0] + 1, None) if tokens else None
    return SimpleNamespace(
        request_id=request,
        new_token_ids=[*tokens],
        new_logprobs=logprobs,
        finish_reason=finish,
        prefill_stats=prefill,
        kv_transfer_params=None,
        routed_experts=routes,
    )


def sizes(bundler, outputs):
    return [len(found.new_token_ids) for found in bundler.push(outputs)]


def test_bundles_leave_and_the_rest_with_the_end():
    bundler = OutputBundler()
    bundler.add("a", [], BUNDLE)
    left = [sizes(bundler, [output("a", [n])]) for n in range(2 * BUNDLE + 3)]
    left.append(sizes(bundler, [output("a", [9], finish="stop")]))
    assert [size for step in left for size in step] == [BUNDLE, BUNDLE, 4]
    assert sizes(bundler, [output("a", [1])]) == [1], "it has ended, and is forgotten"


def test_the_first_bundle_says_when_its_first_token_came_and_what_was_prefilled():
    bundler = OutputBundler()
    bundler.add("a", [], 2)
    assert bundler.push([output("a", [], prefill="here")], 1.0) == [], "a part of a prefill brings no token"
    assert bundler.push([output("a", [4], prefill="again")], 2.0) == []
    [first] = bundler.push([output("a", [5])], 3.0)
    assert (first.prefill_stats, first.kv_transfer_params[BEGAN]) == ("here", 2.0)
    [second] = bundler.push([output("a", [6, 7])], 4.0)
    assert (second.prefill_stats, BEGAN in second.kv_transfer_params) == (None, False)


def test_a_request_may_ask_for_other_bundles():
    bundler = OutputBundler()
    bundler.add("a", [], 40)
    bundler.add("b", [], 16)
    left = [sizes(bundler, [output("a", [n]), output("b", [n])]) for n in range(40)]
    assert [size for step in left for size in step] == [16, 16, 40]


def test_a_token_that_its_reader_waits_for_takes_along_what_waits():
    bundler = OutputBundler()
    bundler.add("a", [7], BUNDLE)
    assert [sizes(bundler, [output("a", [token])]) for token in (1, 2, 7, 7, 3)] == [[], [], [3], [1], []]


def test_what_nobody_added_leaves_at_once():
    bundler = OutputBundler()
    bundler.add("a", [], BUNDLE)
    assert sizes(bundler, [output("a", [1]), output("b", [1])]) == [1]


def test_an_aborted_request_is_forgotten():
    bundler = OutputBundler()
    bundler.add("a", [], BUNDLE)
    bundler.push([output("a", [1])])
    assert len(bundler) == 1
    bundler.forget("a")
    assert (len(bundler), bundler.flush()) == (0, [])


def test_an_end_without_a_token_brings_those_that_waited():
    bundler = OutputBundler()
    bundler.add("a", [], BUNDLE)
    bundler.push([output("a", [4])])
    (last,) = bundler.push([output("a", [], finish="error")])
    assert (last.new_token_ids, last.new_logprobs, last.kv_transfer_params[LOGPROBS]) == ([4], None, ([-4.0],))


def with_masses(made, masses):
    """A step in which a request has a grammar has a column more, for all of its requests."""
    wide = np.hstack([made.new_logprobs.logprobs, np.array(masses)[:, None]])
    made.new_logprobs = made.new_logprobs._replace(logprobs=wide)
    return made


def test_only_a_request_with_a_grammar_gets_log_masses():
    bundler = OutputBundler()
    bundler.add("free", [], BUNDLE)
    bundler.add("ruled", [], BUNDLE, masses=True)
    bundler.push([output("free", [4]), with_masses(output("ruled", [6]), [-0.25])])
    ended = [with_masses(output(name, [5], finish="stop"), [-0.5]) for name in ("free", "ruled")]
    free, ruled = bundler.push(ended)
    assert free.kv_transfer_params[LOGPROBS] == ([-4.0, -5.0],)
    assert ruled.kv_transfer_params[LOGPROBS] == ([-6.0, -5.0], [-0.25, -0.5])


STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), min_size=1, max_size=3), st.booleans()))


@given(STEPS, st.sets(st.integers(0, 9)))
def test_whatever_comes_leaves_once_and_in_order(steps, deliver_at):
    """The third of a step: everything leaves after it."""
    bundler, sampled, left, waiting = OutputBundler(), {}, {}, {}
    for name in "abc":
        bundler.add(name, deliver_at, BUNDLE)
        sampled[name], left[name], waiting[name] = [], [], 0
    for name, tokens, pause in [*steps, ("a", [0], True)]:
        sampled[name] += tokens
        waiting[name] += len(tokens)
        for found in bundler.push([output(name, tokens)]) + (bundler.flush() if pause else []):
            left[found.request_id] += found.new_token_ids
            waiting[found.request_id] = 0
            expected = [-token for token in found.new_token_ids]
            assert found.kv_transfer_params[LOGPROBS] == (expected,)
        assert max(waiting.values()) < BUNDLE
        assert all(whole[: len(left[name])] == left[name] for name, whole in sampled.items())
        assert deliver_at.isdisjoint(tokens) or left[name] == sampled[name]
    assert left == sampled


def test_a_bundle_has_the_routes_of_all_its_steps():
    """As vLLM reports them on GPUs: a prefill's first, then one position a step."""
    bundler = OutputBundler()
    bundler.add("a", [], 3)
    rows = np.arange(2 * 6 * 1 * 2, dtype=np.uint8).reshape(-1, 1, 2)
    left = []
    for at, (begin, end) in enumerate([(0, 4), (4, 5), (5, 6), (6, 7)]):
        finish = "stop" if at == 3 else None
        left += bundler.push([output("a", [at], finish, routes=rows[begin:end])])
    assert [len(each.routed_experts) for each in left] == [6, 1]
    np.testing.assert_array_equal(np.concatenate([each.routed_experts for each in left]), rows[:7])
