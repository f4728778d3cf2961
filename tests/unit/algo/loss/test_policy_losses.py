"""The losses as the learner calls them: golden vectors, sums, plain forms, wrong fields."""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from algo.contracts import check_loss
from algo.learner.config import LearnerConfig
from algo.learner.measure.step_metrics import summary
from algo.learner.serialize import from_plain, to_plain
from algo.loss.interface import Tokens, Totals, aggregated, statistics
from algo.loss.policy_losses import Cispo, Correction, CrossEntropy, Dppo, Gspo, PpoClip, Sapo

MASK = Correction(level="geometric", kind="mask", lower=0.9, upper=1.1, veto=1e-4, drift=0.01)
LOSSES = [
    PpoClip(),
    PpoClip(dual_clip=1.5, aggregate="sequence", sampler_kl_coef=0.1, correction=MASK),
    PpoClip(proximal=True, correction=Correction(level="token", upper=1.1), aggregate=40.0),
    PpoClip(proximal=True, correction=Correction(level="sequence", kind="icepop", lower=0.5, upper=1.5)),
    PpoClip(proximal=True, correction=Correction(upper=1.1, also=MASK)),
    Gspo(clip_low=0.05, clip_high=0.05),
    Gspo(token_gradient=True, proximal=True, aggregate="token"),
    Cispo(clip_low=0.1, clip_high=0.1),
    Dppo(low=0.02, high=0.02, square_coef=1e-3),
    Dppo(divergence="kl", both_sides=True),
    Sapo(),
    CrossEntropy(),
    CrossEntropy(aggregate="sequence"),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hinge:
    """The example of `algo.loss.interface.Loss`."""

    margin: float = 1.0

    def __call__(self, tokens, totals):
        short_M = self.margin - tokens.advantages_M * (tokens.logprobs_M - tokens.old_logprobs_M)
        return short_M.relu().sum() / totals.tokens, {"short": (short_M > 0).sum()}


@pytest.mark.parametrize("loss", [*LOSSES, Hinge()], ids=str)
def test_every_loss_keeps_the_contract(loss):
    check_loss(loss)
    check_loss(loss, lengths=(7,), seed=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnMean:
    """Divides by what it sees: its value depends on the cut."""

    def __call__(self, tokens, totals):
        return tokens.logprobs_M.mean() if len(tokens.logprobs_M) else tokens.logprobs_M.sum(), {}


@dataclass(frozen=True, kw_only=True, slots=True)
class SometimesCounts:
    def __call__(self, tokens, totals):
        return tokens.logprobs_M.sum() / totals.tokens, {"x": tokens.versions_M.sum()} if tokens.sequences > 1 else {}


@pytest.mark.parametrize(("loss", "promise"), [(OwnMean(), "parts add up"), (SometimesCounts(), "same names")])
def test_the_contract_finds_a_loss_that_breaks_it(loss, promise):
    with pytest.raises(AssertionError, match=promise):
        check_loss(loss)


def few(**fields):
    """Two trajectories of two tokens; the sampler was certain by half of each token."""
    values = torch.tensor([-1.0, -2.0, -0.5, -0.25], dtype=torch.float64, requires_grad=True)
    default = {
        "logprobs_M": values,
        "old_logprobs_M": values.detach() - math.log(2.0),
        "advantages_M": torch.ones(4, dtype=torch.float64),
        "sequence_M": torch.tensor([0, 0, 1, 1]),
        "sequences": 2,
        "versions_M": torch.tensor([4, 4, 3, 4]),
    }
    return Tokens(**(default | fields))


def test_averages_differ_in_what_they_divide_by():
    losses_M, tokens = torch.tensor([3.0, 4.0, 5.0]), few(sequence_M=torch.tensor([0, 0, 1]))
    totals = Totals(tokens=6, sequences=4)
    assert aggregated(losses_M, tokens, totals, "token") == 12 / 6
    assert aggregated(losses_M, tokens, totals, "sequence") == (3.5 + 5) / 4
    assert aggregated(losses_M, tokens, totals, 10.0) == pytest.approx(12 / 40)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (Correction(upper=1.5), [1.5] * 4),
        (Correction(lower=3.0, upper=None), [3.0] * 4),
        (Correction(level="sequence", upper=10.0), [4.0] * 4),
        (Correction(level="geometric", upper=10.0), [2.0] * 4),
        (Correction(kind="icepop", upper=3.0), [2.0] * 4),
        (Correction(kind="icepop", upper=1.5), [0.0] * 4),
        (Correction(kind="mask", upper=3.0), [1.0] * 4),
        (Correction(kind="mask", upper=None, veto=2.5), [0.0] * 4),
        (Correction(upper=None, veto=0.5), [2.0] * 4),
        (Correction(kind="mask", upper=None, drift=0.0), [1.0] * 4),
        (Correction(upper=1.5, also=Correction(kind="mask", lower=1.9, upper=2.1)), [1.5] * 4),
        (Correction(upper=1.5, also=Correction(kind="mask", level="sequence", upper=3.9)), [0.0] * 4),
    ],
)
def test_a_correction_weighs_by_its_level_kind_and_bounds(correction, weights):
    assert correction.weights(few()).tolist() == pytest.approx(weights)


