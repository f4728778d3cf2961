"""Makes groups for a run that another machine leads, as its rollout node, or runs ranks of its learner.

    rocstar node lead=tcp://LEAD:5700 keys=DIR [field=value ...]
    rocstar node lead=tcp://LEAD:5700 keys=DIR learner=true

The lead names the recipe and its options, and sends the checkpoint's files; field=value changes an option for this
machine alone (replicas=4, slots=16, kv_blocks=4096). A node may join and leave at any time.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import uvloop

from engine.assembly.expected import EXPECTED
from engine.console.options import Rest, names, parse, parse_all
from engine.errors import BadInput
from engine.nodes.build import build_of
from engine.nodes.config import NodeConfig
from engine.nodes.lead_protocol import difference
from engine.nodes.messages import Ask, Job
from engine.nodes.node import LeadGone, NodeDrained, NodeRefused, ask, pull_checkpoint
from engine.nodes.pulls import PullFailed
from engine.programs import learner_host
from engine.programs.begin import begin
from engine.programs.drain import LEFT, Drain
from engine.programs.invocation import Invocation
from engine.programs.roles import RunEnded, node_training
from engine.recipe import ROOT, Run, load_recipe
from engine.run.run_folder import RunFolder
from engine.run.workspace import workspace
from engine.telemetry.watchdog import end_on_signals
from sandbox.keys import HostKeys, load_host
from sandbox.printable import printable

PROGRAM = "rocstar node"
# What recipes' options are on a node unless it is given there: the learner is elsewhere, all devices are the replicas',
# and sandbox hosts serve the lead.
NOT_THE_LEADS = {"learner_ranks": "0", "sandbox_listen": "none", "sandbox_keys": "none"}


@dataclass(frozen=True, kw_only=True)
class Options:
    lead: Annotated[str, "address of the lead, tcp://HOST:PORT"]
    keys: Annotated[Path | None, "folder with host.key and node.pub of `rocstar keys`"] = None
    name: Annotated[str, "what the lead calls this node"] = field(default_factory=socket.gethostname)
    patience_s: Annotated[float, "seconds without the lead before it ends"] = 600.0
    learner: Annotated[bool, "run ranks of the learner here, and make no groups"] = False
    grace_s: Annotated[float, "seconds after SIGTERM to make the groups that it has, before they go to others"] = 20.0
    ready_file: Annotated[Path | None, "a file that is there while the node belongs to the run"] = None
    dry_run: Annotated[bool, "ask the lead, print what would be run here, and end"] = False
    here: Annotated[tuple[str, ...], Rest("options of the recipe that differ on this machine")] = ()


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 when the run has ended or SIGTERM has drained the node, 2 if the user has to change
    something, 1 if a part failed or the lead is gone, 130 if it was interrupted.
    """
    options = parse(Options, argv, program=PROGRAM, description=__doc__)
    begin()
    signal.signal(signal.SIGTERM, _leave)  # while nothing else handles it: when modules are imported, for example
    try:
        if options.ready_file is not None:
            _remove(options.ready_file)
        config = NodeConfig(
            lead=options.lead,
            keys=options.keys,
            name=options.name,
            patience_s=options.patience_s,
            grace_s=options.grace_s,
            ready_file=options.ready_file,
        )
        keys = load_host(options.keys) if options.keys is not None else None
        with workspace(Path(tempfile.gettempdir())) as folder:  # on disk, as it holds the whole checkpoint
            if options.learner:
                return _train(config, keys, folder, dry_run=options.dry_run)
            return _join(config, keys, options.here, folder, dry_run=options.dry_run)
    except (NodeDrained, _TakenBack) as drained:
        print(f"{PROGRAM}: {drained}", flush=True)
        return 0
    except (BadInput, ValueError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except (*EXPECTED, LeadGone, NodeRefused, PullFailed) as error:
        print(printable(f"{PROGRAM}: {error}"), file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"{PROGRAM}: interrupted; the lead gives its groups to others", file=sys.stderr)
        return 130


def _remove(ready_file: Path) -> None:
    """Removes a ready file that a node before this one has left behind, as one does that is killed."""
    try:
        ready_file.unlink(missing_ok=True)
    except OSError as error:
        raise BadInput(f"ready_file={ready_file} cannot be removed: {error.strerror}. Fix: name another file") from None


class _TakenBack(BaseException):
    """SIGTERM came before the node had begun. Libraries that are imported just then must not take it for an error."""


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise _TakenBack(LEFT)


def _train(config: NodeConfig, keys: HostKeys | None, folder: Path, *, dry_run: bool) -> int:
    job = asyncio.run(_job(config, keys))
    if reason := difference(job.build, build_of((ROOT / job.recipe).resolve())):
        raise BadInput(f"this host cannot take part: {reason}")
    if dry_run:
        if job.learner is None:
            raise BadInput("the lead's learner runs on its own machine alone. Fix: learner_hosts=2 on the lead")
        print(printable(shlex.join(learner_host.command(job.learner, folder / "checkpoint", folder))))
        return 0
    asyncio.run(_serve_learner(config, keys, job, folder))
    print("the run has ended", flush=True)
    return 0


async def _serve_learner(config: NodeConfig, keys: HostKeys | None, job: Job, folder: Path) -> None:
    task = asyncio.current_task()
    assert task is not None
    with end_on_signals(task):
        await learner_host.serve(config, keys, job, folder, lambda line: print(printable(line), flush=True))


def _join(config: NodeConfig, keys: HostKeys | None, given: Sequence[str], folder: Path, *, dry_run: bool) -> int:
    job = asyncio.run(_job(config, keys))
    recipe = (ROOT / job.recipe).resolve()
    if not recipe.is_file():
        raise BadInput(f"the lead runs {job.recipe}, which is not here. Fix: copy it to {recipe}")
    build = build_of(recipe)
    if reason := difference(job.build, build):
        raise BadInput(f"this node cannot take part: {reason}")
    checkpoint = folder / "checkpoint"
    loaded = load_recipe(recipe)
    options = node_options(loaded.config, job.options, given, checkpoint=checkpoint, folder=folder)
    if dry_run:
        print(printable(shlex.join([sys.executable, str(recipe), *options])))
        return 0
    checkpoint.mkdir()
    asyncio.run(Drain().run(pull_checkpoint(config, keys, job, checkpoint)))
    [invocation, values] = parse_all([Invocation, loaded.config], options)
    with (
        RunFolder.open(invocation.runs, invocation.name) as run_folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        drain = Drain()
        run = Run(folder=run_folder, opens=partial(node_training, config, keys, build, drain))
        try:
            runner.run(drain.run(loaded.train(values, run)))
        except RunEnded:
            print("the run has ended", flush=True)
    return 0


async def _job(config: NodeConfig, keys: HostKeys | None) -> Job:
    answer = await Drain().run(ask(config, keys, Ask()))
    if not isinstance(answer, Job):
        raise NodeRefused(f"the lead answers {type(answer).__name__}")
    return answer


def node_options(
    config_class: type[Any], lead: Sequence[str], given: Sequence[str], *, checkpoint: Path, folder: Path
) -> list[str]:
    """Returns the options with which a node runs the lead's recipe: those of the lead, changed by those given here."""
    own = [f"model={checkpoint}", f"runs={folder}", "name=node"]
    chosen = {option.partition("=")[0] for option in given}
    own += [f"{name}={value}" for name, value in NOT_THE_LEADS.items() if name in names(config_class) - chosen]
    return _options(lead, given, own)


def _options(lead: Sequence[str], given: Sequence[str], own: Sequence[str] = ()) -> list[str]:
    """Returns the lead's options, those of this machine in place of the same fields.

    given: options by their whole or last names. own: options by their whole names.

    >>> _options(["steps=3", "learner.lr=0.1", "judge.model=a"], ["lr=0.2", "replicas=4"], ["model=b"])
    ['steps=3', 'judge.model=a', 'lr=0.2', 'replicas=4', 'model=b']
    """
    short, whole = ({option.partition("=")[0] for option in options} for options in (given, own))

    def is_replaced(option: str) -> bool:
        name = option.partition("=")[0]
        return name in whole or any(name == each or name.endswith(f".{each}") for each in short)

    return [*(option for option in lead if not is_replaced(option)), *given, *own]
