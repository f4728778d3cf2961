"""Slips of a recipe: each is said when it is made, with what was given and what to write."""

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice

import pytest

from algo.group.advantages import Advantage
from algo.group.batch import make_batch, select_and_score
from algo.group.roc import RoC
from algo.group.selection import KeepAll
from algo.learner.config import LearnerConfig
from algo.reward.math_reward import MathReward
from engine.assembly import wiring
from engine.assembly.config import TrainingConfig
from engine.assembly.evaluations import ScheduledEvaluation
from engine.assembly.training import training
from engine.errors import BadInput
from engine.pipeline.channel import Channel
from engine.pipeline.pipeline import Inbox, Stage
from engine.ports import ToolSpec
from engine.programs.main import main
from engine.recipe import Recipe, Run
from engine.rollout.rollout import RolloutConfig
from engine.run.run_folder import RunFolder
from engine.stages.group import GroupConfig
from engine.tools.python_tool import PythonTool
from tests.support.fakes import Echo, Replicas, ScriptedRunner, a_prompt, fleet_of
from tests.support.job import job_of
from tests.support.paths import ROOT

OPTIONS = {
    "checkpoint": ROOT / "recipes/tiny/agent",
    "steps": 2,
    "prompts_per_step": 2,
    "group": GroupConfig(samples=2),
    "rollout": RolloutConfig(max_tokens=100),
    "learner": LearnerConfig(),
}


@pytest.fixture
def run(tmp_path):
    with RunFolder.open(tmp_path, "run") as run:
        yield run


@pytest.fixture
def job(run):
    return job_of(TrainingConfig(**OPTIONS), run)


async def easy(inbox, outbox):
    async for group in inbox:
        await outbox.put(group)


async def yields(inbox, outbox):
    async for group in inbox:
        yield group


def not_async(inbox, outbox):
    pass


async def no_outbox(inbox):
    pass


class Nameless:
    async def __call__(self, arguments): ...


class EmptyName(Nameless):
    name = ""


class TakesNothing:
    name = "clock"

    async def __call__(self): ...


class OnlyAName:
    name = "clock"


LOOK = ToolSpec(name="look", description="Looks.", parameters={"type": "object", "properties": {}})


class Lamps:
    name, tools = "lamp", (LOOK,)

    def open(self, prompt): ...


def lamps(**changed):
    return type("Lamps", (Lamps,), changed)()


class Recorded:
    config, tokens_sampled = RolloutConfig(), 0

    async def run(self, prompt, sample, group, *, tally=None, log=None): ...


async def reward(trajectory): ...


async def two_arguments(trajectory, extra): ...


async def no_select(group): ...


async def no_batch(step, groups): ...


async def evaluation():
    return None


def stages(*changed):
    """Those of a whole recipe, as functions of the job; in their order, or in this one."""
    whole = {
        "admit": lambda job: job.admit(iter([a_prompt()])),
        "groups": lambda job: job.group(Recorded(), reward, select_and_score(KeepAll(), seed=0)),
        "easy": lambda job: Stage(name="easy", run=easy),
        "batch": lambda job: job.batch(),
        "learn": lambda job: Stage(name="learn", run=easy),
    }
    return [whole[name] for name in changed or whole]