def test_a_mask_and_a_clamp_have_bounds_of_their_own():
    old_M = few().logprobs_M.detach() - torch.tensor([1.0, 2.0, 3.0, 1.0]).log()
    both = Correction(upper=1.5, also=Correction(kind="mask", upper=2.5))
    assert both.weights(few(old_logprobs_M=old_M)).tolist() == pytest.approx([1.0, 1.5, 0.0, 1.0])


@pytest.mark.parametrize(
    ("advantages", "weights"), [((-1.0, -1.0), (0, 0, 1, 1)), ((1.0, -1.0), (1, 1, 1, 1)), ((-1.0, 1.0), (0, 0, 1, 1))]
)
def test_a_failure_that_has_become_unlikely_already_is_left_alone(advantages, weights):
    """The first trajectory is less likely than when it was sampled, by 0.75 nats a token; the second likelier."""
    old_M = few().logprobs_M.detach() + torch.tensor([1.0, 0.5, -0.3, -0.3])
    advantages_M = torch.tensor([advantages[0]] * 2 + [advantages[1]] * 2)
    tokens = few(old_logprobs_M=old_M, advantages_M=advantages_M)
    correction = Correction(kind="mask", upper=None, drift=0.7)
    assert tuple(correction.weights(tokens).tolist()) == weights
    assert correction.weights(tokens._replace(advantages_M=-advantages_M.abs())).tolist() == [0, 0, 1, 1]
    assert Correction(kind="mask", upper=None, drift=0.8).weights(tokens).tolist() == [1] * 4
    _, counts = PpoClip(correction=correction)(tokens, Totals(tokens=4, sequences=2))
    assert counts["rejected"] == weights.count(0)


def test_a_veto_is_for_its_trajectory_and_a_rejected_token_still_counts():
    old_M = few().old_logprobs_M + torch.tensor([20.0, 0.0, 0.0, 0.0])
    loss = PpoClip(correction=Correction(kind="mask", upper=None, veto=1e-4), clip_high=9.0)
    value, counts = loss(few(old_logprobs_M=old_M), Totals(tokens=4, sequences=2))
    assert value.item() == pytest.approx(-(2.0 + 2.0) / 4)
    assert (counts["rejected"].item(), counts["weight"].item()) == (2, 2)


def test_the_divergence_from_the_sampler_is_added_to_each_tokens_loss():
    totals = Totals(tokens=4, sequences=2)
    (plain_loss, _), (value, _) = (PpoClip(sampler_kl_coef=coef)(few(), totals) for coef in (0.0, 0.1))
    assert (value - plain_loss).item() == pytest.approx(0.1 * (0.5 - 1 + math.log(2.0)))


def unlikely():
    """The sampler gave the second token exp(-12) of what the learner gives it, and the advantage is negative."""
    old_M = few().logprobs_M.detach() - torch.tensor([0.0, 12.0, 0.0, 0.0])
    return few(old_logprobs_M=old_M, advantages_M=-torch.ones(4)), Totals(tokens=4, sequences=2)


