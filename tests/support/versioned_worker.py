"""A stub worker whose log-probabilities say which weights were there when a token was sampled. For engine processes."""

import numpy as np

from bench.benches.loop.stub_worker import StubWorker


class VersionedWorker(StubWorker):
    """The log-probability of a token is minus the number of weight updates before its step."""

    updates = 0

    def finish_weight_update(self, *arguments, **named):
        super().finish_weight_update(*arguments, **named)
        self.updates += 1

    def sample_tokens(self, grammar_output):
        later = super().sample_tokens(grammar_output)
        logprobs = later._output.logprobs
        later._output.logprobs = logprobs._replace(logprobs=np.full_like(logprobs.logprobs, -self.updates))
        return later