SLIPS = {
    "tool, not a list": (lambda job: job.rollouts(PythonTool(ScriptedRunner())), "PythonTool", r"\[tool\]"),
    "class of a tool": (lambda job: job.rollouts([PythonTool]), "class PythonTool", "PythonTool\\("),
    "sandbox as tool": (lambda job: job.rollouts([ScriptedRunner()]), "ScriptedRunner", "ports"),
    "nameless tool": (lambda job: job.rollouts([Nameless()]), "Nameless", "name"),
    "empty name": (lambda job: job.rollouts([EmptyName()]), "EmptyName", "name"),
    "no call": (lambda job: job.rollouts([OnlyAName()]), "OnlyAName", "ports"),
    "call of nothing": (lambda job: job.rollouts([TakesNothing()]), "TakesNothing", "arguments"),
    "class of a world": (lambda job: job.rollouts([Lamps]), "class Lamps", "make one"),
    "world without tools": (lambda job: job.rollouts([lamps(tools=())]), "tuple", "ToolSpec"),
    "world of dicts": (lambda job: job.rollouts([lamps(tools=[{"name": "look"}])]), "list", "ToolSpec"),
    "method as tools": (lambda job: job.rollouts([lamps(tools=lambda self: (LOOK,))]), "tools", "ToolSpec"),
    "world that is called": (lambda job: job.rollouts([lamps(__call__=lambda self, arguments: ...)]), "Lamps", "open"),
    "world without a prompt": (lambda job: job.rollouts([lamps(open=lambda self: ...)]), "Lamps", "prompt"),
    "tool without a name": (lambda job: job.rollouts([lamps(tools=[replace(LOOK, name="")])]), "ToolSpec", "name="),
    "tool without a schema": (
        lambda job: job.rollouts([lamps(tools=[replace(LOOK, parameters=None)])]),
        "ToolSpec",
        "parameters=",
    ),
    "list of prompts": (lambda job: job.admit([a_prompt()]), "list", r"iter\("),
    "path of prompts": (lambda job: job.admit("a.jsonl"), "str", "read_prompts"),
    "rollouts without await": (lambda job: job.group(evaluation(), reward, no_select), "await", "job.agents"),
    "tools as rollouts": (lambda job: job.group([Echo()], reward, no_select), "list", "job.rollouts"),
    "class of a reward": (
        lambda job: job.group(Recorded(), MathReward, no_select),
        "class MathReward",
        "MathReward\\(\\)",
    ),
    "reward of two": (lambda job: job.group(Recorded(), two_arguments, no_select), "two_arguments", "trajectory"),
    "number as reward": (lambda job: job.group(Recorded(), 1.0, no_select), "float", "trajectory"),
    "selector": (lambda job: job.group(Recorded(), reward, RoC(keep=8)), "RoC", "select_and_score"),
    "async select": (lambda job: job.group(Recorded(), reward, no_select), "no_select", "select_and_score"),
    "advantage as select": (lambda job: job.group(Recorded(), reward, Advantage()), "Advantage", "select_and_score"),
    "a batch": (lambda job: job.train(make_batch(1, [])), "Batch", "make_batch"),
    "async batch": (lambda job: job.train(no_batch), "no_batch", "make_batch"),
    "evaluation without await": (lambda job: job.train(make_batch, evaluations=[evaluation()]), "await", "await"),
    "evaluations without await": (lambda job: job.train(make_batch, evaluations=evaluation()), "await", "await"),
    "two evaluations": (
        lambda job: job.train(make_batch, evaluations=[ScheduledEvaluation(evaluation=None, every=1) for _ in "ab"]),
        "2",
        "in one",
    ),
    "async enough": (lambda job: job.train(make_batch, enough=reward), "the function reward", "enough"),
    "enough of nothing": (lambda job: job.train(make_batch, enough=lambda: None), "<lambda>", "enough"),
    "evaluation, not a list": (
        lambda job: job.train(make_batch, evaluations=ScheduledEvaluation(evaluation=None, every=1)),
        "ScheduledEvaluation",
        "evaluations=",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_what_is_handed_to_the_job_is_checked_at_once(job, slip):
    make, given, fix = SLIPS[slip]
    with pytest.raises(BadInput, match=rf"(?s)got.*{given}.*Fix: .*{fix}|{given}.*Fix: .*{fix}"):
        make(job)


@pytest.mark.parametrize(
    ("prompts", "graded", "rollouts", "given"),
    [
        (islice(cycle([a_prompt()]), 2), reward, Recorded(), "islice"),
        ([], reward, Recorded(), "none"),
        (["What is 1 + 1?"], reward, Recorded(), "str"),
        ([a_prompt()], MathReward, Recorded(), "class MathReward"),
        ([a_prompt()], reward, [Echo()], "list"),
        ([replace(a_prompt(), messages=())], reward, Recorded(), "p0: messages"),
    ],
)
async def test_an_evaluation_is_checked(job, prompts, graded, rollouts, given):
    with pytest.raises(BadInput, match=given):
        await job.evaluation(prompts, graded, rollouts=rollouts, estimate=len, every=1)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("groups", "batch", "learn"), r"admit is missing.*job\.admit\(prompts\)"),
        (("admit", "groups", "learn"), r"batch is missing.*job\.batch\(\)"),
        (("admit", "batch", "learn"), r"groups is missing.*job\.group"),
        (("admit", "groups", "batch"), r"learn is missing.*job\.train"),
        (("groups", "admit", "batch", "learn"), r"order admit, groups"),
        (("admit", "groups", "learn", "batch"), r"order admit, groups, batch, learn"),
        (("groups", "easy", "batch", "learn"), r"admit is missing"),
    ],
)
async def test_stages_that_are_missing_or_stand_elsewhere_are_named(job, names, said):
    with pytest.raises(BadInput, match=said):
        await job.run([make(job) for make in stages(*names)])


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (easy, r"number 2 .* got the function easy\. Fix: Stage\(name='easy', run=easy\)"),
        (evaluation(), "await"),
        (Stage(name="mine", run=yields), r"yield.*outbox\.put"),
        (Stage(name="mine", run=not_async), "coroutine function"),
        (Stage(name="mine", run=no_outbox), r"\(inbox, outbox\)"),
        (Stage, "the class Stage"),
    ],
)
async def test_what_is_no_stage_is_named(job, stage, said):
    whole = [make(job) for make in stages()]
    with pytest.raises(BadInput, match=said):
        await job.run([whole[0], stage, *whole[2:]])


