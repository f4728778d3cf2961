"""Checks what a recipe hands to the engine at once, and says what was given, what is wanted, and what to write.

Each check raises BadInput. Without it the same mistake would be an AttributeError somewhere else, minutes later, or a
run that ends at once and looks well.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from engine.errors import BadInput
from engine.pipeline.pipeline import Stage
from engine.ports import ToolSpec
from engine.recipe import Recipe
from engine.types import Prompt

# The stages that a job makes, in the order in which they must stand.
ORDER = {
    "admit": "admit(prompts)",
    "groups": "group(rollouts, reward, select)",
    "batch": "batch()",
    "learn": "train(make_batch)",
}

REMEMBERED = 100_000  # prompt ids; one that comes again after more than these meets other weights


def name_of(value: Any) -> str:
    """Describes a value for a message.

    >>> name_of(int), name_of(len), name_of([1]), name_of(None)
    ('the class int', 'the function len', 'a list', 'None')
    """
    if value is None:
        return "None"
    if inspect.iscoroutine(value):
        value.close()  # nobody will await it
        return f"a coroutine ({value.__qualname__.rpartition('.')[2]} without await)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    return f"a {type(value).__name__}"


def require(given: Any, wanted: bool, what: str, fix: str) -> None:
    """Raises BadInput unless `wanted`. what: such as "the reward must be a function of a trajectory"."""
    if not wanted:
        raise BadInput(f"{what}, got {name_of(given)}. Fix: {fix}")


def takes(function: Any, *arguments: str) -> bool:
    """Returns whether it can be called with these arguments. A class cannot, as its instances are called instead."""
    if not callable(function) or isinstance(function, type):
        return False
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a function in C, without a signature
        return True
    return True


def is_async(function: Any) -> bool:
    if not callable(function):
        return False
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_recipe(recipe: Any) -> None:
    fix = "recipe = Recipe(config=Config, train=train), with a dataclass Config and async def train(config, run)"
    require(recipe, isinstance(recipe, Recipe), "main must be given a recipe", fix)
    config, train = recipe.config, recipe.train
    require(
        config,
        isinstance(config, type) and dataclasses.is_dataclass(config),
        "the configuration of a recipe must be a dataclass, not one of its values",
        fix,
    )
    if "steps" not in {field.name for field in dataclasses.fields(config)}:
        raise BadInput(f"{config.__name__} has no field steps. Fix: steps: int, or int | None if it is found out")
    require(train, is_async(train) and takes(train, "config", "run"), "train must be async and take (config, run)", fix)


def check_tools(tools: Any) -> None:
    """Checks tools that a model may call: each has a name, and can be called or opened."""
    require(tools, isinstance(tools, list | tuple), "tools must be a list", "job.rollouts([tool])")
    for tool in tools:
        if inspect.isroutine(tool):  # shown by its name and signature
            continue
        what = "a tool must be a typed function, or an object with a name and __call__(self, arguments) or open(self)"
        require(tool, not isinstance(tool, type), what, "make one, such as PythonTool(job.sandbox)")
        fix = "see Tool, StatefulTool and World in engine/ports.py"
        require(tool, callable(tool) or hasattr(tool, "open"), what, fix)
        name = getattr(tool, "name", None)
        if not isinstance(name, str) or not name:
            raise BadInput(
                f"{what}; {name_of(tool)} has the name {name!r}. Fix: the attribute `name`, by which the model calls it"
            )
        if callable(tool) and not takes(tool, "arguments"):
            raise BadInput(f"{what}; {name_of(tool)} does not take one argument. Fix: __call__(self, arguments)")
        specs = getattr(tool, "tools", None)
        if specs is not None and (not callable(tool) or _are_specs(specs)):
            _check_world(tool, specs)


def _are_specs(specs: Any) -> bool:
    return isinstance(specs, list | tuple) and bool(specs) and all(isinstance(spec, ToolSpec) for spec in specs)


def _check_world(world: Any, specs: Any) -> None:
    fix = 'tools = (ToolSpec(name="look", description="...", parameters={"type": "object", "properties": {}}),)'
    require(specs, _are_specs(specs), f"tools of the world {world.name} must be a list of ToolSpec", fix)
    require(world, not callable(world), f"the world {world.name} must not have a __call__, as a tool has", "open(self)")
    opens = takes(getattr(world, "open", None), "prompt")
    require(world, opens, f"the world {world.name} must be opened for a prompt", "async def open(self, prompt)")
    for spec in specs:
        named = isinstance(spec.name, str) and bool(spec.name) and isinstance(spec.description, str)
        shown = named and isinstance(spec.parameters, Mapping)
        require(spec, shown, f"a ToolSpec of the world {world.name} must have name, description and parameters", fix)


def check_rollouts(rollouts: Any) -> None:
    fits = all(hasattr(rollouts, name) for name in ("run", "tokens_sampled"))
    fix = "job.rollouts([tool]), or await job.agents(agent)"
    require(rollouts, fits and not isinstance(rollouts, type), "rollouts must be what job.rollouts gives", fix)


def check_reward(reward: Any) -> None:
    together = getattr(reward, "sees_group", False)
    argument = "trajectories" if together else "trajectory"
    fix = f"def reward({argument}), or async def, or an object with such a __call__, such as MathReward()"
    require(reward, takes(reward, argument), f"a reward must be called with the {argument} alone", fix)
    yields = inspect.isgeneratorfunction(reward) or inspect.isasyncgenfunction(reward)
    require(reward, not yields, "a reward must return its grade, not yield it", fix)


def check_select(select: Any) -> None:
    require(
        select,
        takes(select, "group") and not is_async(select),
        "select must be a function (not async) of a group that returns it with `kept`, or with `drop`",
        "select_and_score(selector, seed=config.seed), which makes one of a selector such as RoC(keep=8)",
    )


def check_make_batch(make_batch: Any) -> None:
    require(
        make_batch,
        takes(make_batch, "step", "groups") and not is_async(make_batch),
        "make_batch must be a function (not async) of a step and its groups",
        "job.train(make_batch), with that of algo.group.batch",
    )


def check_enough(enough: Any) -> None:
    require(
        enough,
        takes(enough, "steps") and not is_async(enough),
        "enough must be a function (not async) of the rows of all steps",
        "def enough(steps): ..., which returns a reason to end the run, or None",
    )


def check_sinks(sinks: Any) -> None:
    require(sinks, isinstance(sinks, list | tuple), "sinks must be a list", "sinks=[sink]")
    for sink in sinks:
        fits = hasattr(sink, "step") and hasattr(sink, "close") and not isinstance(sink, type)
        fits = fits and not is_async(sink.step) and not is_async(sink.close)
        what = "a sink must be an object with step(step, metrics) and close(), not async"
        require(sink, fits, what, "see MetricSink in engine/telemetry/sinks.py")


def check_evaluations(evaluations: Any, kind: type) -> None:
    """Checks evaluations. kind: the class of a scheduled one."""
    if inspect.iscoroutine(evaluations) or isinstance(evaluations, kind):
        require(evaluations, False, "evaluations must be a list", "evaluations=[await job.evaluation(...)]")
    require(
        evaluations, isinstance(evaluations, list | tuple), "evaluations must be a list", "evaluations=[evaluation]"
    )
    for each in evaluations:
        fix = "evaluation = await job.evaluation(...), and evaluations=[evaluation]"
        require(each, isinstance(each, kind), "evaluations must be what job.evaluation gives", fix)
    if len(evaluations) > 1:
        raise BadInput(
            f"evaluations must be one at most, as each reports eval/accuracy, got {len(evaluations)}. "
            "Fix: evaluate all problems in one; its figures come by data set too"
        )


def check_held_out(prompts: Any, note: Callable[[str], None]) -> None:
    """Checks the prompts of an evaluation. An id that several have is told to `note`."""
    fix = "list(read_prompts(path, limit=100)), or another list of Prompt"
    require(prompts, isinstance(prompts, list | tuple), "held-out prompts must be a list", fix)
    if not prompts:
        raise BadInput(f"held-out prompts must be at least one, got none. Fix: {fix}")
    for prompt in prompts:
        require(prompt, isinstance(prompt, Prompt), "held-out prompts must be of the type Prompt", fix)
        _check_messages(prompt)
    [(commonest, times)] = Counter(prompt.id for prompt in prompts).most_common(1)
    if times > 1:
        note(
            f"{times} held-out prompts have the id {commonest!r}; their rollouts have the same seeds and may be the "
            "same. Fix: give each prompt an id of its own"
        )


def check_stream(prompts: Any) -> None:
    """Checks the stream of training prompts."""
    fix = "iter(prompts), or read_prompts(path, epochs=None), which has no end"
    require(prompts, hasattr(prompts, "__next__"), "prompts must be an iterator", fix)


def checked(prompts: Iterator[Any], first: int, note: Callable[[str], None]) -> Iterator[Prompt]:
    """Yields the stream as it is. first: how many prompts were drawn before. Raises BadInput for what is not a Prompt.
    The first id that comes again is told to `note`.

    Rollouts of one id have the same seeds: under the same weights they are the same rollouts, trained twice.
    """
    seen, repeats = dict[str, int](), False
    for number, prompt in enumerate(prompts, first + 1):
        fix = "Prompt(id=..., messages=..., answer=...) of engine.types"
        require(prompt, isinstance(prompt, Prompt), f"the stream of prompts must give Prompts (number {number})", fix)
        _check_messages(prompt)
        if prompt.id in seen and not repeats:
            repeats = True
            note(
                f"the prompt id {prompt.id!r} comes again (prompts {seen[prompt.id]} and {number} of the stream): its "
                "rollouts have the same seeds, so that the same may be trained twice. Fix: give each prompt an id of "
                f"its own, such as {prompt.id + '#2'!r} in a second epoch"
            )
        if not repeats:
            seen[prompt.id] = number
            if len(seen) > REMEMBERED:
                del seen[next(iter(seen))]
        yield prompt


def _check_messages(prompt: Prompt) -> None:
    """Raises BadInput for what no chat template renders."""
    fix = 'messages=({"role": "user", "content": "What is 6 * 7?"},)'
    if not prompt.messages:
        raise BadInput(f"prompt {prompt.id}: messages must be at least one, got none. Fix: {fix}")
    for message in prompt.messages:
        if missing := [name for name in ("role", "content") if name not in message]:
            raise BadInput(f"prompt {prompt.id}: {dict(message)!r:.100} has no {missing[0]}. Fix: {fix}")


def check_stages(stages: Any) -> None:
    """Checks what `job.run` is given."""
    what = "job.run must be given a list of stages"
    require(stages, isinstance(stages, list | tuple), what, "job.run([job.admit(prompts), ...])")
    for number, stage in enumerate(stages, 1):
        _check_stage(number, stage)
    _check_order([stage.name for stage in stages])


def _check_stage(number: int, stage: Any) -> None:
    name = getattr(stage, "__name__", "my_stage")
    fix = (
        f"Stage(name={name!r}, run={name})"
        if callable(stage)
        else "Stage(name=..., run=...), or what job.batch() gives"
    )
    require(stage, isinstance(stage, Stage), f"number {number} of the stages must be a Stage", fix)
    what = f"stage {stage.name} must run a coroutine function: async def {stage.name}(inbox, outbox)"
    if inspect.isasyncgenfunction(stage.run):
        raise BadInput(f"{what}, got one with a yield. Fix: await outbox.put(item) in its place")
    require(stage.run, is_async(stage.run) and takes(stage.run, "inbox", "outbox"), what, "write it in this form")


def _check_order(names: Sequence[str]) -> None:
    """Checks the order of the stages that the job made; a recipe may put others between them or in their place."""
    made = [name for name in names if name in ORDER]
    wanted = [name for name in ORDER if name in made]
    if made != wanted:
        calls = ", ".join(f"job.{ORDER[name]}" for name in wanted)
        raise BadInput(f"the stages must stand in the order {', '.join(wanted)}, got {', '.join(made)}. Fix: [{calls}]")
    missing = [] if names and names[0] not in ORDER else [name for name in ("admit",) if name not in made]
    if len(made) == len(names):  # the recipe has no stage of its own in their place
        missing = [name for name in ORDER if name not in made]
    if missing:
        calls = " and ".join(f"job.{ORDER[name]}" for name in missing)
        raise BadInput(f"the stages are {', '.join(names) or 'none'}: {missing[0]} is missing. Fix: add {calls}")
