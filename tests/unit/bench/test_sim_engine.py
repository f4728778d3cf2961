"""The simulated engine: what it computes, counts and forgets, against hand-made cases and a model with real blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.simulator.cache import KvCache
from bench.simulator.engine import Engine, Outcome, Request
from bench.simulator.machine import Machine
from engine.balancing.step_cost import StepCost
from tests.support.examples import examples

UNIT = StepCost(fixed_s=1.0, per_request_s=0.0, per_token_s=0.0)  # every step takes a second
SMALL = Machine(blocks=8, block_size=4, cost=UNIT, max_num_seqs=4, max_num_batched_tokens=16)


def request(key: int, tokens: int, generate: int, group: int | None = None, prompt: int = 0, held: int = 0) -> Request:
    return Request(key, key if group is None else group, prompt, tokens, generate, held)


def run(engine: Engine, each: Callable[[float, Outcome], None] | None = None, now: float = 0.0) -> dict[int, float]:
    """Until it is idle; when each request ended."""
    ended: dict[int, float] = {}
    while (until := engine.begin(now)) is not None:
        now = until
        outcome = engine.end()
        engine.check()
        ended |= {finished.key: now for finished in outcome.finished}
        if each:
            each(now, outcome)
    return ended


def test_one_request_takes_a_step_per_token() -> None:
    engine = Engine(SMALL)
    engine.submit(request(1, tokens=5, generate=6))
    samples = []
    assert run(engine, lambda now, outcome: samples.append(outcome.sample)) == {1: 6.0}
    assert sum(sample.steps for sample in samples) == 6, "the first token comes with the prompt"
    assert samples[0].prefilled == 5
    assert [sample.running for sample in samples] == [1, 0]
    assert engine.cache.free == 8


def test_a_segment_ends_where_the_first_of_its_requests_does() -> None:
    engine = Engine(SMALL)
    engine.submit(request(1, tokens=4, generate=9))
    engine.submit(request(2, tokens=4, generate=3))
    segments = []
    assert run(engine, lambda now, outcome: segments.append(outcome.sample.steps)) == {2: 3.0, 1: 9.0}
    assert segments == [1, 2, 6]


def test_seconds_grow_with_the_kv_that_is_read() -> None:
    cost = StepCost(fixed_s=1.0, per_request_s=0.375, per_kv_token_s=0.5, per_token_s=0.125)
    engine = Engine(replace(SMALL, cost=cost))
    engine.submit(request(1, tokens=2, generate=4))
    prefill = 1 + 0.125 * 2
    decode = sum(1 + 0.375 + 0.5 * kv for kv in (2, 3, 4))
    assert run(engine)[1] == pytest.approx(prefill + decode)
    assert engine.busy_s == pytest.approx(prefill + decode)


def test_a_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    engine = Engine(replace(SMALL, blocks=20))
    engine.submit(request(1, tokens=4, generate=10))
    engine.submit(request(2, tokens=40, generate=1))
    prefilled = []
    ended = run(engine, lambda now, outcome: prefilled.append(outcome.sample.prefilled))
    assert prefilled[:3] == [16, 15, 13], "16 a step, less one for the decoding request"
    assert ended == {2: 3.0, 1: 10.0}


def test_the_youngest_is_preempted_and_its_cached_prefix_found_again() -> None:
    """8 blocks of 4: both hold 4 with 16 tokens; the 17th token of the first takes the tail of the second's."""
    engine = Engine(SMALL)
    engine.submit(request(1, tokens=8, generate=12))
    engine.submit(request(2, tokens=8, generate=12))
    samples = []
    ended = run(engine, lambda now, outcome: samples.append(outcome.sample))
    assert engine.preemptions == sum(sample.preempted for sample in samples) == 1
    assert ended[1] == 12.0
    # the first one ends at 12 with 19 tokens computed, 5 blocks: 3 of the second's 4 were still cached
    assert engine.recomputed_tokens == 16 - 12
    assert engine.prefilled_tokens == 16 + 5
    assert ended[2] == 12.0 + 3, "tokens 10, 11 and 12"


def test_nobody_overtakes_a_preempted_request() -> None:
    engine = Engine(SMALL)
    for number, (tokens, generate) in enumerate([(8, 12), (8, 12), (20, 1)]):
        engine.submit(request(number, tokens, generate))
    assert run(engine) == {0: 12.0, 1: 15.0, 2: 17.0}
    assert engine.preemptions == 1


def test_a_group_shares_its_prompt() -> None:
    engine = Engine(SMALL)
    engine.submit(request(1, tokens=8, generate=2, group=0, prompt=8))
    engine.submit(request(2, tokens=8, generate=2, group=0, prompt=8))
    engine.begin(0.0)
    assert engine.cache.free == 6
    engine.end()
    assert engine.prefilled_tokens == 8 + 4, "a block of the second is computed for its last token's logits"


def test_the_next_turn_finds_what_the_last_left() -> None:
    engine = Engine(SMALL)
    engine.submit(request(1, tokens=6, generate=4))
    run(engine)  # 9 of its 10 tokens are computed: 2 blocks stay
    engine.submit(request(1, tokens=13, generate=1, held=8))
    run(engine)
    assert (engine.prefilled_tokens, engine.recomputed_tokens) == (6 + 5, 0)
    engine.submit(request(2, tokens=31, generate=1))  # all 8 blocks
    run(engine)
    engine.submit(request(1, tokens=14, generate=1, held=12))
    run(engine)
    assert engine.recomputed_tokens == 12


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"request 1 of 30 \+ 3 tokens"):
        Engine(SMALL).submit(request(1, tokens=30, generate=3))