async def test_stages_must_be_a_list(job):
    with pytest.raises(BadInput, match=r"Fix: job\.run"):
        await job.run(stages()[0](job))


def test_a_whole_recipe_and_those_with_parts_of_their_own_are_right(job):
    class Part:
        async def __call__(self, inbox, outbox): ...

    wiring.check_stages([make(job) for make in stages()])
    for own in (Part(), partial(easy), partial(Part())):
        mine = Stage(name="mine", run=own)
        admit, groups, batch, learn = [make(job) for make in stages("admit", "groups", "batch", "learn")]
        wiring.check_stages([mine, groups, batch, learn])
        wiring.check_stages([admit, groups, mine, learn])
        wiring.check_stages([admit, groups, batch, mine])
    wiring.check_make_batch(partial(make_batch, advantage=Advantage()))
    wiring.check_tools([Echo(), easy, Lamps()])
    wiring.check_tools([type("Agent", (Echo,), {"tools": ["search"]})()])  # a tool that has tools of its own


async def test_a_recipe_that_does_not_run_its_stages_is_named(run):
    async with fleet_of(Replicas(), 1) as fleet:
        job = job_of(TrainingConfig(**OPTIONS), run, fleet=fleet, learner=object())
        job.check_has_run()  # one that trains nothing has nothing to run
        job.train(make_batch)
        with pytest.raises(BadInput, match=r"return await job\.run"):
            job.check_has_run()


def drawn(job, prompts):
    """What the stage `admit` puts out, and what was said meanwhile."""

    class Outbox:
        def __init__(self):
            self.items = []

        async def put(self, item):
            self.items.append(item.prompt.id)
            if len(self.items) % 2 == 0:
                job.leases.release(len(self.items) - 2)
                job.leases.release(len(self.items) - 1)

    outbox = Outbox()
    inbox = Inbox(Channel(1), waits=lambda tasks: None, finish=lambda: None)
    asyncio.run(job.admit(prompts).run(inbox, outbox))
    notes = job.run_folder.path / "notes.log"
    return outbox.items, notes.read_text() if notes.exists() else ""


