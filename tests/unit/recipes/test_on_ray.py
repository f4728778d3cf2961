"""What on_ray.py starts, and when it starts a process again. Its Ray places actors at once and runs nothing."""

import asyncio
import sys
from types import SimpleNamespace

import pytest

from engine.commands.node import Options
from engine.console.options import parse, parse_all
from engine.programs.invocation import Invocation, Machines
from recipes.clusters import on_ray
from recipes.clusters.on_ray import Command, Config, Job, ProcessFailed, processes
from recipes.quickstart import Config as Quickstart
from sandbox import keys
from sandbox.host.host import HostConfig


class RayError(Exception):
    pass


class Ray:
    """ends: how the processes end that are placed, in order: an exit code, RayError, or None: it runs on."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, *ends):
        self.ends, self.placed, self.killed, self.told = list(ends), [], [], []

    def remote(self, _kind):
        return SimpleNamespace(options=self._options)

    def _options(self, **options):
        self.placed.append(options)
        return SimpleNamespace(remote=self._actor)

    def _actor(self):
        number = len(self.placed)
        end = self.ends.pop(0)

        async def host():
            if end == "never placed":
                await asyncio.Event().wait()
            return "machine"

        async def run(_words, _folder, _files):
            if end is None:
                await asyncio.Event().wait()
            if end is RayError:
                raise RayError("the machine is gone")
            return end

        async def tell(_within_s):
            self.told.append(number)

        actor = SimpleNamespace(number=number, host=SimpleNamespace(remote=host))
        actor.run, actor.end = SimpleNamespace(remote=run), SimpleNamespace(remote=tell)
        return actor

    def kill(self, actor):
        self.killed.append(actor.number)


@pytest.fixture
def lead(monkeypatch):
    """Sets how the lead ends, each time; it ends last when the nodes have done what they do."""

    def set_ends(*ends):
        left = list(ends)

        class Lead:
            async def run(self, _words, _folder, _files):
                for _ in range(50):
                    await asyncio.sleep(0)
                return left.pop(0)

            async def end(self, _within_s):
                pass

        monkeypatch.setattr(on_ray, "Process", Lead)
        monkeypatch.setattr(on_ray, "AGAIN_S", 0.0)

    return set_ends


async def test_a_node_that_failed_was_lost_or_drained_is_placed_again_and_ended_with_the_run(lead, capsys):
    lead(0)
    ray = Ray(1, RayError, 0, None)
    await Job(ray, restarts=1, key_files={}).run(["lead"], {"node-0": Command(line=["node"], cpus=2, gpus=1)})
    assert len(ray.placed) == 4
    assert {(options["num_cpus"], options["num_gpus"]) for options in ray.placed} == {(2, 1)}
    assert ray.told == [4], "it drains"
    assert ray.killed[-1] == 4
    said = capsys.readouterr().out
    for part in ("exit code 1, and is started again (1 of 1 times)", "is lost", "was drained"):
        assert part in said


async def test_what_was_never_placed_is_given_up_at_the_end_without_waiting_for_it(lead):
    lead(0)
    ray = Ray("never placed")
    await Job(ray, restarts=0, key_files={}).run(["lead"], {"node-0": Command(line=["node"])})
    assert (ray.told, ray.killed) == ([], [1])


@pytest.mark.parametrize(
    ("lead_ends", "node_ends", "said"),
    [
        ((1, 2), (None,), "the lead ended with exit code 2"),
        ((1, 1, 1, 1), (None,), "the lead ended with exit code 1, and has failed 3 times"),
        ((0,), (2,), "node-0 ended with exit code 2"),
        ((0,), (1, 1, 1), "node-0 ended with exit code 1, and has failed 3 times"),
    ],
)
async def test_what_fails_again_and_again_or_has_a_wrong_option_ends_the_job(lead, lead_ends, node_ends, said):
    lead(*lead_ends)
    ray = Ray(*node_ends)
    with pytest.raises(ProcessFailed, match=said):
        await Job(ray, restarts=2, key_files={}).run(["lead"], {"node-0": Command(line=["node"])})
    assert ray.killed == list(range(1, len(ray.placed) + 1)), "nothing is left"


def test_our_programs_take_what_it_starts(tmp_path):
    keys.make(tmp_path / "keys")
    given = ["recipes/quickstart.py", "steps=4", "nodes=2", "gpus=2", "node=replicas=2,slots=4"]
    config = parse(Config, [*given, "learners=1", "sandboxes=1", "port=6000"])
    lead, others = processes(config, "127.0.0.1", tmp_path / "keys")
    assert lead[0] == sys.executable
    [_, recipe, machines] = parse_all([Invocation, Quickstart, Machines], lead[2:])
    assert (recipe.steps, machines.learner_hosts, machines.learner_at) == (4, 2, "127.0.0.1:6002")
    assert (recipe.sandbox_listen, recipe.sandbox_keys) == ("tcp://0.0.0.0:6001", tmp_path / "keys")
    assert list(others) == ["node-0", "node-1", "learner-0", "sandbox-0"]
    start = len([sys.executable, "-m", "engine.programs.rocstar", "node"])
    node = parse(Options, others["node-1"].line[start:])
    assert (node.lead, node.name) == ("tcp://127.0.0.1:6000", "node-1")
    assert node.here == ("devices=0,1", "replicas=2", "slots=4")
    assert parse(Options, others["learner-0"].line[start:]).learner
    assert parse(HostConfig, others["sandbox-0"].line[start:]).connect == "tcp://127.0.0.1:6001"
    assert [command.gpus for command in others.values()] == [2, 2, 0, 0]
