"""Does it fit? Memory of learner, replicas and host for a model on so many GPUs, before an hour is lost on finding out.

    python recipes/rstar2/fit.py                                          # the settings of sizes.py
    python recipes/rstar2/fit.py size=qwen2.5-7b-8gpu memory_gb=40
    python recipes/rstar2/fit.py model=models/Qwen3-4B devices=2 tensor_parallel=2 max_tokens=14336
    python recipes/rstar2/fit.py model=Qwen2.5-7B-Instruct devices=8 learner_ranks=4     # learner and replicas apart
    python recipes/rstar2/fit.py model=runs/sft/checkpoint devices=0 memory_gb=24        # the learner on a CPU

Prints what each part takes, the longest trajectory, how many a replica holds at once, and the options for `rl.py`.
Where it does not fit, the exit code is 2 and one line says what to change. It is arithmetic (`memory.py`), and none of
it has been compared with a GPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table

from algo.learner.config import LearnerConfig
from engine.assembly.devices import DevicePlan
from engine.console.options import parse
from recipes.rstar2.parts.memory.memory import (
    GIB,
    RESERVE_BYTES,
    Memory,
    Plan,
    Shape,
    gib,
    kv_bytes_per_gpu,
    memory_of,
)
from recipes.rstar2.parts.memory.sizes import SHAPES, SIZES, Size
from sandbox.printable import printable

NOT_RUN = "Arithmetic only: none of it has been compared with a GPU."
USABLE = 0.985  # CUDA gives programs some 79 GiB of a GPU that is sold with 80 GB
LONGEST_FIX = 3  # changes that are tried together


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    model: Annotated[str, "a folder, a config.json, or a name of sizes.py"] = ""
    size: Annotated[str, "a setting of sizes.py, which the other options change"] = ""
    devices: Annotated[int | None, "GPUs; 0: the CPU"] = None
    memory_gb: Annotated[float | None, "of a GPU, as sold (none: 80, or the size's); of the host, devices=0"] = None
    host_gb: Annotated[float | None, "of the machine beside its GPUs; none: not checked"] = None
    learner_ranks: Annotated[int | None, "GPUs of the learner; none, or all: shared with the replicas by turns"] = None
    replicas: Annotated[int | None, "none: as many as there are GPUs for"] = None
    tensor_parallel: Annotated[int | None, "GPUs of a replica"] = None
    memory_share: Annotated[float | None, "of a GPU, for a replica; none: the engine's default"] = None
    max_tokens: Annotated[int | None, "of the longest trajectory, prompt and replies included"] = None
    max_num_seqs: Annotated[int, "requests that a replica runs at once"] = 256
    micro_batch_tokens: Annotated[int | None, "as learner.micro_batch_tokens"] = None
    activation_checkpointing: Annotated[bool | None, "as learner.activation_checkpointing"] = None
    activation_offload: Annotated[bool | None, "as learner.activation_offload"] = None
    lora_rank: Annotated[int | None, "as learner.lora_rank"] = None
    fp32_head: Annotated[bool | None, "as learner.fp32_head"] = None
    reference_kl_coef: Annotated[float | None, "as learner.reference_kl_coef: above 0 there is a second model"] = None

    def __post_init__(self) -> None:
        if self.size and self.size not in SIZES:
            raise ValueError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")
        for name in (
            "memory_gb",
            "host_gb",
            "max_tokens",
            "max_num_seqs",
            "tensor_parallel",
            "learner_ranks",
            "replicas",
        ):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if self.devices is not None and self.devices < 0:
            raise ValueError(f"devices must be at least 0, got {self.devices}")
        if self.memory_share is not None and not 0 < self.memory_share <= 1:
            raise ValueError(f"memory_share must be above 0 and at most 1, got {self.memory_share}")
        if self.size or self.model:
            self.plan()  # its own checks

    @property
    def shape(self) -> Shape:
        """Raises ValueError for a model that is no folder, file or name."""
        name = self.model or SIZES[self.size].model
        by_name = {each.lower(): config for each, config in SHAPES.items()}
        if name.lower() in by_name:
            return Shape.of(by_name[name.lower()])
        if not Path(name).exists():
            raise ValueError(f"model {name!r} is no folder, no config.json and none of {', '.join(SHAPES)}")
        return Shape.read(Path(name))

    def plan(self) -> Plan:
        """Raises ValueError for GPUs that cannot be shared out."""
        size = SIZES.get(self.size)
        learner = size.learner if size else LearnerConfig()
        names = ("micro_batch_tokens", "activation_checkpointing", "activation_offload")
        names += ("lora_rank", "fp32_head", "reference_kl_coef")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        devices = device_plan(
            count=_first(self.devices, size and size.devices, 1),
            ranks=self.learner_ranks,
            replicas=self.replicas,
            tensor_parallel=_first(self.tensor_parallel, size and size.tensor_parallel, 1),
        )
        return Plan(
            shape=self.shape,
            devices=devices,
            learner=replace(replace(learner, **given), **devices.learner_fields),
            max_tokens=_first(self.max_tokens, size and size.max_tokens, 10240),
            memory_bytes=int(
                _first(self.memory_gb, size and size.memory_gb, 80.0) * GIB * (USABLE if devices.devices else 1.0)
            ),
            memory_share=_first(self.memory_share, size and size.memory_share, None) if devices.devices else None,
            max_num_seqs=self.max_num_seqs,
            host_bytes=None if self.host_gb is None else int(self.host_gb * GIB),
        )


def _first(*values: Any) -> Any:
    """The first that is not None, or the last."""
    return next((value for value in values if value is not None), values[-1])


def device_plan(
    *, count: int, ranks: int | None = None, replicas: int | None = None, tensor_parallel: int = 1
) -> DevicePlan:
    """All GPUs by turns, or `ranks` of them for the learner and the others for replicas. Raises ValueError."""
    if count == 0:
        return DevicePlan()
    by_turns = ranks is None or ranks == count
    serving = count if by_turns else count - (ranks or 0)
    if serving < 1:
        raise ValueError(f"learner_ranks={ranks} is more than devices={count}. Fix: fewer of them")
    if replicas is None and serving % tensor_parallel:
        raise ValueError(f"tensor_parallel={tensor_parallel} must divide the {serving} GPUs of the replicas")
    return DevicePlan(
        devices=tuple(range(count)),
        learner_ranks=count if by_turns else (ranks or 0),
        replicas=replicas or serving // tensor_parallel,
        tensor_parallel=tensor_parallel,
    )


# What can be changed, cheapest first: each gives another plan, or None where there is nothing to change.


def _checkpointing(plan: Plan) -> Plan | None:
    if plan.learner.activation_checkpointing:
        return None
    return replace(plan, learner=replace(plan.learner, activation_checkpointing=True))


def _offload(plan: Plan) -> Plan | None:
    if plan.learner.activation_offload or not plan.learner.activation_checkpointing or not plan.on_gpu:
        return None
    return replace(plan, learner=replace(plan.learner, activation_offload=True))


def _shorter_rows(plan: Plan) -> Plan | None:
    if plan.learner.micro_batch_tokens <= plan.max_tokens:
        return None
    return replace(plan, learner=replace(plan.learner, micro_batch_tokens=plan.max_tokens))


def _wider_replicas(plan: Plan) -> Plan | None:
    """As many GPUs a replica as it takes to hold the model and something beside it."""
    devices = plan.devices
    serving = devices.replicas * devices.tensor_parallel
    for wide in range(devices.tensor_parallel + 1, serving + 1):
        if (
            serving % wide == 0
            and plan.shape.heads % wide == 0
            and not (devices.shared and devices.learner_ranks % wide)
        ):
            return replace(plan, devices=replace(devices, replicas=serving // wide, tensor_parallel=wide))
    return None


def _by_turns(plan: Plan) -> Plan | None:
    """The learner on all GPUs, which shards its state further."""
    if plan.devices.shared or not plan.on_gpu:
        return None
    count = len(plan.devices.devices)
    if count % plan.devices.tensor_parallel:
        return None
    devices = device_plan(count=count, tensor_parallel=plan.devices.tensor_parallel)
    return replace(plan, devices=devices, memory_share=None)


def _adapters(plan: Plan) -> Plan | None:
    return None if plan.learner.lora_rank else replace(plan, learner=replace(plan.learner, lora_rank=32))


def _half_as_long(plan: Plan) -> Plan | None:
    tokens = plan.max_tokens // 2
    if tokens < 1024:
        return None
    rows = min(plan.learner.micro_batch_tokens, tokens)
    return replace(plan, max_tokens=tokens, learner=replace(plan.learner, micro_batch_tokens=rows))


def _within_the_model(plan: Plan) -> Plan | None:
    longest = plan.shape.positions
    return replace(plan, max_tokens=longest) if plan.max_tokens > longest else None


CHANGES: Sequence[Callable[[Plan], Plan | None]] = (
    _within_the_model,
    _checkpointing,
    _shorter_rows,
    _offload,
    _wider_replicas,
    _by_turns,
    _adapters,
    _half_as_long,
)


def with_best_share(plan: Plan) -> Plan:
    """The largest share of a GPU that leaves the learner at rest its place, in hundredths; only by turns."""
    if not plan.devices.shared:
        return plan
    free = plan.memory_bytes - memory_of(plan).learner_rest - RESERVE_BYTES
    share = math.floor(100 * free / plan.memory_bytes) / 100
    return replace(plan, memory_share=min(0.9, share)) if share > 0 else plan


def fix(plan: Plan) -> Plan | None:
    """The same with few changes, so that it fits; None where the changes that are known do not help."""
    for count in range(LONGEST_FIX + 1):
        for changes in combinations(CHANGES, count):
            changed: Plan | None = plan
            for change in changes:
                changed = change(changed) if changed is not None else None
            for candidate in (changed, changed and with_best_share(changed)):
                if candidate is not None and not memory_of(candidate).problems:
                    return candidate
    return None


def options_of(plan: Plan) -> dict[str, str]:
    """The options of `rl.py` that make this plan; but for `devices`, this program takes them too."""
    devices, learner = plan.devices, plan.learner
    found = {
        "devices": ",".join(map(str, devices.devices)),
        "learner_ranks": str(devices.learner_ranks),
        "replicas": str(devices.replicas),
        "tensor_parallel": str(devices.tensor_parallel),
        "memory_share": "" if plan.memory_share is None else f"{plan.memory_share:g}",
        "max_tokens": str(plan.max_tokens),
        "micro_batch_tokens": str(learner.micro_batch_tokens),
        "activation_checkpointing": str(learner.activation_checkpointing).lower(),
        "activation_offload": str(learner.activation_offload).lower(),
        "lora_rank": str(learner.lora_rank),
    }
    return {name: value for name, value in found.items() if value}


def command_of(plan: Plan, size: Size | None) -> str:
    """The options of `rl.py`, those of the training too where a size has them."""
    options = options_of(plan)
    if size is not None:
        if plan.max_tokens == size.max_tokens:
            del options["max_tokens"]  # the protocol's stages have it
        options = {
            "protocol": size.protocol,
            **options,
            "prompts_per_step": str(size.prompts_per_step),
            "group_size": str(size.group_size),
            "lr": f"{size.learner.lr:g}",
            "minibatches": str(size.learner.minibatches),
        }
    return " ".join(f"{name}={value}" for name, value in options.items())


def changes_between(plan: Plan, better: Plan) -> list[str]:
    """The options of the better plan that differ."""
    before, after = options_of(plan), options_of(better)
    return [f"{name}={value}" for name, value in after.items() if before.get(name) != value]


def verdict(memory: Memory) -> str | None:
    """None where it fits; else what is too large, and what to change."""
    if not memory.problems:
        return None
    better = fix(memory.plan)
    if better is not None:
        remedy = " ".join(changes_between(memory.plan, better))
    elif memory.plan.on_gpu:
        remedy = f"more or larger GPUs than {len(memory.plan.devices.devices)} of these, or a smaller model"
    else:
        remedy = "more memory, or a smaller model"
    return f"{'; '.join(memory.problems)}. Fix: {remedy}"


def tables(memory: Memory) -> Iterator[Table]:
    plan = memory.plan
    what = "learner, one rank while it trains" if plan.on_gpu else "learner on the CPU while it trains"
    yield _table(what, memory.learner, plan.memory_bytes)
    if memory.replica:
        yield _table(f"replica, one of its {plan.devices.tensor_parallel} GPUs", memory.replica, plan.memory_bytes)
        yield _table("host", memory.host, plan.host_bytes)


def _table(title: str, parts: dict[str, int], limit: int | None) -> Table:
    table = Table(title=title, title_justify="left", show_footer=True)
    of = "" if limit is None else f" of {gib(limit)}"
    table.add_column("part", footer="together")
    table.add_column("memory", justify="right", footer=gib(sum(parts.values())) + of)
    for name, size in parts.items():
        table.add_row(name, gib(size))
    return table


def facts(memory: Memory) -> Iterator[str]:
    plan = memory.plan
    shape, learner = plan.shape, plan.learner
    trained = f", {shape.adapter_parameters(learner.lora_rank, learner.lora_targets):,} of adapters trained"
    yield f"{shape.parameters:,} parameters{trained if learner.lora_rank else ''}"
    if memory.replica:
        count = plan.devices.replicas
        yield (
            f"KV cache: {shape.kv_bytes_per_token:,} bytes a token ({kv_bytes_per_gpu(plan):,} on each GPU); a replica "
            f"holds {memory.kv_tokens:,} tokens, {memory.sequences} trajectories of {plan.max_tokens:,} at once; "
            f"{count} {'replicas hold' if count > 1 else 'replica holds'} {count * memory.sequences}"
        )
        by_turns = f"learner and replicas take turns; at rest the learner keeps {gib(memory.learner_rest)} of a GPU"
        yield by_turns if plan.devices.shared else "learner and replicas have GPUs of their own"
    yield f"longest trajectory: {memory.longest:,} tokens"


def overview(memory_gb: float | None) -> tuple[Table, bool]:
    """The settings of sizes.py on GPUs of this memory, or of their own, and whether all fit."""
    table = Table(title="settings of sizes.py", title_justify="left")
    for name in ("size", "model", "GPUs", "learner peak", "trajectories at once", "longest", "fits"):
        table.add_column(name, justify="left" if name in ("size", "model", "fits") else "right")
    every = True
    for name, size in SIZES.items():
        memory = memory_of(Config(size=name, memory_gb=memory_gb).plan())
        every &= not memory.problems
        gpus = f"{size.devices} x {_first(memory_gb, size.memory_gb):g} GB"
        at_once = memory.plan.devices.replicas * memory.sequences
        row = (size.model, gpus, gib(memory.learner_peak), str(at_once), f"{memory.longest:,}")
        table.add_row(name, *row, "no" if memory.problems else "yes")
    return table, every


def main(argv: Sequence[str]) -> int:
    config = parse(Config, argv)
    console = Console(width=None if sys.stdout.isatty() else 120)
    if not (config.size or config.model):
        table, every = overview(config.memory_gb)
        console.print(table)
        for name, size in SIZES.items():
            console.print(f"{name}: {size.about}", markup=False, highlight=False, soft_wrap=True)
        console.print(NOT_RUN, style="yellow")
        return 0 if every else 2
    memory = memory_of(config.plan())
    for table in tables(memory):
        console.print(table)
    size = SIZES.get(config.size)
    for line in facts(memory):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(NOT_RUN, style="yellow")
    refusal = verdict(memory)
    if refusal is not None:
        print(printable(f"fit: {refusal}"), file=sys.stderr)
        return 2
    if memory.plan.on_gpu:
        command = command_of(memory.plan, size)
        console.print(f"it fits: rl.py model=DIR {command}", markup=False, highlight=False, soft_wrap=True)
    else:
        console.print("it fits", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
