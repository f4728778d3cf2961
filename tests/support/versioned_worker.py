"""A stub worker whose log-probabilities say which weights were there when a token was sampled. For engine processes."""

import numpy as np

from bench.benches.loop.stub_worker import StubWorker


class VersionedWorker(StubWorker):
    """The log-probability of a token is minus the number of weight updates before its step.

    A request whose KV is computed again, after an update, samples again once all its tokens so far are computed.
    """

    updates = 0

    def finish_weight_update(self, *arguments, **named):
        super().finish_weight_update(*arguments, **named)
        self.updates += 1

    def sample_tokens(self, grammar_output):
        cached = self._step.scheduled_cached_reqs
        for request_id, sampled in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                request = self._requests[request_id]
                request.prompt_tokens += sampled - getattr(request, "counted", 0)
                request.sampled = request.counted = sampled
        later = super().sample_tokens(grammar_output)
        logprobs = later._output.logprobs
        later._output.logprobs = logprobs._replace(logprobs=np.full_like(logprobs.logprobs, -self.updates))
        return later
