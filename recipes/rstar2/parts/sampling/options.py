"""What training, filtering and evaluation of rStar2-Agent share: the chat, the tool, the budgets, the sandbox, data.

Invariant: for one protocol all of them ask the model in the same way, with the same tool.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

from algo.reward.grade_math import GRADER_MODULES
from engine.assembly.config import BLOCK
from engine.data.prompts import Prompts, read_prompts
from engine.errors import BadInput
from engine.ports import StatefulTool, Tool
from engine.replica.config import ReplicaConfig
from engine.rollout.chat_template import ChatConfig
from engine.rollout.rollout import RolloutConfig
from engine.tools.python_tool import PythonSessions, PythonTool
from engine.types import Prompt
from recipes.rstar2.parts.sampling.protocol import PROTOCOLS, REPORT, Protocol, chat_config, limit_calls, python_tool
from sandbox import TIERS, Limits, Sandbox, SandboxConfig, Tier

GRADER = Tier(name="grader", preload=GRADER_MODULES)
PROMPT_TOKENS = 2048  # the longest prompt in the release; the report does not say
DEADLINE_S = 3600.0  # of a trajectory: what ends it is its tokens and turns

ProtocolName = Literal["report", "release", "none"]
"""none: the checkpoint's own chat template and a tool named python, with the report's values for all else."""


def values_of(name: ProtocolName) -> Protocol:
    """The protocol's values; the report's for "none"."""
    return PROTOCOLS.get(name, REPORT)


def chat_of(name: ProtocolName) -> ChatConfig:
    return ChatConfig() if name == "none" else chat_config(PROTOCOLS[name])


def tool_of(name: ProtocolName, sandbox: Sandbox, *, stateful: bool) -> Tool | StatefulTool:
    if name != "none":
        return python_tool(PROTOCOLS[name], sandbox, stateful=stateful)
    return PythonSessions(sandbox) if stateful else PythonTool(sandbox)


def budget_of(
    name: ProtocolName,
    *,
    response_tokens: int,
    turns: int,
    temperature: float = 1.0,
    max_tokens: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> RolloutConfig:
    """response_tokens: sampled and tool tokens, after a prompt of up to PROMPT_TOKENS. max_tokens: of prompt and
    response together, in place of both.
    """
    given = max_tokens is not None
    budget = RolloutConfig(
        max_tokens=max_tokens if max_tokens is not None else PROMPT_TOKENS + response_tokens,
        max_response_tokens=None if given else response_tokens,
        max_turns=turns,
        temperature=temperature,
        deadline_s=deadline_s,
    )
    return budget if name == "none" else limit_calls(PROTOCOLS[name], budget)


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxOptions:
    slots: Annotated[int, "tool calls that run at once"] = 8
    wall_s: Annotated[float, "time limit of a tool call (the release's)"] = 4.0
    memory_mib: Annotated[int, "memory limit of a tool call; the release's code judge has 256"] = 1024

    def config(self) -> SandboxConfig:
        """Raises ValueError."""
        return SandboxConfig(
            slots=self.slots,
            limits=Limits(wall_s=self.wall_s, cpu_s=self.wall_s, memory_bytes=self.memory_mib << 20),
            tiers=(*TIERS, GRADER),
            start_s=60,  # beside engines and learner, on busy cores, a start takes long
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    dtype: Annotated[Literal["float32", "bfloat16"], "of replicas on the CPU; on GPUs they compute in bfloat16"] = (
        "float32"
    )
    kv_blocks: Annotated[
        int | None, "KV cache blocks of 32 tokens; none: what a GPU holds, on the CPU four of the longest trajectories"
    ] = None
    max_num_seqs: Annotated[int, "requests that a replica runs at once"] = 256
    memory_share: Annotated[
        float | None, "of a GPU's memory that a replica takes; none: 0.92, or 0.6 by turns (`fit.py` says what fits)"
    ] = None

    quantization: Annotated[
        str | None, "fp8_per_tensor, fp8_per_channel or fp8_per_block on GPUs, with a loss that corrects; not yet run"
    ] = None

    def config(self, checkpoint: Path, max_tokens: int, devices: Sequence[int]) -> ReplicaConfig:
        """max_tokens: of the longest trajectory. Raises ValueError."""
        check_positions(checkpoint, max_tokens)
        blocks = self.kv_blocks
        if blocks is None and not devices:
            blocks = max(1024, 4 * (max_tokens // 32 + 2))
        return ReplicaConfig(
            checkpoint=str(checkpoint),
            max_model_len=max_tokens + BLOCK,
            max_num_seqs=self.max_num_seqs,
            kv_blocks=blocks,
            dtype=self.dtype,
            devices=tuple(devices),
            memory_share=self.memory_share,
            quantization=self.quantization,
        )


def check_positions(checkpoint: Path, max_tokens: int, option: str = "max_tokens") -> None:
    """option: by which the length is given. Raises ValueError where a trajectory is longer than the model can read."""
    try:
        fields = json.loads((checkpoint / "config.json").read_bytes())
        longest = fields.get("text_config", fields).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return  # said elsewhere
    if isinstance(longest, int) and max_tokens + BLOCK > longest:
        raise ValueError(
            f"{option}={max_tokens} (prompt and response) exceeds what {str(checkpoint)!r} can read: "
            f"max_position_embeddings is {longest}. Fix: {option}={longest - BLOCK} or less"
        )


def check_exists(**paths: Path) -> None:
    """Raises ValueError naming the option."""
    for option, path in paths.items():
        if not path.exists():
            raise ValueError(f"{option}: {str(path)!r} does not exist. Fix: give {option}=")


def open_data(path: Path, *, limit: int | None = None, seed: int | None = None, epochs: int | None = 1) -> Prompts:
    """The prompts of a file, each of which was looked at once: a bad row is told now, not after hours.

    Raises BadInput naming file and row.
    """
    try:
        for _ in read_prompts(path, limit=limit):
            pass
        return read_prompts(path, limit=limit, seed=seed, epochs=epochs)
    except ValueError as error:
        raise BadInput(str(error)) from error


def named_sets(paths: Sequence[Path], limit: int | None = None) -> dict[str, list[Prompt]]:
    """The prompts of each set by its name, which is its file's and becomes their source. Raises BadInput."""
    found: dict[str, list[Prompt]] = {}
    for path in paths:
        prompts = open_data(path)
        if prompts.name in found:
            raise BadInput(f"sets: two have the name {prompts.name!r}. Fix: rename {path}")
        found[prompts.name] = [replace(prompt, source=prompts.name) for prompt in islice(prompts, limit)]
    return found
