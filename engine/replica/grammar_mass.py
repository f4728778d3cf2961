"""Sampling under a grammar, and what of it may be trained: the share of the model's probability that a grammar leaves.

Runs inside the engine's workers: an adapter to interfaces of vLLM that may change.

Notation, for one token after the ids s: the model gives pi(a | s). The grammar allows the tokens A(s), which follow
from the text of the turn so far. Z(s) is the sum of pi(b | s) over b in A(s), the *mass*. All are taken at temperature
1, at which trained tokens are sampled. The engine samples from

    mu(a | s) = pi(a | s) / Z(s) for a in A(s), and 0 for others.

**What vLLM returns.** It sets the logits of forbidden tokens to -inf in place (`apply_grammar_bitmask`), before its
sampler takes the "raw" log-probabilities: so they are log mu. The learner knows no grammar and computes log pi. The two
differ by -log Z, without bound: by 7 where a grammar demands a call from a model that calls once in 1,000 times.

**The importance ratio.** The grammar is part of what the model is asked, so the policy of the turn is mu. Its ratio is

    mu_new / mu_old = (pi_new / pi_old) (Z_old / Z_new).

Z_new needs A(s) at the learner, which is a bit for each token of the vocabulary at each position. Instead
- a token with 1 - Z_old(s) <= FORCED is trained like a free one, with log pi_old = log mu_old + log Z_old as the
  sampler's log-probability. That is the ratio above with Z_new = Z_old.
- any other token is *forced*: it counts as given, like the tokens of a tool's reply. It has no loss, and the mismatch
  between sampler and learner is not measured on it. The canary samples nothing, so no grammar touches it.

**The error.** 1 - Z is the total variation distance of mu from pi. By the logits, the gradient of log pi minus that of
log mu is minus the gradient of log Z, which is mu(b) (1 - Z) for b in A(s) and -pi(b) for others. Its 1-norm is
2 (1 - Z), at most 0.02 for a token that is trained. Where one token alone is allowed, the gradient of log mu is 0, and
that of log pi has the same norm 2 (1 - Z): a token that a grammar dictates is not trained unless the model would have
written it anyway.

**No bias by selection.** Z depends on what comes before a token, never on the token. So what is sampled does not decide
whether it is trained, and the trained tokens give, up to the error above, the policy gradient of their decisions in a
world in which the grammar makes the other ones. To leave tokens out because they are unlikely would be biased.

**How the mass travels.** A request with a grammar asks vLLM for one log-probability beside that of the sampled token,
and `install` writes log Z in its place. It comes out in the same arrays as the tokens. Other requests of the same step
get the column too and ignore it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

FORCED = 0.01  # rounding to bfloat16 moves the log-probabilities of a model by about as much
UNKNOWN = -math.inf  # the log-mass of a token for which none was measured; it counts as forced

Rows = Callable[..., tuple[Tensor, list[int]]]


def judged(log_mu: float, log_mass: float) -> tuple[float, bool]:
    """Returns the model's own log-probability of a sampled token, and whether the token is forced.

    log_mu: its log-probability under the grammar. log_mass: log Z, or UNKNOWN, with which log mu is all that is known.

    >>> judged(-0.5, 0.0), judged(-0.5, -2.0), judged(-0.5, UNKNOWN)
    ((-0.5, False), (-2.5, True), (-0.5, True))
    """
    if log_mass == UNKNOWN:
        return log_mu, True
    return log_mu + log_mass, -math.expm1(log_mass) > FORCED


class MassMeter:
    """Measures the log-mass of each row of a step, and writes it into the step's log-probabilities."""

    def __init__(self) -> None:
        self._masses_R: Tensor | None = None  # 0 for a row without a grammar

    def around(self, mask: Callable[..., None], rows_of: Rows) -> Callable[..., None]:
        """Returns `mask`, a function that masks logits in place, with a measurement around it.

        rows_of: returns the logits [rows, vocabulary] and the rows that have a grammar, from the arguments of `mask`.
        """

        def measured(*args: Any, **options: Any) -> None:
            logits_RV, rows = rows_of(*args, **options)
            before = _log_sums(logits_RV, rows)
            mask(*args, **options)
            self._masses_R = torch.zeros(len(logits_RV), device=logits_RV.device)
            self._masses_R[rows] = (_log_sums(logits_RV, rows) - before).clamp(max=0.0)

        return measured

    def deliver(self, tensors: Any) -> None:
        """Writes the log-masses of the step into the second column of its LogprobsTensors, if they have one."""
        masses_R, self._masses_R = self._masses_R, None
        if tensors is not None and tensors.logprobs.shape[1] > 1:
            tensors.logprobs[:, 1] = UNKNOWN if masses_R is None else masses_R


def _log_sums(logits_RV: Tensor, rows: Sequence[int]) -> Tensor:
    return logits_RV[rows].float().logsumexp(-1)


def install(runner: Any) -> bool:
    """Makes a worker's model runner measure the mass; returns whether this version of vLLM lets it.

    vLLM has two runners. The newer one, which it prefers on GPUs, was not run here.
    """
    meter = MassMeter()
    try:
        if hasattr(runner, "structured_outputs_worker"):
            from vllm.v1.worker.gpu.sample import sampler

            worker = runner.structured_outputs_worker
            worker.apply_grammar_bitmask = meter.around(worker.apply_grammar_bitmask, _rows_of_newer)
            sampler.compute_topk_scores = _delivering(sampler.compute_topk_scores, meter)
        else:
            from vllm.v1.worker import gpu_model_runner

            gpu_model_runner.apply_grammar_bitmask = meter.around(gpu_model_runner.apply_grammar_bitmask, _rows_of)
            runner.sampler.register_forward_hook(lambda module, given, output: meter.deliver(output.logprobs_tensors))
    except (AttributeError, ImportError):
        return False
    return True


def _delivering(scores: Callable[..., Any], meter: MassMeter) -> Callable[..., Any]:
    def delivered(*args: Any, **options: Any) -> Any:
        tensors = scores(*args, **options)
        meter.deliver(tensors)
        return tensors

    return delivered


def _rows_of(scheduled: Any, grammars: Any, batch: Any, logits_RV: Tensor) -> tuple[Tensor, list[int]]:
    return logits_RV, rows_with(batch.req_ids, grammars.structured_output_request_ids)


def _rows_of_newer(logits_RV: Tensor, batch: Any, requests: Sequence[str], bits: Any) -> tuple[Tensor, list[int]]:
    return logits_RV, rows_with(batch.req_ids, requests)


def rows_with(batch: Sequence[str], requests: Sequence[str]) -> list[int]:
    """Returns where these requests are in a batch, which has one row of logits for each of its requests.

    >>> rows_with(["a", "b", "c"], ["c", "a"])
    [0, 2]
    """
    chosen = set(requests)
    return [row for row, request in enumerate(batch) if request in chosen]
