"""Does it fit? Finds the options under which a model is trained and sampled on so many GPUs, before an hour is lost.

    python recipes/rstar2/fit.py model=Qwen3-14B devices=8
    python recipes/rstar2/fit.py model=models/Qwen3-4B devices=2 memory_gb=40 max_tokens=10240
    python recipes/rstar2/fit.py model=Qwen2.5-7B-Instruct devices=8 learner_ranks=4   # learner and replicas apart
    python recipes/rstar2/fit.py model=Qwen3-14B devices=8 program=sft max_tokens=8192
    python recipes/rstar2/fit.py model=Qwen3-30B-A3B devices=8 learner.lora_rank=32   # a mixture of experts

Prints what each part takes, how many trajectories a replica holds at once, the MFU that each kind of activation
checkpointing allows, and the options for `rl.py` or `sft.py`: those that are given, and the cheapest changes to the
others that make it fit. Where none does, the exit code is 2. It is arithmetic (parts/memory/): what the learner
allocates and executes was compared with its own code on fake GPUs, and none of it with a real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from rich.console import Console
from rich.table import Table

from algo.learner.config import Checkpointing, LearnerConfig
from engine.assembly.devices import DevicePlan
from engine.console.options import parse
from recipes.rstar2.parts.memory.learner import learner_moments
from recipes.rstar2.parts.memory.memory import (
    USABLE,
    highest,
    host_parts,
    kv_bytes_per_token,
    kv_tokens,
    learner_parts,
    problems,
    replica_parts,
    replica_share,
    route_bytes_per_token,
)
from recipes.rstar2.parts.memory.model import Model, model_of
from recipes.rstar2.parts.memory.operations import ATTENTION, LINK, PRODUCTS, operations, row
from recipes.rstar2.parts.memory.plan import GIB, Plan, gib
from sandbox.printable import printable
from sandbox.require import none_or, positive, require_fields

SAMPLED = 0.8  # share of a trajectory's tokens that are learnt
SHARING = (2, 4, 8)  # ranks that may share a row
KINDS: tuple[Checkpointing, ...] = get_args(Checkpointing)  # from what is fastest to what takes least memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    program: Annotated[Literal["rl", "sft"], "which program is to fit: rl.py, or sft.py, which has no replicas"] = "rl"
    model: Annotated[str, "a folder, a config.json, an id of the Hugging Face hub, or a name of memory/public.py"]
    devices: Annotated[int, "GPUs"] = 8
    host_gpus: Annotated[int, "GPUs of a host, which decides what learner.sharding=hybrid does"] = 8
    memory_gb: Annotated[float, "memory of a GPU, as sold"] = 80.0
    learner_ranks: Annotated[int | None, "GPUs of the learner; none: all, shared with the replicas by turns"] = None
    tensor_parallel: Annotated[int, "GPUs of a replica"] = 1
    max_tokens: Annotated[int, "longest trajectory, prompt and replies included; the report has 2 K + 12 K"] = 14336
    mean_tokens: Annotated[int | None, "mean length of a trajectory, for the MFU; none: a quarter of the longest"] = (
        None
    )
    learner: LearnerConfig = LearnerConfig()  # noqa: RUF009  frozen

    def __post_init__(self) -> None:
        require_fields(self, positive, "devices", "host_gpus", "memory_gb", "tensor_parallel", "max_tokens")
        require_fields(self, none_or(positive), "learner_ranks", "mean_tokens")
        if (self.mean_tokens or 0) > self.max_tokens:
            raise ValueError(f"mean_tokens must be at most max_tokens={self.max_tokens}, got {self.mean_tokens}")
        if self.program == "sft" and (self.learner_ranks, self.tensor_parallel) != (None, 1):
            raise ValueError("program=sft has a rank on each of the devices and no replicas. Fix: devices alone")
        self.plan()

    def device_plan(self) -> DevicePlan:
        """Gives both sides all GPUs by turns, or `learner_ranks` of them to the learner and the others to replicas.

        Raises ValueError.
        """
        ranks = self.learner_ranks or self.devices
        serving = self.devices - ranks or self.devices
        if ranks > self.devices:
            raise ValueError(f"learner_ranks={ranks} is more than devices={self.devices}. Fix: fewer of them")
        if serving % self.tensor_parallel:
            raise ValueError(f"tensor_parallel={self.tensor_parallel} must divide the {serving} GPUs of the replicas")
        return DevicePlan(
            devices=tuple(range(self.devices)),
            learner_ranks=ranks,
            replicas=serving // self.tensor_parallel,
            tensor_parallel=self.tensor_parallel,
        )

    def plan(self) -> Plan:
        """Returns what is asked for, as it is. Raises ValueError for a model that cannot be trained."""
        devices = self.device_plan()
        self.learner.check_ranks(devices.learner_ranks)
        rows = max(self.max_tokens, self.learner.micro_batch_tokens)  # a longer trajectory has a row of its own
        fields = devices.learner_fields
        if self.program == "sft":
            fields["offload_optimizer"] = False
        model = model_of(self.model)
        if self.learner.attention != "packed":
            raise ValueError(
                f"learner.attention must be 'packed', whose memory is computed here, got {self.learner.attention!r}"
            )
        if model.mixture is None and not (self.learner.train_router and self.learner.load_balancing_coef == 0):
            raise ValueError(
                "learner.train_router and learner.load_balancing_coef are for mixtures of experts, and "
                f"{self.model} is none. Fix: leave them out"
            )
        fields["lora_targets"] = self._lora_targets(model)
        return Plan(
            model=model,
            devices=devices,
            learner=replace(self.learner, micro_batch_tokens=rows, **fields),
            max_tokens=self.max_tokens,
            gpu_bytes=int(self.memory_gb * GIB * USABLE),
            samples=self.program == "rl",
            host_gpus=self.host_gpus,
        )

    def _lora_targets(self, model: Model) -> tuple[str, ...]:
        """Returns the layers that can get adapters, which the experts of a mixture are not. Raises ValueError."""
        asked = self.learner.lora_targets
        there = model.adapted(asked)
        if there != asked and asked != LearnerConfig().lora_targets:
            missing = ", ".join(name for name in asked if name not in there)
            raise ValueError(
                f"learner.lora_targets names {missing}, which no layer of {self.model} has that can get an adapter. "
                f"Fix: learner.lora_targets={','.join(model.adapted(LearnerConfig().lora_targets))}"
            )
        return there


# Changes of a plan, the cheapest first. Each returns another plan, or the same one if there is nothing to change.


def _learns(plan: Plan, **fields: Any) -> Plan:
    return replace(plan, learner=replace(plan.learner, **fields))


def _checkpointing(kind: Checkpointing) -> Callable[[Plan], Plan]:
    """Returns the change to this kind, unless a plan has one that takes less memory."""

    def change(plan: Plan) -> Plan:
        now = plan.learner.activation_checkpointing
        return _learns(plan, activation_checkpointing=max(now, kind, key=KINDS.index))

    return change


def _wider(times: int) -> Callable[[Plan], Plan]:
    """Returns the change to replicas of so many times as many GPUs, where their number allows it."""

    def change(plan: Plan) -> Plan:
        devices = plan.devices
        if devices.replicas % times or not plan.samples:
            return plan
        wide = replace(devices, replicas=devices.replicas // times, tensor_parallel=times * devices.tensor_parallel)
        return replace(plan, devices=wide)

    return change


def _offload(plan: Plan) -> Plan:
    return _learns(plan, activation_checkpointing="full", activation_offload=True)


def _sharing(ranks: int) -> Callable[[Plan], Plan]:
    """Returns the change to so many ranks that share each row, where that is possible and more than now."""

    def change(plan: Plan) -> Plan:
        now = plan.learner.context_parallel
        divides = plan.devices.learner_ranks % ranks == 0 and plan.model.heads % ranks == 0
        return _learns(plan, context_parallel=max(now, ranks)) if divides else plan

    return change


def _adapters(plan: Plan) -> Plan:
    return _learns(plan, lora_rank=plan.learner.lora_rank or 32)


def _shorter(plan: Plan) -> Plan:
    """Cuts trajectories to what the model reads, or to half their length."""
    longest = plan.model.positions if plan.max_tokens > plan.model.positions else plan.max_tokens // 2
    return _learns(replace(plan, max_tokens=longest), micro_batch_tokens=longest)


CHANGES = (
    *map(_checkpointing, KINDS[1:]),
    *map(_wider, (2, 4)),  # both together: eight times
    _offload,
    *map(_sharing, SHARING),
    _adapters,
    _shorter,
)


def fitting(plan: Plan) -> Plan | None:
    """Returns the plan with the cheapest changes that make it fit, or None where no change helps."""
    for choice in range(2 ** len(CHANGES)):  # a change comes after all subsets of cheaper ones
        changed = plan
        for number, change in enumerate(CHANGES):
            if choice >> number & 1:
                before, changed = changed, change(changed)
                if changed == before:  # so this plan was tried without that change
                    break
        else:
            if not problems(changed):
                return changed
    return None


def command_of(plan: Plan) -> str:
    """Returns the program and its options that make this plan; of several hosts, without their devices."""
    devices, learner = plan.devices, plan.learner
    options: dict[str, Any] = {}
    if len(devices.devices) <= plan.host_gpus:
        options["devices"] = ",".join(map(str, devices.devices))
    if plan.samples:
        options |= {
            "learner_ranks": devices.learner_ranks,
            "replicas": devices.replicas,
            "tensor_parallel": devices.tensor_parallel,
            "replica.memory_share": replica_share(plan),
            "rollout.max_tokens": plan.max_tokens,
        }
    else:
        options["max_tokens"] = plan.max_tokens
    options |= {
        "learner.micro_batch_tokens": learner.micro_batch_tokens,
        "learner.activation_checkpointing": learner.activation_checkpointing,
        "learner.activation_offload": str(learner.activation_offload).lower(),
        "learner.lora_rank": learner.lora_rank,
    }
    if learner.lora_rank and learner.lora_targets != LearnerConfig().lora_targets:
        options["learner.lora_targets"] = ",".join(learner.lora_targets)
    if not learner.train_router:
        options["learner.train_router"] = "false"
    if learner.sharding != "full":
        options["learner.sharding"] = learner.sharding
    if learner.context_parallel > 1:
        options["learner.context_parallel"] = learner.context_parallel
    if learner.flash_attention != "FA2":
        options["learner.flash_attention"] = learner.flash_attention
    program = "rl.py" if plan.samples else "sft.py"
    return " ".join([program, *(f"{name}={value}" for name, value in options.items())])


def tables(plan: Plan, mean_tokens: int) -> Iterator[Table]:
    yield _table(f"learner, one rank at its highest ({highest(plan)})", learner_parts(plan), plan.gpu_bytes)
    if plan.samples:
        yield _table(f"replica, one of its {plan.devices.tensor_parallel} GPUs", replica_parts(plan), plan.gpu_bytes)
    yield _table("host", host_parts(plan), None)
    yield _kinds(plan, mean_tokens)


def _table(title: str, parts: Mapping[str, int], limit: int | None) -> Table:
    table = Table(title=title, title_justify="left", show_footer=True)
    of = "" if limit is None else f" of {gib(limit)}"
    table.add_column("part", footer="together")
    table.add_column("memory", justify="right", footer=gib(sum(parts.values())) + of)
    for name, size in parts.items():
        table.add_row(name, gib(size))
    return table


def _kinds(plan: Plan, mean_tokens: int) -> Table:
    """Returns what each kind of activation checkpointing takes and costs."""
    table = Table(
        title=f"activation checkpointing: memory of a rank, and MFU at most, trajectories of {mean_tokens:,} tokens",
        title_justify="left",
    )
    table.add_column("kind")
    for title in ("memory", "executed / needed", *(f"MFU, {kernels}" for kernels in ATTENTION)):
        table.add_column(title, justify="right")
    for kind in KINDS:
        other = _learns(plan, activation_checkpointing=kind, activation_offload=False)
        counted = operations(other, tokens=mean_tokens, targets=round(SAMPLED * mean_tokens))
        memory = sum(learner_parts(other).values())
        fits = "" if memory <= plan.gpu_bytes else " (too much)"
        ceilings = (f"{counted.mfu(kernels):.2f}" for kernels in ATTENTION)
        table.add_row(kind, gib(memory) + fits, f"{counted.executed / counted.needed:.2f}", *ceilings)
    return table


def main(argv: Sequence[str]) -> int:
    config = parse(Config, argv, description=__doc__)
    asked = config.plan()
    plan = fitting(asked)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in tables(plan or asked, config.mean_tokens or (plan or asked).max_tokens // 4):
        console.print(table)
    if plan is None:
        smallest = _adapters(_offload(asked))
        least = min((_wider(times)(smallest) for times in (1, 2, 4, 8)), key=lambda each: len(problems(each)))
        reasons = "; ".join(problems(least))
        whole = "learner.sharding=full, " if asked.shards < asked.devices.learner_ranks else ""
        how = f", even with {changes}" if (changes := _changes(asked, least)) else ""
        print(printable(f"fit: {reasons}{how}. Fix: {whole}more or larger GPUs, or a smaller model"), file=sys.stderr)
        return 2
    for line in _lines(asked, plan, config.mean_tokens or plan.max_tokens // 4):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _lines(asked: Plan, plan: Plan, mean_tokens: int) -> Iterator[str]:
    """Yields what is said below the tables, the command last."""
    model = plan.model
    active = f", {model.active:,} of them for each token" if model.mixture else ""
    yield f"{model.parameters:,} parameters{active}; KV cache: {kv_bytes_per_token(model):,} bytes a token"
    if plan.samples:
        at_once = plan.devices.replicas * (kv_tokens(plan) // plan.max_tokens)
        yield f"all replicas hold {at_once} trajectories of {plan.max_tokens:,} tokens at once"
        pulled = 2 * (plan.adapters if plan.learner.weight_transfer == "adapter" else model.parameters)
        yield f"a replica gets {gib(pulled)} with each update of the weights"
    if plan.samples and model.mixture:
        yield f"the experts of a token, which replay_routing keeps, take {route_bytes_per_token(model)} bytes"
    loading = sum(learner_moments(plan)["loading"].values())
    yield (
        f"while it loads, a rank allocates {gib(loading)}, and the host holds the checkpoint in float32 "
        f"({gib(4 * plan.weights)})"
    )
    if plan.shards > 1:
        yield _moved(plan, mean_tokens)
    if plan.devices.learner_ranks > plan.host_gpus:
        yield (
            f"the learner has {plan.devices.learner_ranks} GPUs and a host {plan.host_gpus} (host_gpus): links between "
            "hosts are slower, and the programs do not train on GPUs of several hosts yet, so the command below lacks "
            "its devices"
        )
    for problem in problems(asked):
        yield f"as asked it does not fit: {problem}"
    if changes := _changes(asked, plan):
        yield f"changed so that it fits: {changes}"
    if plan.adapters and model.mixture:
        yield "experts and routers get no adapters: learner.lora_targets names layers of attention"
    yield (
        f"MFU is what is left if products reach {PRODUCTS:g} of the peak, attention {_rates()}, and nothing else takes "
        "time: assumptions."
    )
    yield (
        "Arithmetic. Four cases were compared with a GPU, an H200 (recipes/machines.md): 33.5 GiB in place of 33.8, "
        "58.8 of 62.2, 36.5 of 36.8, 34.3 of 34.9. Two had an MFU of 0.16 and 0.25, where these assumptions allow 0.33 "
        "and 0.31."
    )
    yield f"it fits: {command_of(plan)}"


def _changes(asked: Plan, plan: Plan) -> str:
    """Returns the options that differ from what was asked for."""
    options = command_of(asked).split()
    return " ".join(option for option in command_of(plan).split() if option not in options)


def _moved(plan: Plan, mean_tokens: int) -> str:
    """Says what of a row takes longer: to compute, or to bring weights and gradients from GPU to GPU."""
    takes = row(plan, tokens=mean_tokens, targets=round(SAMPLED * mean_tokens))
    part = "a rank's part of a row" if plan.learner.context_parallel > 1 else "a row"
    return (
        f"{part} of {plan.learner.micro_batch_tokens:,} tokens takes {takes.computing:.2f} s to compute on an H100, "
        f"and moves {gib(takes.moved)} to each rank: {takes.moving:.2f} s at {LINK / 1e9:g} GB/s. MFU is at most "
        f"{takes.mfu:.2f} if the shorter hides behind the longer"
    )


def _rates() -> str:
    return " and ".join(f"{share:g} by {kernels}" for kernels, share in ATTENTION.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
