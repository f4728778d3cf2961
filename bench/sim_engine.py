"""A vLLM engine as a discrete-event model: blocks, queue and prefix cache exact, seconds from `bench.sim_costs`.

What it keeps of vLLM V1
- Waiting requests are taken first come first served, at most max_num_seqs, a prompt in chunks within
  max_num_batched_tokens; running requests grow before anything is admitted.
- Without a block for growth the youngest running request is preempted: it goes to the head of the queue and is
  computed again from what the prefix cache still holds.
- Freed blocks stay in the prefix cache, the least recently freed are evicted first and of one request its tail first; a
  group's prompt is shared and counted by reference.

What it leaves out: the blocks of a whole prompt are taken when its first chunk is; blocks that were never full are
reused first; no scheduling bubble between steps.

Between two events all steps are alike but for one token more per request. `begin` opens a segment of as many of them as
nothing can happen in; `end` closes it. `cut` shortens it to the next step boundary when a request comes or goes.

Invariants (`check`): blocks held, cached and free add up to all of them; the sums over requests are those kept.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass

from bench.sim_costs import Machine
from engine.ports import KvSample


@dataclass(slots=True)
class Request:
    """One turn of trajectory `key`: tokens to have in the cache first, then `generate` tokens to come.

    prompt_tokens: length of the prompt that the group shares. held: tokens of it in whole blocks that an engine had
    computed before; what of them is not found in the cache is recomputed.
    """

    key: int
    group: int
    prompt_tokens: int
    tokens: int
    generate: int
    held: int = 0
    left: int = 0  # prompt tokens still to be computed
    start: int = 0  # tokens in the cache = tokens + (engine's steps - start)
    last_step: int = 0  # the engine's count of steps when it ends


@dataclass(slots=True)
class Outcome:
    """What a segment brought: the sample at its end; turns that ended; requests aborted, with what is left of them."""

    sample: KvSample
    finished: list[Request]
    aborted: list[Request]


class Engine:
    """host_blocks: KV blocks in host memory to which all that is computed is copied (0: none)."""

    def __init__(self, machine: Machine, host_blocks: int = 0, longest_segment: int = 32) -> None:
        self.machine = machine
        self.longest_segment = longest_segment  # steps; an engine reports at least that often
        self.busy_s = 0.0
        self.preemptions = 0
        self.prefilled_tokens = 0
        self.recomputed_tokens = 0
        self.restored_tokens = 0
        self.steps = 0
        self._waiting: deque[Request] = deque()
        self._running: dict[int, Request] = {}  # in order of admission
        self._prefilling: dict[int, Request] = {}
        self._ends: list[tuple[int, int, Request]] = []
        self._free = machine.blocks
        self._cached: OrderedDict[int, int] = (
            OrderedDict()
        )  # own blocks of a trajectory, or of group g's prompt: -1 - g
        self._cached_blocks = 0
        self._users: dict[int, int] = {}  # of a group's prompt
        self._phases = [0] * machine.block_size  # decoding requests by (tokens in cache - steps) modulo the block
        self._kv_tokens = 0  # of decoding requests
        self._serial = 0
        self._aborts: set[int] = set()
        self._host: OrderedDict[int, int] = OrderedDict()
        self._host_blocks, self._host_used = host_blocks, 0
        self._segment: tuple[float, float, float, int] | None = None  # start, first step's seconds, growth, steps
        self._chunks: list[tuple[Request, int]] = []
        self._preempted = self._prefilled = self._restoring = 0

    @property
    def idle(self) -> bool:
        return self._segment is None

    @property
    def free_blocks(self) -> int:
        """As vLLM counts them: with what the prefix cache holds."""
        return self._free + self._cached_blocks

    def submit(self, request: Request) -> None:
        if math.ceil((request.tokens + request.generate) / self.machine.block_size) > self.machine.blocks:
            raise ValueError(f"request {request.key} of {request.tokens} + {request.generate} tokens can never fit")
        self._waiting.append(request)

    def abort(self, key: int) -> None:
        """Takes effect at the end of the segment."""
        self._aborts.add(key)

    def begin(self, now: float) -> float | None:
        """Opens a segment; the time of its end, or None when there is nothing to do."""
        self._make_room()
        if not self._preempted:
            self._admit()
        if not self._running:
            assert not self._waiting, "an empty engine takes any request that fits at all"
            return None
        costs, decoding = self.machine.costs, len(self._running) - len(self._prefilling)
        steps, work = 1, 0.0
        if self._prefilling:
            budget = self.machine.max_num_batched_tokens - decoding
            for request in self._prefilling.values():
                chunk = min(request.left, budget)
                if chunk < 1:
                    break
                self._chunks.append((request, chunk))
                budget -= chunk
                self._prefilled += chunk
                work += chunk * (request.tokens - request.left + chunk / 2)
        else:
            steps = self._quiet_steps()
        first_s = costs.step_s(decoding, self._kv_tokens, self._prefilled, work) + costs.restore * self._restoring
        self._segment = (now, first_s, costs.c * decoding, steps)
        return now + self._seconds(steps)

    def cut(self, now: float) -> float | None:
        """Ends the segment at the first step boundary from `now` on; None when there is none."""
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
        """Closes the segment."""
        assert self._segment is not None
        steps, seconds = self._segment[3], self._seconds(self._segment[3])
        decoding = len(self._running) - len(self._prefilling)
        if decoding:
            self._take(self._growth(steps))
        self.steps += steps
        self.busy_s += seconds
        self._kv_tokens += steps * decoding
        for request, chunk in self._chunks:
            request.left -= chunk
            if not request.left:
                del self._prefilling[request.key]
                self._decode(request)
        finished = []
        while (first := self._first_end()) is not None and first.last_step <= self.steps:
            self._release(first)
            finished.append(first)
        aborted = [stopped for key in sorted(self._aborts) if (stopped := self._stop(key)) is not None]
        self._aborts.clear()
        sample = KvSample(
            free_blocks=self.free_blocks,
            running=len(self._running),
            waiting=len(self._waiting),
            preempted=self._preempted,
            prefilled=self._prefilled,
            steps=steps,
        )
        self.prefilled_tokens += self._prefilled
        self.restored_tokens += self._restoring
        self.preemptions += self._preempted
        self._segment, self._chunks, self._preempted, self._prefilled, self._restoring = None, [], 0, 0, 0
        return Outcome(sample, finished, aborted)

    def check(self) -> None:
        """Raises AssertionError when an invariant does not hold."""
        size = self.machine.block_size
        decoding = [request for request in self._running.values() if not request.left]
        held = sum(self._own_blocks(request) for request in self._running.values())
        shared = {request.group: request.prompt_tokens // size for request in self._running.values()}
        assert held + sum(shared.values()) + self._cached_blocks + self._free == self.machine.blocks
        assert self._free >= 0
        assert self._cached_blocks == sum(self._cached.values())
        assert all(count > 0 for count in self._cached.values())
        assert set(shared) == set(self._users)
        assert sum(self._users.values()) == len(self._running)
        assert self._kv_tokens == sum(self._in_cache(request) for request in decoding)
        assert sum(self._phases) == len(decoding) == len(self._running) - len(self._prefilling)
        assert not self._running.keys() & self._cached.keys()

    def _seconds(self, steps: int) -> float:
        assert self._segment is not None
        _, first_s, growth_s, _ = self._segment
        return steps * first_s + growth_s * steps * (steps - 1) / 2

    def _growth(self, steps: int) -> int:
        """Blocks that decoding requests need for that many steps."""
        size = self.machine.block_size
        rounds, rest = divmod(steps, size)
        blocks = rounds * (len(self._running) - len(self._prefilling))
        return blocks + sum(self._phases[-(self.steps + step) % size] for step in range(rest))

    def _quiet_steps(self) -> int:
        """Decoding steps in which nothing ends and nothing is preempted."""
        if self._preempted:
            return 1  # the next step may admit again
        first = self._first_end()
        assert first is not None
        steps = min(self.longest_segment, first.last_step - self.steps)
        while self._growth(steps) > self.free_blocks:
            steps -= 1
        return steps

    def _first_end(self) -> Request | None:
        """The running request that ends first; entries of those preempted or aborted meanwhile are dropped."""
        while self._ends:
            step, _, request = self._ends[0]
            if self._running.get(request.key) is request and request.last_step == step:
                return request
            heapq.heappop(self._ends)
        return None

    def _make_room(self) -> None:
        """Preempts the youngest until the others can decode one step."""
        while self._growth(1) > self.free_blocks:
            request = next(reversed(self._running.values()))
            self._waiting.appendleft(self._interrupt(request))
            self._preempted += 1

    def _admit(self) -> None:
        machine = self.machine
        growth = self._growth(1)
        budget = machine.max_num_batched_tokens - len(self._running) + len(self._prefilling)
        budget -= sum(request.left for request in self._prefilling.values())
        while self._waiting and len(self._running) < machine.max_num_seqs and budget > 0:
            request = self._waiting[0]
            there, own, unused = self._hits(request)
            blocks = math.ceil(request.tokens / machine.block_size)
            in_use = request.prompt_tokens // machine.block_size if request.group in self._users else 0
            if blocks - in_use > self.free_blocks - growth:
                return
            self._waiting.popleft()
            self._hold(request, own, unused)
            self._take(blocks - there)
            most = (request.tokens - 1) // machine.block_size  # the last token is always computed
            hit = min(there, most)
            restored = max(0, min(self._host.get(request.key, 0), most) - hit)
            found = (hit + restored) * machine.block_size
            self._restoring += restored * machine.block_size
            self.recomputed_tokens += max(0, request.held - found)
            request.left = request.tokens - found
            self._running[request.key] = self._prefilling[request.key] = request
            budget -= request.left

    def _hits(self, request: Request) -> tuple[int, int, int]:
        """Blocks of it that are there: all, its own that are cached, its group's prompt that nobody uses now."""
        shared = request.prompt_tokens // self.machine.block_size
        unused = self._cached.get(-1 - request.group, 0)
        there = shared if request.group in self._users else unused
        own = self._cached.get(request.key, 0) if there == shared else 0
        return there + own, own, unused

    def _hold(self, request: Request, own: int, unused: int) -> None:
        """Takes its blocks and its group's prompt out of what may be evicted."""
        self._cached_blocks -= own + unused
        if own:
            del self._cached[request.key]
        if unused:
            del self._cached[-1 - request.group]
        self._users[request.group] = self._users.get(request.group, 0) + 1

    def _take(self, blocks: int) -> None:
        """Blocks for use: the unused, then the longest unused of the cache."""
        fresh = min(blocks, self._free)
        self._free -= fresh
        blocks -= fresh
        while blocks:
            entry = next(iter(self._cached))
            count = self._cached[entry]
            evicted = min(count, blocks)
            if evicted == count:
                del self._cached[entry]
            else:
                self._cached[entry] = count - evicted
            self._cached_blocks -= evicted
            blocks -= evicted

    def _decode(self, request: Request) -> None:
        """Its prompt is in the cache and its first token sampled."""
        request.start = self.steps
        request.last_step = self.steps + request.generate - 1
        self._phases[(request.tokens - self.steps) % self.machine.block_size] += 1
        self._kv_tokens += request.tokens
        self._serial += 1
        heapq.heappush(self._ends, (request.last_step, self._serial, request))

    def _in_cache(self, request: Request) -> int:
        """Tokens of it that were computed."""
        return request.tokens - request.left if request.left else request.tokens + self.steps - request.start

    def _own_blocks(self, request: Request) -> int:
        size = self.machine.block_size
        tokens = request.tokens if request.left else self._in_cache(request)
        return math.ceil(tokens / size) - request.prompt_tokens // size

    def _release(self, request: Request) -> None:
        """Its blocks become evictable; what it computed stays cached."""
        size, shared = self.machine.block_size, request.prompt_tokens // self.machine.block_size
        computed, own = self._in_cache(request), self._own_blocks(request)
        cached = max(0, computed // size - shared)
        del self._running[request.key]
        if request.left:
            del self._prefilling[request.key]
        else:
            self._phases[(request.tokens - request.start) % size] -= 1
            self._kv_tokens -= computed
        self._free += own - cached
        self._cached_blocks += cached
        if cached:
            self._cached[request.key] = cached
        self._users[request.group] -= 1
        if not self._users[request.group]:
            del self._users[request.group]
            if shared:
                self._cached[-1 - request.group] = shared
                self._cached_blocks += shared
        self._copy_to_host(request.key, computed // size)

    def _copy_to_host(self, key: int, blocks: int) -> None:
        if not self._host_blocks:
            return
        self._host_used += blocks - self._host.pop(key, 0)
        self._host[key] = blocks
        while self._host_used > self._host_blocks:
            self._host_used -= self._host.popitem(last=False)[1]

    def _interrupt(self, request: Request) -> Request:
        """Stops a running one; it holds what is still to be done."""
        computed = self._in_cache(request)
        self._release(request)
        if not request.left:
            sampled = computed - request.tokens + 1
            request.tokens += sampled
            request.generate -= sampled
        request.held = max(request.held, computed // self.machine.block_size * self.machine.block_size)
        request.left, request.last_step = 0, -1
        return request

    def _stop(self, key: int) -> Request | None:
        request = self._running.get(key)
        if request is not None:
            return self._interrupt(request)
        request = next((other for other in self._waiting if other.key == key), None)
        if request is not None:
            self._waiting.remove(request)
        return request