@pytest.mark.parametrize(
    ("bounded", "loose", "bound", "kept"),
    [(PpoClip(), PpoClip(dual_clip=None), 3, 0), (Dppo(), Dppo(truncation=None), 20, 20)],
)
def test_one_unlikely_token_of_a_failure_does_not_outweigh_the_batch_by_default(bounded, loose, bound, kept):
    """A clip takes the token's gradient; DPPO means to push it down, so the truncation leaves it."""
    tokens, totals = unlikely()
    value, _ = bounded(tokens, totals)
    assert value.item() == pytest.approx((1 + bound + 1 + 1) / 4)
    (gradient_M,) = torch.autograd.grad(value, tokens.logprobs_M)
    assert gradient_M.tolist() == pytest.approx([0.25, kept / 4, 0.25, 0.25])
    value, _ = loose(tokens, totals)
    assert value.item() == pytest.approx((math.exp(12) + 3) / 4)


@pytest.mark.parametrize("pair", [(PpoClip(), PpoClip(dual_clip=None)), (Dppo(), Dppo(truncation=None))], ids=str)
def test_a_bound_that_does_not_bind_changes_no_bit(pair):
    generator = torch.Generator().manual_seed(0)
    logprobs_M, advantages_M = -torch.rand(200, generator=generator), torch.randn(200, generator=generator)
    old_M = logprobs_M + 0.3 * torch.randn(200, generator=generator)
    found = []
    for loss in pair:
        leaf_M = logprobs_M.clone().requires_grad_()
        tokens = Tokens(leaf_M, old_M, advantages_M, torch.zeros(200, dtype=torch.long), 1, torch.zeros(200))
        value, _ = loss(tokens, Totals(tokens=200, sequences=1))
        found.append((value.item(), *torch.autograd.grad(value, leaf_M)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("truncation", [1.0, 20.0])
def test_dppo_is_its_formula_token_by_token(truncation):
    """Inside the region -min(r, c) A, with the gradient -min(r, c) A of REINFORCE; outside nothing of either."""
    rng = np.random.default_rng(0)
    p_M, q_M, advantages_M = rng.uniform(1e-4, 1, 400), rng.uniform(1e-4, 1, 400), rng.normal(size=400)
    p_M[:50], q_M[:50] = 0.01 * p_M[:50], 1e-4 * q_M[:50]  # unlikely tokens, whose ratios are large inside the region
    ratio_M = p_M / q_M
    stopped_M = (np.abs(p_M - q_M) > 0.2) & (np.sign(p_M - q_M) == np.sign(advantages_M))
    expected_M = np.where(stopped_M, 0.0, -np.minimum(ratio_M, truncation) * advantages_M)
    assert ((ratio_M > truncation) & ~stopped_M & (advantages_M < 0)).sum() > 10
    leaf_M = torch.tensor(np.log(p_M), requires_grad=True)
    versions_M, sequence_M = torch.zeros(400), torch.zeros(400, dtype=torch.long)
    tokens = Tokens(leaf_M, torch.tensor(np.log(q_M)), torch.tensor(advantages_M), sequence_M, 1, versions_M)
    value, _ = Dppo(truncation=truncation)(tokens, Totals(tokens=1, sequences=1))
    (gradient_M,) = torch.autograd.grad(value, leaf_M)
    assert value.item() == pytest.approx(expected_M.sum())
    np.testing.assert_allclose(gradient_M.numpy(), expected_M, rtol=1e-9, atol=1e-12)


def test_a_step_reports_sums_per_token_and_the_mismatch_before_its_first_update():
    results = [
        {"tokens": 4.0, "loss": 1.0, "rejected": 1.0, "ratio_max": 1.0, "mismatch_max": 0.1, "grad_norm": 3.0},
        {"tokens": 2.0, "loss": 4.0, "rejected": 2.0, "ratio_max": 2.0, "mismatch_max": 9.0, "grad_norm": 1.0},
    ]
    assert summary(results) == {
        "tokens": 6.0,
        "loss": 2.0,
        "rejected": 0.5,
        "ratio_max": 2.0,
        "mismatch_max": 0.1,
        "grad_norm": 3.0,
    }


def test_statistics_tell_what_the_live_weights_sampled_from_what_is_stale():
    tokens = few(old_logprobs_M=few().old_logprobs_M + torch.tensor([0.0, 0.2, 0.0, -5.0]))
    found = {key: float(value) for key, value in statistics(tokens, live=4).items()}
    assert found["mismatch_max"] == pytest.approx(5 + math.log(2))
    assert found["mismatch_fresh_max"] == pytest.approx(math.log(2))  # the other token of its trajectory is of 3
    assert found["tokens"] == 4
    assert found["ratio_max"] == pytest.approx(2 * math.exp(5))
    assert float(statistics(tokens)["mismatch_fresh_max"]) == 0
    nothing = Tokens(*(torch.zeros(0) for _ in range(3)), torch.zeros(0, dtype=torch.long), 0, torch.zeros(0))
    assert not any(statistics(nothing, live=4).values())


def test_a_loss_travels_as_plain_values():
    for loss in LOSSES:
        config = LearnerConfig(loss=loss)
        assert from_plain(config.loss) == loss
        assert LearnerConfig(**dataclasses.asdict(config)) == config
    assert to_plain(LOSSES[2])["correction"]["type"] == "algo.loss.policy_losses:Correction"


@dataclass(frozen=True)
class Boxed:
    """Not callable."""


def inner():
    @dataclass(frozen=True)
    class Local:
        pass

    return Local()


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        ({"type": "algo.nothing:Loss"}, "'algo.nothing:Loss'"),
        ({"type": "algo.loss.policy_losses:Nothing"}, "'algo.loss.policy_losses:Nothing'"),
        ({"clip_low": 0.2}, "'None'"),
        ({"type": "algo.learner.serialize:to_plain"}, "'algo.learner.serialize:to_plain'"),
        ({"type": "algo.loss.policy_losses:PpoClip", "clip": 1}, "PpoClip.*clip"),
        (
            {"type": "algo.loss.policy_losses:PpoClip", "clip_low": 1.5},
            "PpoClip.clip_low .*got 1.5",
        ),
        ("PpoClip", "builtins:str"),
        (inner(), "Local"),
        (Boxed(), "Boxed"),
    ],
)
def test_what_cannot_be_a_loss_is_refused_with_its_name(loss, named):
    with pytest.raises(ValueError, match=rf"LearnerConfig\.loss.*{named}"):
        LearnerConfig(loss=loss)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: PpoClip(clip_high=0.0), r"PpoClip.clip_high .*got 0.0"),
        (lambda: PpoClip(clip_high=None), r"PpoClip.clip_high .*got None"),
        (lambda: PpoClip(dual_clip=1.0), r"PpoClip.dual_clip .*got 1.0"),
        (lambda: Dppo(truncation=0.5), r"Dppo.truncation .*got 0.5"),
        (lambda: PpoClip(aggregate="prompt"), r"PpoClip.aggregate .*'prompt'"),
        (lambda: PpoClip(aggregate=0), r"PpoClip.aggregate .*got 0"),
        (lambda: PpoClip(sampler_kl_coef=-1.0), r"PpoClip.sampler_kl_coef .*got -1.0"),
        (lambda: Gspo(correction=Correction()), r"Gspo.correction.kind"),
        (lambda: Dppo(proximal=True), r"Dppo.proximal .*got True"),
        (lambda: Dppo(divergence="l2"), r"Dppo.divergence .*got 'l2'"),
        (lambda: Cispo(clip_low=2.0), r"Cispo.clip_low"),
        (lambda: Sapo(tau_positive=0.0), r"Sapo.tau_positive .*got 0.0"),
        (lambda: CrossEntropy(aggregate="x"), r"CrossEntropy.aggregate .*'x'"),
        (
            lambda: PpoClip(correction=Correction(kind="mask", also=Correction())),
            r"PpoClip.correction.kind",
        ),
        (lambda: Correction(also=Correction(normalize=True)), r"Correction.also.normalize"),
        (lambda: Correction(also="mask"), r"Correction.also .*got 'mask'"),
        (
            lambda: PpoClip(proximal=True, correction=Correction(normalize=True), sampler_kl_coef=0.1),
            r"PpoClip.sampler_kl_coef .*got 0.1",
        ),
        (
            lambda: LearnerConfig(
                loss=PpoClip(proximal=True, correction=Correction(normalize=True)), reference_kl_coef=0.1
            ),
            r"LearnerConfig.reference_kl_coef .*got 0.1",
        ),
        (lambda: Correction(level="word"), r"Correction.level .*'word'"),
        (lambda: Correction(kind="drop"), r"Correction.kind .*'drop'"),
        (lambda: Correction(lower=-0.1), r"Correction.lower .*-0.1"),
        (lambda: Correction(upper=None), r"Correction.upper"),
        (lambda: LearnerConfig(mismatch_tolerance=0.0), r"LearnerConfig.mismatch_tolerance .* got 0.0"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(make, named):
    with pytest.raises(ValueError, match=named):
        make()
