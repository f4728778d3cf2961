"""A vLLM engine as a discrete-event model: queue, blocks and prefix cache step by step, seconds by its machine's cost.

What it keeps of vLLM V1
- Waiting requests are taken first come first served, at most max_num_seqs, a prompt in chunks within
  max_num_batched_tokens; running requests grow before anything is admitted.
- Without a block for growth the youngest running request is preempted: it goes to the head of the queue and is
  computed again from what the prefix cache still holds (`bench.simulator.cache`). It needs what it held, so that
  nothing is admitted until something ends.

What it leaves out: the blocks of a whole prompt are taken with its first chunk, and steps follow each other at once.

Between two events all steps are alike but for one token more per request. `begin` opens a segment of as many steps as
nothing can happen in, and `end` closes it. `cut` shortens it to the next step boundary when a request comes or goes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

from bench.simulator.cache import KvCache
from bench.simulator.machine import Machine
from engine.replica.port import KvSample


@dataclass(slots=True)
class Request:
    """One turn of trajectory `key`: tokens that the cache must hold first, and `generate` tokens that follow.

    prompt_tokens: length of the prompt that the group shares. held: tokens in whole blocks that an engine had computed
    before; those that the cache has lost are recomputed.
    """

    key: int
    group: int
    prompt_tokens: int
    tokens: int
    generate: int
    held: int = 0
    to_prefill: int = 0  # prompt tokens still to be computed
    start: int = 0  # tokens in the cache = tokens + (engine's steps - start)
    last_step: int = 0  # the engine's count of steps when it ends


@dataclass(slots=True)
class Outcome:
    """What a segment brought: a sample at its end, turns that ended, and aborted requests with their remaining work."""

    sample: KvSample
    finished: list[Request]
    aborted: list[Request]


class Engine:
    """longest_segment: steps; an engine that runs gives a sample at least that often."""

    def __init__(self, machine: Machine, longest_segment: int = 32) -> None:
        self.machine = machine
        self.longest_segment = longest_segment
        self.cache = KvCache(machine.blocks)
        self.busy_s = 0.0
        self.steps = 0
        self.preemptions = 0
        self.prefilled_tokens = 0
        self.recomputed_tokens = 0  # those of them that had been computed before
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # in order of admission
        self._prefilling: dict[int, Request] = {}
        self._ends: list[tuple[int, int, Request]] = []  # a heap by the step in which they end
        self._serial = 0
        self._phases = [0] * machine.block_size  # decoding requests by (tokens in cache - steps) modulo the block
        self._kv_tokens = 0  # those of decoding requests
        self._aborts: set[int] = set()
        self._segment: tuple[float, float, float, int] | None = None  # start, first step's seconds, growth, steps
        self._chunks: list[tuple[Request, int]] = []
        self._preempted = self._prefilled = 0  # in the segment

    @property
    def idle(self) -> bool:
        return self._segment is None

    def submit(self, request: Request) -> None:
        if math.ceil((request.tokens + request.generate) / self.machine.block_size) > self.machine.blocks:
            raise ValueError(f"request {request.key} of {request.tokens} + {request.generate} tokens can never fit")
        self._waiting.append(request)

    def abort(self, key: int) -> None:
        """Stops a request at the end of the segment."""
        self._aborts.add(key)

    def begin(self, now: float) -> float | None:
        """Opens a segment. Returns the time of its end, or None when there is nothing to do."""
        self._make_room()
        self._admit()
        if not self._running:
            assert not self._waiting, "an empty engine takes any request that fits at all"
            return None
        cost, decoding = self.machine.cost, len(self._running) - len(self._prefilling)
        steps, attended = 1, 0.0
        if self._prefilling:
            budget = self.machine.max_num_batched_tokens - decoding
            for request in self._prefilling.values():
                chunk = min(request.to_prefill, budget)
                if chunk < 1:
                    break
                self._chunks.append((request, chunk))
                budget -= chunk
                self._prefilled += chunk
                attended += chunk * (request.tokens - request.to_prefill + chunk / 2)
        else:
            steps = self._quiet_steps()
        first_s = cost.step_s(decoding, prompt_tokens=self._prefilled, kv_tokens=self._kv_tokens, attended=attended)
        self._segment = (now, first_s, cost.per_kv_token_s * decoding, steps)
        return now + self._seconds(steps)

    def cut(self, now: float) -> float | None:
        """Ends the segment at the first step boundary from `now` on and returns that time; None without a segment."""
        if self._segment is None:
            return None
        start, first_s, growth_s, steps = self._segment
        passed = now - start
        if growth_s > 0:
            half = first_s - growth_s / 2
            count = math.ceil((math.sqrt(half * half + 2 * growth_s * passed) - half) / growth_s - 1e-9)
        else:
            count = math.ceil(passed / first_s - 1e-9)
        count = min(max(1, count), steps)
        self._segment = (start, first_s, growth_s, count)
        return max(now, start + self._seconds(count))

    def end(self) -> Outcome:
        """Closes the segment and returns what it brought."""
        assert self._segment is not None
        steps, seconds = self._segment[3], self._seconds(self._segment[3])
        decoding = len(self._running) - len(self._prefilling)
        if decoding:
            self.cache.take(self._growth(steps))
        self.steps += steps
        self.busy_s += seconds
        self._kv_tokens += steps * decoding
        for request, chunk in self._chunks:
            request.to_prefill -= chunk
            if not request.to_prefill:
                del self._prefilling[request.key]
                self._decode(request)
        finished = []
        while (first := self._first_end()) is not None and first.last_step <= self.steps:
            self._release(first)
            finished.append(first)
        aborted = [stopped for key in sorted(self._aborts) if (stopped := self._stop(key)) is not None]
        self._aborts.clear()
        sample = KvSample(
            free_blocks=self.cache.free,
            running=len(self._running),
            waiting=len(self._waiting),
            preempted=self._preempted,
            prefilled=self._prefilled,
            steps=steps,
        )
        self.prefilled_tokens += self._prefilled
        self.preemptions += self._preempted
        self._segment, self._chunks, self._preempted, self._prefilled = None, [], 0, 0
        return Outcome(sample, finished, aborted)

    def drop(self) -> list[Request]:
        """Ends all requests, between segments, and returns them with what is still to be done."""
        dropped = [self._interrupt(request) for request in list(self._running.values())] + list(self._waiting)
        self._waiting.clear()
        return dropped

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold. It may be called between segments."""
        decoding = [request for request in self._running.values() if not request.to_prefill]
        assert self._kv_tokens == sum(self._in_cache(request) for request in decoding)
        assert sum(self._phases) == len(decoding) == len(self._running) - len(self._prefilling)
        self.cache.check(
            [
                (request.key, request.group, self._shared(request), self._blocks(request))
                for request in self._running.values()
            ]
        )

    def _seconds(self, steps: int) -> float:
        assert self._segment is not None
        _, first_s, growth_s, _ = self._segment
        return steps * first_s + growth_s * steps * (steps - 1) / 2

    def _growth(self, steps: int) -> int:
        """Returns the blocks that decoding requests need for that many steps."""
        size = self.machine.block_size
        if steps == 1:
            return self._phases[-self.steps % size]
        rounds, rest = divmod(steps, size)
        blocks = rounds * (len(self._running) - len(self._prefilling))
        return blocks + sum(self._phases[-(self.steps + step) % size] for step in range(rest))

    def _quiet_steps(self) -> int:
        """Returns the decoding steps in which nothing ends and nothing is preempted."""
        first = self._first_end()
        assert first is not None
        steps = min(self.longest_segment, first.last_step - self.steps)
        while self._growth(steps) > self.cache.free:
            steps -= 1
        return steps

    def _first_end(self) -> Request | None:
        """Returns the running request that ends first, and drops entries of those preempted or aborted meanwhile."""
        while self._ends:
            step, _, request = self._ends[0]
            if self._running.get(request.key) is request and request.last_step == step:
                return request
            heapq.heappop(self._ends)
        return None

    def _make_room(self) -> None:
        """Preempts the youngest request until the others can decode one step."""
        while self._growth(1) > self.cache.free:
            request = next(reversed(self._running.values()))
            self._waiting.appendleft(self._interrupt(request))
            self._preempted += 1

    def _admit(self) -> None:
        if not self._waiting:
            return
        machine = self.machine
        growth = self._growth(1)
        budget = machine.max_num_batched_tokens - len(self._running) + len(self._prefilling)
        budget -= sum(request.to_prefill for request in self._prefilling.values())
        while self._waiting and len(self._running) < machine.max_num_seqs and budget > 0:
            request = self._waiting[0]
            shared, blocks = self._shared(request), math.ceil(request.tokens / machine.block_size)
            in_use = shared if self.cache.in_use(request.group) else 0
            if blocks - in_use > self.cache.free - growth:
                return
            self._waiting.popleft()
            most = (request.tokens - 1) // machine.block_size  # the last token is always computed
            hit_tokens = min(most, self.cache.cached_of(request.key, request.group, shared)) * machine.block_size
            self.cache.hold(request.key, request.group, shared, blocks)
            self.recomputed_tokens += max(0, request.held - hit_tokens)
            request.to_prefill = request.tokens - hit_tokens
            self._running[request.key] = self._prefilling[request.key] = request
            budget -= request.to_prefill

    def _decode(self, request: Request) -> None:
        """Lets a request decode whose prompt is in the cache and whose first token is sampled."""
        request.start = self.steps
        request.last_step = self.steps + request.generate - 1
        self._phases[(request.tokens - self.steps) % self.machine.block_size] += 1
        self._kv_tokens += request.tokens
        self._serial += 1
        heapq.heappush(self._ends, (request.last_step, self._serial, request))

    def _in_cache(self, request: Request) -> int:
        """Returns how many of its tokens were computed."""
        return (
            request.tokens - request.to_prefill if request.to_prefill else request.tokens + self.steps - request.start
        )

    def _shared(self, request: Request) -> int:
        """Returns the full blocks of its group's prompt."""
        return request.prompt_tokens // self.machine.block_size

    def _blocks(self, request: Request) -> int:
        tokens = request.tokens if request.to_prefill else self._in_cache(request)
        return math.ceil(tokens / self.machine.block_size)

    def _release(self, request: Request) -> None:
        size, computed = self.machine.block_size, self._in_cache(request)
        self.cache.release(request.key, request.group, self._shared(request), self._blocks(request), computed // size)
        del self._running[request.key]
        if request.to_prefill:
            del self._prefilling[request.key]
        else:
            self._phases[(request.tokens - request.start) % size] -= 1
            self._kv_tokens -= computed

    def _interrupt(self, request: Request) -> Request:
        """Stops a running request and returns it with what is still to be done."""
        computed = self._in_cache(request)
        self._release(request)
        if not request.to_prefill:
            sampled = computed - request.tokens + 1
            request.tokens += sampled
            request.generate -= sampled
        request.held = max(request.held, computed // self.machine.block_size * self.machine.block_size)
        request.to_prefill, request.last_step = 0, -1
        return request

    def _stop(self, key: int) -> Request | None:
        request = self._running.get(key)
        if request is not None:
            return self._interrupt(request)
        request = next((other for other in self._waiting if other.key == key), None)
        if request is not None:
            self._waiting.remove(request)
        return request
