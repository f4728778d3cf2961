"""Six nodes that come and go by a cluster's will, over real TCP with real keys; the replicas are scripted.

Beats come twenty times as fast as they do in a run, so that a dead node is noticed within a quarter of a second.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from pathlib import Path

import pytest

from engine.nodes.node import NodeDrained, RolloutNode
from engine.types import Group, Prompt
from tests.real.engine.test_nodes_network import TURNS, Run, node_of
from tests.support.fakes import a_prompt
from tests.support.node import Setup

BEAT_S = 0.05
NAMES = ("one", "two", "three", "four", "five", "six")
GROUPS = 300
AT_ONCE = 12  # groups that are wanted at once


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.nodes.node.BEAT_S", BEAT_S)
    monkeypatch.setattr("engine.nodes.lead.BEAT_S", BEAT_S)


def prompt(number: int) -> Prompt:
    return a_prompt(text=f"What is {number} * 7?")


class Nodes:
    """Holds nodes by name, each with its replicas. Grades take up to a fifth of a second: groups end in any order."""

    def __init__(self, run: Run, rng: random.Random) -> None:
        self._run, self._rng = run, rng
        self.there: dict[str, tuple[RolloutNode, asyncio.Task[None]]] = {}

    @property
    def busiest(self) -> str:
        return max(sorted(self.there), key=lambda name: len(self.there[name][0].protocol.held))

    async def comes(self, name: str, tasks: asyncio.TaskGroup) -> None:
        up = asyncio.get_running_loop().create_future()
        task = tasks.create_task(self._serve(name, up), name=name)
        self.there[name] = await up, task

    async def goes(self, name: str, how: str) -> None:
        node, task = self.there.pop(name)
        match how:
            case "drain":
                node.drain()
            case "interrupt":
                task.cancel()
            case "kill":
                node._mailbox.close(0)  # nothing more leaves the process
                task.cancel()
        await asyncio.wait([task])

    async def _serve(self, name: str, up: asyncio.Future[RolloutNode]) -> None:
        async def reward(trajectory: object) -> float:
            await asyncio.sleep(self._rng.uniform(0, 0.2))
            return 1.0

        async with Setup(*TURNS) as scripted:
            grace_s = self._rng.choice([0.0, 0.1, 5.0])
            node = await node_of(self._run, scripted, reward=reward, name=name, grace_s=grace_s)
            up.set_result(node)
            with suppress(NodeDrained):
                await node.run()


async def made(run: Run, nodes: Nodes, tasks: asyncio.TaskGroup) -> list[Group]:
    """Returns the groups of all prompts, of which some are wanted at once."""
    free = asyncio.Semaphore(AT_ONCE)

    async def make(number: int) -> Group:
        async with free:
            return await run.lead.make_group(prompt(number), number, 0)

    makers = [tasks.create_task(make(number), name=f"group {number}") for number in range(GROUPS)]
    return [await maker for maker in makers]


def numbers(group: Group) -> list[tuple[list[int], list[float], list[int], float | None]]:
    return [
        (member.token_ids_T.tolist(), member.logprobs_T.tolist(), member.versions_T.tolist(), member.reward)
        for member in group.trajectories
    ]


@pytest.mark.timeout(60)
async def test_all_groups_are_made_once_and_as_one_node_makes_them_whoever_comes_and_goes(tmp_path: Path) -> None:
    results = []
    for name, restless in (("still", False), ("restless", True)):
        (tmp_path / name).mkdir()
        run, rng = Run(tmp_path / name), random.Random(0)
        happened = dict.fromkeys(("drain", "interrupt", "kill"), 0)
        async with run.door, run.lead, asyncio.TaskGroup() as tasks:
            run.publish(1)
            nodes = Nodes(run, rng)
            await nodes.comes("one", tasks)
            making = tasks.create_task(made(run, nodes, tasks), name="all")
            while restless and not making.done():
                await asyncio.sleep(rng.uniform(0.1, 0.4))
                away = [each for each in NAMES if each not in nodes.there]
                if away and (not nodes.there or rng.random() < 0.5):
                    await nodes.comes(rng.choice(away), tasks)
                else:
                    how = min(happened, key=lambda what: happened[what])  # each as often as the others
                    await nodes.goes(nodes.busiest, how)
                    happened[how] += 1
            results.append([numbers(group) for group in await making])
            for each in list(nodes.there):
                await nodes.goes(each, "drain")
    assert results[0] == results[1]
    assert len(results[1]) == GROUPS
    assert min(happened.values()) >= 1, happened
    assert any("is about to leave" in note for note in run.notes)
    assert any("leaves; its" in note for note in run.notes), "what it did not make went to others"
    assert any("was silent; its" in note for note in run.notes)
