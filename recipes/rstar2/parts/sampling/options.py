"""The options of replicas and sandbox and the reading of problems that training, filtering and evaluation share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated

from algo.learner.config import LearnerConfig
from algo.learner.serialize import from_plain
from algo.loss.policy_losses import Correction, PpoClip
from algo.reward.maths.grader import GRADER_MODULES
from engine.assembly.config import BLOCK
from engine.data.prompts import Prompts, read_prompts
from engine.errors import BadInput
from engine.replica.config import ReplicaConfig
from engine.types import Prompt
from sandbox import TIERS, Limits, SandboxConfig, Tier

GRADER = Tier(name="grader", preload=GRADER_MODULES)


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxOptions:
    slots: Annotated[int, "tool calls that run at once"] = 8
    wall_s: Annotated[float, "time limit of a tool call (the release's)"] = 4.0
    memory_mib: Annotated[int, "memory limit of a tool call; the release's code judge has 256"] = 1024

    def config(self) -> SandboxConfig:
        """Returns the sandbox's configuration. Raises ValueError."""
        return SandboxConfig(
            slots=self.slots,
            limits=Limits(wall_s=self.wall_s, cpu_s=self.wall_s, memory_bytes=self.memory_mib << 20),
            tiers=(*TIERS, GRADER),
            start_s=60,  # beside engines and learner, on busy cores, a start takes long
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaOptions:
    kv_blocks: Annotated[
        int | None, "KV cache blocks of 32 tokens; none: what a GPU holds, on the CPU four of the longest trajectories"
    ] = None
    max_num_seqs: Annotated[int, "requests that a replica runs at once"] = 256
    memory_share: Annotated[
        float | None,
        "share of a GPU that a replica takes; none: 0.92, 0.6 by turns (`fit.py` says what fits), 0.3 with sleep=false",
    ] = None

    quantization: Annotated[
        str | None, "fp8_per_tensor, fp8_per_channel or fp8_per_block on GPUs, with a loss that corrects; not yet run"
    ] = None

    def config(
        self, checkpoint: Path, max_tokens: int, devices: Sequence[int], dtype: str = "float32"
    ) -> ReplicaConfig:
        """Returns a replica's configuration. max_tokens: length of the longest trajectory. dtype: on the CPU. Raises
        ValueError.
        """
        check_positions(checkpoint, max_tokens)
        blocks = self.kv_blocks
        if blocks is None and not devices:
            blocks = max(1024, 4 * (max_tokens // 32 + 2))
        return ReplicaConfig(
            checkpoint=str(checkpoint),
            max_model_len=max_tokens + BLOCK,
            max_num_seqs=self.max_num_seqs,
            kv_blocks=blocks,
            dtype=dtype,
            devices=tuple(devices),
            memory_share=self.memory_share,
            quantization=self.quantization,
        )

    def learner(self, learner: LearnerConfig) -> LearnerConfig:
        """Returns the learner's configuration, adapted to what the replicas sample with."""
        if self.quantization is not None:  # the sampler is another model than the one that learns
            loss = from_plain(learner.loss)
            assert isinstance(loss, PpoClip), "the protocols have no other"
            correction = Correction(level="token", upper=2.0)
            learner = replace(learner, loss=replace(loss, proximal=True, correction=correction))
        return learner


def check_positions(checkpoint: Path, max_tokens: int, option: str = "max_tokens") -> None:
    """Raises ValueError where a trajectory is longer than the model can read. option: the one that gives the length."""
    try:
        fields = json.loads((checkpoint / "config.json").read_bytes())
        longest = fields.get("text_config", fields).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return  # loading the checkpoint reports it
    if isinstance(longest, int) and max_tokens + BLOCK > longest:
        raise ValueError(
            f"{option}={max_tokens} (prompt and response) exceeds what {str(checkpoint)!r} can read: "
            f"max_position_embeddings is {longest}. Fix: {option}={longest - BLOCK} or less"
        )


def check_exists(option: str, *paths: Path) -> None:
    """Raises BadInput naming the option of a path that does not exist."""
    for path in paths:
        if not path.exists():
            raise BadInput(f"{option}: {str(path)!r} does not exist. Fix: give {option}=")


def open_data(path: Path, *, limit: int | None = None, seed: int | None = None, epochs: int | None = 1) -> Prompts:
    """Returns the prompts of a file after reading all of them once, so that a bad row is reported now, not after hours.

    Raises BadInput naming file and row.
    """
    try:
        for _ in read_prompts(path, limit=limit):
            pass
        return read_prompts(path, limit=limit, seed=seed, epochs=epochs)
    except ValueError as error:
        raise BadInput(str(error)) from error


def named_sets(paths: Sequence[Path], limit: int | None = None) -> dict[str, list[Prompt]]:
    """Returns the prompts of each set by the name of its file, which becomes their source. Raises BadInput."""
    sets: dict[str, list[Prompt]] = {}
    for path in paths:
        prompts = open_data(path)
        if prompts.name in sets:
            raise BadInput(f"sets: two have the name {prompts.name!r}. Fix: rename {path}")
        sets[prompts.name] = [replace(prompt, source=prompts.name) for prompt in islice(prompts, limit)]
    return sets