def test_an_id_that_comes_again_is_named_once(job):
    prompts = [replace(a_prompt(), id=name) for name in ("a", "b", "a", "b")]
    items, said = drawn(job, iter(prompts))
    assert items == ["a", "b", "a", "b"]
    assert said.count("\n") == 1
    assert "'a' comes again (prompts 1 and 3" in said


def test_ids_that_differ_are_not_spoken_of(job):
    items, said = drawn(job, iter([replace(a_prompt(), id=name) for name in "abcd"]))
    assert (items, said) == (["a", "b", "c", "d"], "")


def test_what_is_no_prompt_is_named(job):
    with pytest.raises(BadInput, match=r"number 2.*got a str"):
        drawn(job, iter([a_prompt(), "What is 1 + 1?"]))


@pytest.mark.parametrize(
    ("messages", "said"),
    [((), "none"), (({"role": "user"},), "no content"), (({"content": "What is 1 + 1?"},), "no role")],
)
def test_messages_that_no_template_renders_are_named(job, messages, said):
    with pytest.raises(BadInput, match=f"prompt p0: .*{said}.*Fix:"):
        drawn(job, iter([replace(a_prompt(), messages=messages)]))


@pytest.mark.parametrize("messages", ["What is 1 + 1?", {"role": "user", "content": "1 + 1?"}, ("1 + 1?",), None])
def test_messages_are_messages(messages):
    with pytest.raises((ValueError, TypeError), match="messages"):
        replace(a_prompt(), messages=messages)


class Sink:
    def step(self, step, metrics): ...
    def close(self): ...


class AsyncSink(Sink):
    async def step(self, step, metrics): ...


@pytest.mark.parametrize(
    ("sinks", "given"),
    [(Sink(), "a Sink"), ([Sink], "the class Sink"), ([print], "print"), ([AsyncSink()], "an? AsyncSink")],
)
async def test_sinks_are_checked(run, sinks, given):
    with pytest.raises(BadInput, match=rf"{given}\. Fix:"):
        async with training(TrainingConfig(**OPTIONS), run, sinks=sinks):
            pass


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"checkpoint": "recipes/tiny/agent"}, r"checkpoint must be .*Path.*got a str"),
        ({"group": {"samples": 2}}, r"group must be .*GroupConfig.*got a dict"),
        ({"rollout": RolloutConfig}, r"rollout .*got the class RolloutConfig"),
        ({"steps": "2"}, r"steps .*got a str"),
    ],
)
def test_a_configuration_of_another_type_is_named(changed, said):
    with pytest.raises(BadInput, match=said):
        TrainingConfig(**{**OPTIONS, **changed})


async def test_training_is_given_the_configuration_of_the_machine(run):
    with pytest.raises(BadInput, match=r"got a RecipeConfig.*config\.training\(\)"):
        async with training(RecipeConfig(), run):
            pass


async def test_the_ranks_of_a_learner_on_one_machine_must_suit_its_options(run):
    config = TrainingConfig(**{**OPTIONS, "learner": LearnerConfig(context_parallel=2)})
    with pytest.raises(BadInput, match=r"context_parallel must divide the learner's 1 ranks"):
        async with training(config, Run(folder=run)):
            pass


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    steps: int = 1


@dataclass(frozen=True, kw_only=True)
class WithoutSteps:
    seed: int = 1


async def a_train(config, run): ...


@pytest.mark.parametrize(
    ("config", "train", "said"),
    [
        (a_train, RecipeConfig, "the function a_train"),
        (RecipeConfig(), a_train, "a RecipeConfig"),
        (WithoutSteps, a_train, "no field steps"),
        (RecipeConfig, not_async, "must be async"),
        (RecipeConfig, no_outbox, "(config, run)"),
    ],
)
def test_a_recipe_is_checked_before_anything_is_made(capsys, config, train, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(Recipe(config=config, train=train), []) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
