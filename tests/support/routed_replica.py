"""Compares the routes of a real engine on the CPU with transformers' routers: `routed_replica FAMILY`.

A shared prompt that is computed once, turns that end in bundles, a second turn, a preemption by new weights in the
middle of a turn.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from engine.replica.config import ReplicaConfig
from engine.replica.port import Sampling
from engine.replica.replica import Replica
from engine.rollout.token_buffer import TokenBuffer


async def turn(replica, buffer, name, tokens, **options):
    """Samples a turn into the buffer, and checks that each delta has the routes of all before its last token."""
    sampling = Sampling(
        max_tokens=tokens,
        temperature=1.0,
        seed=7,
        stop_token_ids=(),
        ignore_eos=True,
        routes_from=buffer.routed,
        deliver_at=frozenset(),
        bundle=8,
    )
    deltas = []
    async for delta in replica.generate(buffer.ids, sampling, name):
        buffer.append_sampled(delta)
        assert buffer.routed == len(buffer) - 1, (name, buffer.routed, len(buffer))
        deltas.append(delta)
        if "after" in options and len(deltas) == options["after"]:
            options["event"].set()
    return deltas


async def main(family):
    from tests.support.mixture import differing, own_routes, write_gpt_oss, write_mixture

    write = {"qwen3_moe": write_mixture, "gpt_oss": write_gpt_oss}[family]
    with tempfile.TemporaryDirectory() as folder:
        old, new = (write(Path(folder, f"weights-{seed}"), seed) for seed in (0, 1))
        config = ReplicaConfig(checkpoint=str(old), returns_routes=True, max_model_len=512, max_num_seqs=8)
        replica = Replica(config, 0, None, lambda *_: None)
        await replica.start()
        try:
            prompt = [(7 * at) % 500 + 3 for at in range(100)]
            first = TokenBuffer(prompt)
            await turn(replica, first, "first", 20)
            others = [TokenBuffer([*prompt, 5 + at]) for at in range(3)]
            deltas = await asyncio.gather(*(turn(replica, it, f"o{n}", 30) for n, it in enumerate(others)))
            assert all(each[0].cached_tokens >= 96 for each in deltas), [each[0].cached_tokens for each in deltas]
            others[0].append_given([9, 8, 7, 6])
            again = await turn(replica, others[0], "second turn", 20)
            assert again[0].routes_from == 130
            assert again[0].cached_tokens >= 96
            for buffer in (first, *others):
                ids = list(buffer.ids)[: buffer.routed]
                wrong = differing(buffer.routes.ids_PXE, own_routes(old, ids))
                assert not wrong, f"{len(wrong)} of {len(ids)} positions: {wrong[:10]}"
            reached, updated = asyncio.Event(), TokenBuffer(prompt)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(turn(replica, updated, "updated", 200, after=3, event=reached))
                await reached.wait()
                await replica.update_weights(str(new / "model.safetensors"), 1)
            spans = task.result()[-1].spans
            assert [version for version, _, _ in spans] == [-1, 1], spans
            change = len(prompt) + spans[1][1] - 1  # the last old token is an input of the new weights
            ids = list(updated.ids)[: updated.routed]
            routes = updated.routes.ids_PXE
            before = differing(routes[:change], own_routes(old, ids[:change]))
            after = differing(routes[change:], own_routes(new, ids)[change:])
            assert (before, after) == ([], []), change
            print(f"{len(ids)} positions with a change at {change} agree", file=sys.stderr)
        finally:
            await replica.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
