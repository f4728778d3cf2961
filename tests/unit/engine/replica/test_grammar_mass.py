"""What an engine samples under a grammar, and what the learner is told of it: arithmetic with small vocabularies."""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.replica.grammar_mass import FORCED, UNKNOWN, MassMeter, judged, rows_with

LOGITS = st.lists(st.floats(-6, 6, width=32), min_size=2, max_size=8)


@st.composite
def positions(draw):
    """(logits of the model, which tokens the grammar allows, the token that was sampled)."""
    logits = torch.tensor(draw(LOGITS), dtype=torch.float64)
    allowed = draw(st.sets(st.integers(0, len(logits) - 1), min_size=1))
    return logits, sorted(allowed), draw(st.sampled_from(sorted(allowed)))


def masked(logits, allowed):
    """As the engine masks them."""
    found = torch.full_like(logits, -math.inf)
    found[allowed] = logits[allowed]
    return found


def log_mass(logits, allowed):
    return float(logits[allowed].logsumexp(-1) - logits.logsumexp(-1))


@given(positions())
def test_the_learner_is_told_the_models_own_log_probability(position):
    logits, allowed, token = position
    log_mu = float(masked(logits, allowed).log_softmax(-1)[token])
    logprob, forced = judged(log_mu, log_mass(logits, allowed))
    assert logprob == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-9)
    mass = float(logits.softmax(-1)[allowed].sum())
    if abs(1 - mass - FORCED) > 1e-9:
        assert forced == (1 - mass > FORCED)


@given(positions())
def test_a_token_that_is_trained_has_nearly_the_gradient_of_the_constrained_policy(position):
    logits, allowed, token = position
    mass = math.exp(log_mass(logits, allowed))
    z = logits.clone().requires_grad_()
    (of_model,) = torch.autograd.grad(z.log_softmax(-1)[token], z)
    (of_engine,) = torch.autograd.grad((z[allowed].log_softmax(-1))[allowed.index(token)], z)
    assert float((of_model - of_engine).abs().sum()) == pytest.approx(2 * (1 - mass), abs=1e-9)
    if len(allowed) == 1:
        assert not of_engine.any(), "what is dictated teaches nothing"
    mu = masked(logits, allowed).softmax(-1)
    assert float((logits.softmax(-1) - mu).abs().sum()) / 2 == pytest.approx(1 - mass, abs=1e-9)


@given(positions(), LOGITS)
def test_the_ratio_is_that_of_the_constrained_sampler_up_to_the_change_of_the_mass(position, moved):
    old, allowed, token = position
    new = old + torch.tensor((moved * len(old))[: len(old)], dtype=torch.float64) / 10
    log_mu_old, log_mu_new = (float(masked(each, allowed).log_softmax(-1)[token]) for each in (old, new))
    exact = log_mu_new - log_mu_old
    sampler, _ = judged(log_mu_old, log_mass(old, allowed))
    ours = float(new.log_softmax(-1)[token]) - sampler
    assert ours - exact == pytest.approx(log_mass(new, allowed) - log_mass(old, allowed), abs=1e-9)


def expectation(logits, allowed, reward, trains):
    """The expected sum of A grad log pi over the trained tokens of two decisions, by enumeration.

    The second decision depends on the first; allowed: by the tokens before. trains: by (tokens before, token).
    """
    grown = logits.clone().requires_grad_()
    total = torch.zeros_like(logits)
    for first, second in product(range(3), repeat=2):
        if first not in allowed[()] or second not in allowed[(first,)]:
            continue
        mu = float(masked(logits[0], allowed[()]).softmax(-1)[first])
        mu *= float(masked(logits[1 + first], allowed[(first,)]).softmax(-1)[second])
        score = torch.zeros(())
        if trains((), first):
            score = score + grown[0].log_softmax(-1)[first]
        if trains((first,), second):
            score = score + grown[1 + first].log_softmax(-1)[second]
        if score.requires_grad:
            total += mu * reward[first][second] * torch.autograd.grad(score, grown)[0]
    return total


def test_leaving_out_what_the_grammar_decided_is_no_bias_and_leaving_out_the_unlikely_is():
    """The first decision is free, the second one is forced after a 0 and free otherwise."""
    logits = torch.tensor([[0.3, -0.2, 0.1], [1.0, 0.5, -3.0], [0.2, 0.0, -0.4], [0.0, 0.7, 0.1]], dtype=torch.float64)
    allowed = {(): [0, 1, 2], (0,): [2], (1,): [0, 1, 2], (2,): [0, 1, 2]}
    reward = torch.tensor([[0.0, 0.0, 1.0], [0.5, -1.0, 0.2], [0.3, 0.9, -0.4]])

    def free(before, token):
        row = logits[0] if not before else logits[1 + before[0]]
        return not judged(0.0, log_mass(row, allowed[before]))[1]

    def likely(before, token):
        row = logits[0] if not before else logits[1 + before[0]]
        return float(row.softmax(-1)[token]) > 0.3

    z = logits.clone().requires_grad_()
    value = torch.zeros((), dtype=torch.float64)
    for first, second in product(range(3), repeat=2):
        if second in allowed[(first,)]:
            mu = masked(z[1 + first], allowed[(first,)]).softmax(-1)[second]
            value = value + z[0].softmax(-1)[first] * mu * reward[first][second]
    (exact,) = torch.autograd.grad(value, z)
    assert free((), 0) and not free((0,), 2) and free((1,), 0)  # noqa: PT018  the case that is meant
    torch.testing.assert_close(expectation(logits, allowed, reward, free), exact)
    wrong = expectation(logits, allowed, reward, likely)
    assert float((wrong - exact).abs().max()) > 0.02


def test_a_mass_that_was_not_measured_trains_nothing():
    assert judged(-0.25, UNKNOWN) == (-0.25, True)


def step(meter, logits, batch, allowed):
    """One step of an engine: masks in place, takes log-probabilities in two columns."""

    def mask(rows_allowed, logits):
        for row, tokens in rows_allowed.items():
            logits[row] = masked(logits[row], tokens)

    meter.around(mask, lambda rows_allowed, logits: (logits, sorted(rows_allowed)))(allowed, logits=logits)
    found = SimpleNamespace(logprobs=logits.log_softmax(-1)[:, :2].clone())
    meter.deliver(found)
    return found.logprobs


def test_the_mass_of_each_row_comes_out_in_the_second_column():
    meter, logits = MassMeter(), torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    wanted = [log_mass(logits[0], [0, 2]), 0.0, log_mass(logits[2], [1])]
    found = step(meter, logits.clone(), ["a", "b", "c"], {0: [0, 2], 2: [1]})
    assert found[:, 1].tolist() == pytest.approx(wanted, abs=1e-6)
    assert float(found[0, 0]) == pytest.approx(float(masked(logits[0], [0, 2]).log_softmax(-1)[0]))


def test_a_step_without_a_grammar_has_no_mass_of_the_step_before():
    meter = MassMeter()
    step(meter, torch.zeros(1, 3), ["a"], {0: [1]})
    found = SimpleNamespace(logprobs=torch.zeros(2, 2))
    meter.deliver(found)
    assert found.logprobs[:, 1].tolist() == [UNKNOWN, UNKNOWN]
    for nothing in (None, SimpleNamespace(logprobs=torch.zeros(2, 1))):
        meter.deliver(nothing)


def test_rows_are_those_of_the_batch_and_a_request_that_is_not_in_it_has_none():
    assert rows_with(["a", "b", "c"], ["c", "gone", "a"]) == [0, 2]