@pytest.mark.parametrize("growth", [0.0, 0.25])
def test_cut_ends_at_the_next_step_boundary(growth: float) -> None:
    engine = Engine(replace(SMALL, cost=replace(UNIT, per_kv_token_s=growth)))
    engine.submit(request(1, tokens=4, generate=10))
    now = engine.begin(0.0)
    assert now == 1.0
    engine.end()
    assert engine.begin(1.0) == pytest.approx(1 + 9 + growth * sum(range(4, 13)))
    boundary = 1 + 3 + growth * (4 + 5 + 6)
    assert engine.cut(boundary - 0.4) == pytest.approx(boundary)
    assert engine.cut(boundary) == pytest.approx(boundary), "on the boundary: that one"
    assert engine.end().sample.steps == 3


@examples(60)
@given(
    st.lists(st.tuples(st.integers(1, 22), st.integers(1, 10), st.integers(0, 3)), min_size=1, max_size=12),
    st.lists(st.tuples(st.floats(0.1, 30), st.integers(0, 11)), max_size=6),
    st.sampled_from([1, 5, 32]),
)
def test_every_token_is_generated_once_whatever_is_aborted(
    wanted: list[tuple[int, int, int]], aborts: list[tuple[float, int]], longest: int
) -> None:
    """An aborted request comes back at once with what is left of it."""
    engine = Engine(SMALL, longest_segment=longest)
    left = {}
    for key, (tokens, generate, group) in enumerate(wanted):
        prompt = min(tokens, (3, 4, 9, 12)[group])
        left[key] = tokens + generate
        engine.submit(request(key, tokens, generate, group=100 * group + prompt, prompt=prompt))
    now, pending = 0.0, sorted(aborts)
    while (until := engine.begin(now)) is not None:
        while pending and pending[0][0] <= until:
            at, key = pending.pop(0)
            engine.abort(key)
            cut = engine.cut(max(at, now))
            assert cut is not None
            assert now < cut <= until + 1e-9
            until = cut
        now = until
        outcome = engine.end()
        engine.check()
        for request_ in outcome.finished:
            assert left.pop(request_.key) == request_.tokens + request_.generate
        for request_ in outcome.aborted:
            assert left[request_.key] == request_.tokens + request_.generate
            assert request_.generate > 0
            engine.submit(request_)
    assert not left
    assert engine.cache.free == SMALL.blocks


class Blocks:
    """Prefix cache with a block for a block, as a list in the order of eviction."""

    def __init__(self, blocks: int) -> None:
        self.unused = blocks
        self.cached: list[tuple[int, int]] = []  # (key or -1 - group, number of the block)
        self.users: dict[int, int] = {}

    def cached_of(self, key: int, group: int, shared: int) -> int:
        prompt = shared if group in self.users else self._prefix(-1 - group)
        return prompt + (self._prefix(key) if prompt == shared else 0)

    def _prefix(self, name: int) -> int:
        count = 0
        while (name, count) in self.cached:
            count += 1
        return count

    def hold(self, key: int, group: int, shared: int, blocks: int) -> None:
        own = 0 if self.cached_of(key, group, shared) < shared else self._prefix(key)
        prompt = shared if group in self.users else self._prefix(-1 - group)
        for block in [(key, n) for n in range(own)] + [(-1 - group, n) for n in range(prompt)]:
            if block in self.cached:
                self.cached.remove(block)
        self.unused += sum(name == key for name, _ in self.cached)
        self.cached = [block for block in self.cached if block[0] != key]
        self.users[group] = self.users.get(group, 0) + 1
        self.take(blocks - own - prompt)

    def take(self, blocks: int) -> None:
        for _ in range(blocks):
            if self.unused:
                self.unused -= 1
            else:
                self.cached.pop(0)

    def release(self, key: int, group: int, shared: int, blocks: int, full: int) -> None:
        own = max(0, full - shared)
        self.unused += blocks - shared - own
        self.cached += [(key, n) for n in reversed(range(own))]
        self.users[group] -= 1
        if not self.users[group]:
            del self.users[group]
            self.cached += [(-1 - group, n) for n in reversed(range(shared))]


@examples(150)
@given(st.data())
def test_counted_blocks_are_evicted_as_real_ones(data: st.DataObject) -> None:
    total = 24
    counted, real = KvCache(total), Blocks(total)
    running: dict[int, tuple[int, int, int]] = {}  # group, shared, blocks
    for _ in range(data.draw(st.integers(1, 40))):
        key = data.draw(st.integers(0, 7))
        group = key % 3
        shared = (0, 2, 3)[group]
        if key in running:
            blocks = running.pop(key)[2]
            full = data.draw(st.integers(max(shared, blocks - 1), blocks))
            counted.release(key, group, shared, blocks, full)
            real.release(key, group, shared, blocks, full)
        else:
            cached = counted.cached_of(key, group, shared)
            assert cached == real.cached_of(key, group, shared)
            blocks = max(cached, shared) + data.draw(st.integers(0, 6))
            in_use = shared if counted.in_use(group) else 0
            if blocks - in_use <= counted.free:
                counted.hold(key, group, shared, blocks)
                real.hold(key, group, shared, blocks)
                running[key] = (group, shared, blocks)
        counted.check([(key, *row) for key, row in running.items()])
        assert counted.free == real.unused + len(real.cached)
        for other in set(range(8)) - running.keys():
            assert counted.cached_of(other, other % 3, (0, 2, 3)[other % 3]) == real.cached_of(
                other, other % 3, (0, 2, 3)[other % 3]
            )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cost": replace(UNIT, per_kv_token_s=-1)}, "per_kv_token_s"),
        ({"cost": replace(UNIT, fixed_s=0)}, "fixed_s"),
        ({"blocks": 0}, "blocks"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens"),
    ],
)
def test_a_machine_says_what_is_wrong(changes: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(SMALL, **changes)
