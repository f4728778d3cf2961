"""Two real engines under load while they are moved from, updated, killed, stopped. Run by test_faults_engines.py.

Prints one JSON object: what each phase gave. Each turn's length is given, and decoding is greedy, or seeded where
engines are killed, so that every phase must give the tokens of an undisturbed one. Arguments: the phases, all if none.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial

from engine.balancing.balancer import Place
from engine.contracts import check_replica
from engine.errors import first_error
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.replica.config import ReplicaConfig, prepare_environment
from engine.replica.port import ReplicaDied, ReplicaMisconfigured, Sampling
from engine.replica.replica import Replica
from engine.telemetry.timeline import Timeline
from engine.types import PublishedWeights

CHECKPOINT = "recipes/tiny/agent"
CONFIG = ReplicaConfig(checkpoint=CHECKPOINT, kv_blocks=120, max_num_seqs=32, step_deadline_s=5.0)
SEED = 7
TURNS, TOKENS = 10, 80


class Restless:
    """A Balancer: each turn goes where fewest run; every `every`-th decision moves a random one."""

    def __init__(self):
        self.every, self.decisions, self.rng = 0, 0, random.Random(SEED)
        self.up, self.waiting, self.running = [], [], {}
        self.changed = asyncio.Event()

    def replica_up(self, replica, blocks, block_size):
        self.up.append(replica)
        self.changed.set()

    def replica_down(self, replica):
        self.up = [other for other in self.up if other != replica]
        self.running = {key: home for key, home in self.running.items() if home != replica}
        self.changed.set()

    def replica_drain(self, replica):
        self.up.remove(replica)

    def sample(self, replica, sample, now): ...

    def request_turn(self, key, group, prompt_tokens, tokens, now):
        self.waiting.append(key)

    def turn_finished(self, key, tokens, now):
        self.running.pop(key, None)

    def trajectory_ended(self, key, tokens, finished):
        self.running.pop(key, None)
        self.waiting = [other for other in self.waiting if other != key]

    def decide(self, now):
        places = []
        self.decisions += 1
        while self.up and self.waiting:
            homes = [*self.running.values()]
            places.append(self._go(self.waiting.pop(0), min(self.up, key=homes.count), "fewest"))
        if self.every and not self.decisions % self.every and self.running and len(self.up) > 1:
            key = self.rng.choice([*self.running])
            places.append(self._go(key, next(index for index in self.up if index != self.running[key]), "restless"))
        return places

    def _go(self, key, replica, rule):
        self.running[key] = replica
        return Place(key, replica, rule, 0.0)

    async def until(self, holds):
        """Until `holds()`, which is asked again whenever a replica comes or goes."""
        async with asyncio.timeout(150):
            while not holds():
                self.changed.clear()
                await self.changed.wait()


class Load:
    """Turns on a fleet; `until` so many tokens of all of them together."""

    def __init__(self, fleet):
        self.fleet, self.total, self.keys, self.spans = fleet, 0, 0, []
        self.seeded = False  # else greedy
        self.marks, self.rates = {}, []  # of all(): tokens per second
        self.served = Counter()  # of all(): tokens of each replica
        rng = random.Random(SEED)
        self.prompts = [[rng.randrange(3, 500) for _ in range(rng.randrange(20, 90))] for _ in range(TURNS)]

    async def play(self, prompt, tokens=TOKENS):
        self.keys += 1
        key, found = self.keys, []
        sampling = Sampling(
            max_tokens=tokens,
            temperature=1.0 if self.seeded else 0.0,
            seed=SEED + self.prompts.index(prompt) if self.seeded else None,
            stop_token_ids=(),
            ignore_eos=True,
            deliver_at=frozenset(),
        )
        try:
            async for replica, delta in self.fleet.turn(key, key, prompt, sampling):
                found += delta.token_ids
                self.served[replica] += len(delta.token_ids)
                self.total += len(delta.token_ids)
                for mark in [mark for mark in self.marks if mark <= self.total]:
                    self.marks.pop(mark).set()
            self.spans += delta.spans
        finally:
            self.fleet.trajectory_ended(key, len(prompt) + len(found), finished=True)
        return found

    def all(self):
        self.total, self.spans = 0, []
        self.served.clear()
        return self._all()

    async def _all(self):
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.play(prompt), name="turn") for prompt in self.prompts]
        self.rates.append(self.total / (time.perf_counter() - started))
        return [task.result() for task in tasks]

    async def until(self, tokens):
        if self.total < tokens:
            self.marks[tokens] = asyncio.Event()
            await self.marks[tokens].wait()

    async def kill(self, times):
        """kill -9 of a random engine after a random number of tokens, then of what replaced it, `times` times in all.

        The other engine lives: a turn that two engines die under is ended, and is no matter of this test.
        """
        rng, killed = random.Random(SEED), []
        [spared] = rng.sample(pids(self.fleet), 1)

        def next_one():
            return [pid for pid in pids(self.fleet) if pid not in (*killed, spared)]

        for begin in range(times):
            await self.until((begin + rng.random()) * TURNS * TOKENS / times)
            await self.fleet._balancer.until(next_one)
            killed += next_one()
            os.kill(killed[-1], signal.SIGKILL)
        return killed


def pids(fleet):
    return [replica.pid for replica in fleet._supervisor.live.values()]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def fleet_of(balancer, **config):
    settings = FleetConfig(replicas=2, watch_s=0.2, **config)
    return Fleet(settings, partial(Replica, CONFIG), balancer, Timeline())


async def under_faults(found):
    balancer = Restless()
    async with fleet_of(balancer, restarts=20, drain_s=0.05) as fleet:
        load = Load(fleet)
        quiet = await load.all()
        found["quiet"] = sorted({len(tokens) for tokens in quiet})
        found["preemptions"], found["prefilled"] = fleet.preemptions, fleet.prefilled

        balancer.every = 4
        found["moved"] = await load.all() == quiet
        found["moves"], balancer.every = fleet.moves, 0

        async with asyncio.TaskGroup() as group:
            running = group.create_task(load.all(), name="load")
            await load.until(TURNS * TOKENS // 3)
            await fleet.update_weights(PublishedWeights(f"{CHECKPOINT}/model.safetensors", 1, None))
        found["updated"] = running.result() == quiet
        found["versions"] = sorted({version for version, _, _ in load.spans})

        before = pids(fleet)
        load.rates, load.seeded = [], True
        undisturbed = await load.all()
        found["sampled"] = undisturbed != quiet
        async with asyncio.TaskGroup() as group:
            running = group.create_task(load.all(), name="load")
            killed = group.create_task(load.kill(3), name="killer")
        found["killed"] = running.result() == undisturbed
        load.seeded = False
        await balancer.until(lambda: fleet.deaths >= 3 and len(fleet.live) == 2)
        await load.all()  # replacements warm up
        await load.all()
        names = ("before", "while engines are killed", "first after", "after")
        found["tokens_per_s"] = dict(zip(names, load.rates, strict=True))
        found["served"] = dict(load.served)

        async with asyncio.TaskGroup() as group:
            running = group.create_task(load.all(), name="load")
            await load.until(TURNS * TOKENS // 4)
            stopped = pids(fleet)[1]
            os.kill(stopped, signal.SIGSTOP)
        # Had all its turns ended when it was stopped (outputs come many at once), the next ones find it.
        found["stopped"] = running.result() == quiet == await load.all()
        await balancer.until(lambda: fleet.deaths >= 4 and len(fleet.live) == 2)
        found["deaths"] = fleet.deaths
        found["recovered"] = await load.all() == quiet

        ours = [*before, *killed.result(), stopped, *pids(fleet)]
        async with asyncio.TaskGroup() as group:
            running = group.create_task(load.all(), name="load")
            await load.until(TURNS * TOKENS // 4)
            await fleet.drain(0)
        found["drained"] = running.result() == quiet
        found["live"] = fleet.live
        found["in_books"] = [*balancer.waiting, *balancer.running]
        await check_replica(fleet._supervisor.live[1], [5, 6, 7, 8], 2, f"{CHECKPOINT}/model.safetensors", 2)
        try:
            await load.play([5, 512])
        except ValueError as error:
            found["refused"] = str(error)
        found["unharmed"] = await load.all() == quiet
    found["left"] = [pid for pid in ours if alive(pid)]


BORN = []  # where an engine writes its pid as soon as it is forked
os.register_at_fork(after_in_child=lambda: [os.write(pipe, b"%8d" % os.getpid()) for pipe in BORN])


async def killed_at_birth(found):
    """The first engines are killed as soon as they are forked; the node, which ends at SIGTERM, hears nothing of it."""
    loop, task, (ours, theirs) = asyncio.get_running_loop(), asyncio.current_task(), os.pipe()
    signals, born = [], []

    def kill():
        born.append(int(os.read(ours, 8)))
        if signals:
            os.kill(born[-1], signals.pop())

    BORN.append(theirs)
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    loop.add_reader(ours, kill)
    signals += [signal.SIGTERM, signal.SIGKILL]
    async with fleet_of(Restless(), restarts=5) as fleet:
        found["born"], found["live_after_births"], found["deaths_at_birth"] = len(born), fleet.live, fleet.deaths
        found["after_births"] = len(await Load(fleet).play([5, 6, 7]))
    signals += [signal.SIGTERM]
    try:
        async with fleet_of(Restless(), restarts=0):
            pass
    except ReplicaDied as error:
        found["killed_cause"] = str(error)
    BORN.clear()
    loop.remove_reader(ours)
    loop.remove_signal_handler(signal.SIGTERM)


async def all_dead(found):
    """Both engines are killed for good, one of them while it is idle: the turns, which are tasks of somebody else, end,
    and so does the fleet.
    """
    ends = []

    async def turn(load, prompt):
        try:
            await load.play(prompt, 8 * TOKENS)  # outputs come late and many at once: not all before the death
        except ReplicaDied as error:
            ends.append(str(error))

    async def fleet_life(up):
        async with fleet_of(Restless(), restarts=0) as fleet:
            up.set_result(fleet)
            await asyncio.Event().wait()

    async with asyncio.timeout(200), asyncio.TaskGroup() as turns:
        try:
            async with asyncio.TaskGroup() as group:
                up = asyncio.get_running_loop().create_future()
                group.create_task(fleet_life(up), name="fleet")
                load = Load(await up)
                os.kill(pids(load.fleet)[0], signal.SIGKILL)
                await load.fleet._balancer.until(lambda: len(load.fleet.live) == 1)
                found["noticed"] = True
                for prompt in load.prompts:
                    turns.create_task(turn(load, prompt), name="turn")
                await load.until(TURNS * TOKENS // 4)
                os.kill(*pids(load.fleet), signal.SIGKILL)
                await asyncio.Event().wait()
        except* ReplicaDied as errors:
            found["fleet_end"] = str(first_error(errors))
    found["turn_ends"] = sorted(set(ends))
    found["turns_ended"] = len(ends)


async def no_gpu(found):
    try:
        async with Fleet(FleetConfig(), partial(Replica, replace(CONFIG, devices=(0, 1))), Restless(), Timeline()):
            pass
    except ReplicaMisconfigured as error:
        found["no_gpu"] = str(error)


async def main(phases):
    found = {}
    for phase in phases:
        await phase(found)
    print(json.dumps(found))


if __name__ == "__main__":
    prepare_environment()
    names = sys.argv[1:] or ["under_faults", "killed_at_birth", "all_dead", "no_gpu"]
    asyncio.run(main([globals()[name] for name in names]))
