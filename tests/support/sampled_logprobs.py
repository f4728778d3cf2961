"""An engine that samples the same tokens one at a time and in bundles: sizes and log-probabilities, as JSON."""

from __future__ import annotations

import asyncio
import json

from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.port import Sampling
from engine.rollout.chat_template import ChatTemplate
from recipes.conversation import a_replica
from tests.support.paths import TINY

BUNDLE = 16
TOKENS = 4 * BUNDLE
WAYS = {"single": (None, BUNDLE), "bundles": (frozenset(), BUNDLE), "whole": (frozenset(), 1000)}


async def main():
    found = {}
    prompt = ChatTemplate.load(TINY).prompt_ids([{"role": "user", "content": "What is 6 * 7?"}])
    config = ReplicaConfig(checkpoint=str(TINY), max_model_len=256, max_num_seqs=4, kv_blocks=64)
    async with a_replica(config) as replica:
        for name, (deliver_at, bundle) in WAYS.items():
            sampling = Sampling(
                max_tokens=TOKENS,
                temperature=1.0,
                seed=5,
                stop_token_ids=(),
                ignore_eos=True,
                deliver_at=deliver_at,
                bundle=bundle,
            )
            deltas = [delta async for delta in replica.generate(prompt, sampling, name)]
            ids = [token for delta in deltas for token in delta.token_ids]
            scored = await replica.logprobs([[*prompt, *ids]])
            found[name] = {
                "tokens": [len(delta.token_ids) for delta in deltas],
                "logprobs": [list(delta.logprobs) for delta in deltas],
                "scored": scored[len(prompt) - 1 :].tolist(),
            }
    print(json.dumps(found))


if __name__ == "__main__":
    prepare_environment()
    asyncio.run(main())
