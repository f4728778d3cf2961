"""Gives requests that want only the log-probabilities of their sampled tokens a plain list. For the node's process.

vLLM builds five lists with an entry per token, in a loop per token: a third of what the node pays for a token of a
bundle. This adapts an interface of vLLM that may change.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.engine import output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor


class SampledLogprobs(LogprobsProcessor):
    """`logprobs` is a list of floats, one per token. There is no sum of them."""

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        self.logprobs.extend(logprobs_lists.logprobs[:, 0].tolist())


class LogprobsAndMasses(LogprobsProcessor):
    """`logprobs` is a list of pairs, one per token: its log-probability and the log-mass of its grammar, as
    `engine.replica.grammar_mass` has them.
    """

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
        self.logprobs.extend(map(tuple, logprobs_lists.logprobs[:, :2].tolist()))


class Logprobs(LogprobsProcessor):
    """Replaces the class of which vLLM makes one for each request."""

    @classmethod
    def from_new_request(cls, tokenizer: Any, request: Any) -> Any:
        """Returns a SampledLogprobs if that is all that the request wants; `flat_logprobs` asks for vLLM's own."""
        parameters = request.sampling_params
        kind: type[LogprobsProcessor] = LogprobsProcessor
        if tokenizer is None and not parameters.flat_logprobs:
            if "grammar" in (parameters.extra_args or {}):
                kind = LogprobsAndMasses
            elif parameters.num_logprobs == 0:
                kind = SampledLogprobs
        return kind.from_new_request(tokenizer, request)


def install() -> None:
    """Makes vLLM's front end in this process use `Logprobs` from now on."""
    output_processor.LogprobsProcessor = Logprobs
