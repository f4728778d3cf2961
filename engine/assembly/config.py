"""The configurations of `training` and `serving`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from engine.assembly import wiring
from engine.assembly.devices import DevicePlan
from engine.errors import BadInput
from engine.fleet.canary import one_token_of, tolerance_of
from engine.pipeline.leases import Leases
from engine.recording.policy import RecordConfig
from engine.replica.config import ReplicaConfig, check_head
from engine.rollout.chat_template import ChatConfig
from engine.rollout.rollout import RolloutConfig
from engine.stages.group import GroupConfig
from sandbox import SandboxConfig
from sandbox.require import at_least, none_or, positive, require

EXPERT_COLUMNS = 32  # vLLM's CPU kernels compute so many columns of an expert at a time
BLOCK = 32  # tokens beyond a trajectory's budget that a replica has room for


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """The machinery of a run. The recipe's stages hold the prompts, the tools and the reward."""

    checkpoint: Path
    """Hugging Face folder to start from."""
    steps: int
    """Optimizer batches. A run that has ended goes on when it is opened with more."""
    prompts_per_step: int
    """Groups per step (B)."""
    group: GroupConfig
    rollout: RolloutConfig
    learner: Any
    """A dataclass that the learner's module takes, such as `algo.learner.config.LearnerConfig`. Two methods are asked
    before anything starts, if it has them: `check_ranks(ranks)`, with the number of ranks on all hosts together, and
    `check_model(fields)`, with what the checkpoint's config.json holds. They raise ValueError for ranks and models that
    its options do not suit."""
    learner_state: Path | None = None
    """A learner's checkpoint of another run (its checkpoints/step-000012) to begin with: weights, optimizer, batches
    counted so far and random numbers. None: the checkpoint's weights and a new optimizer.
    """
    learner_module: str = "algo.learner"
    """What each rank of the learner runs; they meet by `algo.learner.hosts.meet`."""
    replica: ReplicaConfig | None = None
    """None: for the checkpoint, with room for a trajectory of the rollout's budget."""
    devices: DevicePlan = field(default_factory=DevicePlan)
    """GPUs, ranks and replicas; by default everything runs on the CPU."""
    chat: ChatConfig = field(default_factory=ChatConfig)
    sandbox: SandboxConfig | None = None
    """None: no sandbox."""
    seed: int = 0
    """Seed for sampling and the learner. Recipes usually pass it to prompts and selection as well."""
    max_staleness: int = 0
    """How many weight versions old a trained token may be (S); 0 is strictly on-policy."""
    checkpoint_every: int = 4
    """Steps between checkpoints of the learner; the journal holds what follows one."""
    step_deadline_s: float = 600.0
    """Seconds that the learner may take to train a step or to save; 1.5 times as many without progress end the run."""
    start_deadline_s: float | None = None
    """Seconds that each replica and the learner may take to start. None: as in `ReplicaConfig` and
    `LearnerProcessConfig`; a large model on a slow disk needs more."""
    update_deadline_s: float | None = None
    """Seconds that a replica may take to load weights, to fall asleep or to wake up. None: as in `ReplicaConfig`."""
    replica_step_deadline_s: float | None = None
    """Seconds without a step of its engine, while requests are in flight, after which a replica is replaced. None: as
    in `ReplicaConfig`."""
    canary_tolerance: float | Literal["auto"] | None = "auto"
    """The largest mean difference between a replica's log-probabilities of the canary and the learner's; a single token
    may differ ten times as much, or for a mixture of experts in bfloat16 by any number. "auto": by dtype and number of
    layers (`engine.fleet.canary`). None: no limit."""
    full_reward: float = 1.0
    """Reward of a trajectory that solved its prompt. If all trajectories have it, nothing is left to learn."""
    title: str = ""
    """Title of the plot."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """What is recorded for people who look at the run."""

    def __post_init__(self) -> None:
        kinds = {"checkpoint": Path, "group": GroupConfig, "rollout": RolloutConfig, "devices": DevicePlan}
        kinds |= {"chat": ChatConfig, "record": RecordConfig, "steps": int, "prompts_per_step": int}
        for name, kind in kinds.items():
            wanted = isinstance(getattr(self, name), kind)
            wiring.require(
                getattr(self, name),
                wanted,
                f"{name} must be of the type {kind.__name__}",
                f"{name}={kind.__name__}(...)",
            )
        for name, least in (("steps", 1), ("checkpoint_every", 1), ("seed", 0)):
            require(name, getattr(self, name), at_least(least))
        deadlines = ("step_deadline_s", "start_deadline_s", "update_deadline_s", "replica_step_deadline_s")
        for name in (*deadlines, "canary_tolerance"):
            if (value := getattr(self, name)) != "auto":
                require(name, value, none_or(positive))
        if self.max_staleness > self.steps:
            raise ValueError(f"max_staleness must be at most steps={self.steps}, got {self.max_staleness}")
        if not (self.checkpoint / "config.json").is_file():
            raise ValueError(
                f"checkpoint: no config.json in {str(self.checkpoint)!r}, and nothing is downloaded from a hub. "
                "Fix: give a Hugging Face folder"
            )
        if self.learner_state is not None and not self.learner_state.is_dir():
            raise ValueError(f"learner_state must be a folder, got {str(self.learner_state)!r}")
        if self.devices.adapters and not getattr(self.learner, "lora_rank", 0):
            raise ValueError("adapters must be False where lora_rank is 0: all weights are trained, got True")
        if self.devices.devices:  # else ranks of other hosts may come to these, which only the run knows
            self.check_ranks(hosts=1)
        fields = config_fields(self.checkpoint)
        if check_model := getattr(self.learner, "check_model", None):
            check_model(fields)
        check_head(fields, "checkpoint")
        self._check_experts(fields)
        self._check_positions(fields)
        Leases(self.prompts_per_step, self.max_staleness)
        if self.replicas_config.quantization is not None:
            self._check_quantized()

    def check_ranks(self, hosts: int) -> None:
        """Raises BadInput if the learner's options do not suit its ranks, of which each of these hosts has as many."""
        if (check_ranks := getattr(self.learner, "check_ranks", None)) is None:
            return
        try:
            check_ranks(hosts * self.devices.learner_ranks)
        except ValueError as error:
            raise BadInput(str(error)) from error

    def _check_positions(self, fields: dict[str, Any]) -> None:
        """Raises ValueError for trajectories that are longer than what the model reads. A model whose rotary embeddings
        are scaled may read more than its positions; vLLM judges that.
        """
        positions, ropes = fields.get("max_position_embeddings"), fields.get("rope_parameters") or {}
        plain = not fields.get("rope_scaling") and ropes.get("rope_type", "default") == "default"
        room = self.replicas_config.max_model_len
        if plain and isinstance(positions, int) and room > positions:
            raise ValueError(
                f"rollout.max_tokens must be at most {positions - BLOCK} for a model of {positions} positions "
                f"(max_position_embeddings), got {self.rollout.max_tokens}, for which replicas need {room}. Fix: fewer "
                "tokens, or another model"
            )

    def _check_experts(self, fields: dict[str, Any]) -> None:
        """Raises ValueError for a mixture of experts that vLLM's CPU kernels do not serve here: with adapters, or with
        experts that they fill up with zeros, which new weights do not fit.
        """
        config = self.replicas_config
        of_experts = fields.get("model_type") in ("mixtral", "gpt_oss")
        name = "intermediate_size" if of_experts else "moe_intermediate_size"
        width, least = fields.get(name), EXPERT_COLUMNS * config.tensor_parallel
        if config.devices or not isinstance(width, int):
            return
        if self.devices.adapters:
            raise ValueError(
                "adapters must be False for a mixture of experts on the CPU, got True. Fix: adapters=false, or GPUs"
            )
        if width % least:
            raise ValueError(
                f"checkpoint: {name} must be a multiple of {least} for replicas on the CPU, got {width}. Fix: another "
                "model, or GPUs"
            )

    def _check_quantized(self) -> None:
        """Raises ValueError unless the loss corrects for quantised replicas, which sample from another model than the
        one that learns, and the canary has a tolerance: how far apart they are was not measured on GPUs yet.
        """
        what = f"replica.quantization={self.replicas_config.quantization!r}"
        loss = getattr(self.learner, "loss", {})
        if "correction" in loss and not (loss.get("proximal") and loss["correction"]):
            raise ValueError(
                f"{what} needs a loss that corrects for the sampler. Fix: "
                "LearnerConfig(loss=PpoClip(proximal=True, correction=Correction(level='token', upper=2.0)))"
            )
        if self.canary_tolerance == "auto":
            raise ValueError(f"{what} needs canary_tolerance, got 'auto'. Fix: one, such as 1.0 (on a CPU: 0.09)")

    @property
    def replicas_config(self) -> ReplicaConfig:
        room = self.rollout.max_tokens + BLOCK
        config = self.replica or ReplicaConfig(checkpoint=str(self.checkpoint), max_model_len=room)
        if self.devices.adapters:
            config = dataclasses.replace(
                config,
                weight_transfer="adapter",
                lora_rank=self.learner.lora_rank,
                lora_targets=self.learner.lora_targets,
                adapters=1 + self.max_staleness,
            )
        if getattr(self.learner, "replay_routing", False):
            config = dataclasses.replace(config, returns_routes=True)
        if self.start_deadline_s is not None:
            config = dataclasses.replace(config, start_deadline_s=self.start_deadline_s)
        if self.update_deadline_s is not None:
            config = dataclasses.replace(config, update_deadline_s=self.update_deadline_s)
        if self.replica_step_deadline_s is not None:
            config = dataclasses.replace(config, step_deadline_s=self.replica_step_deadline_s)
        return self.devices.replica(config)

    @property
    def canary_bound(self) -> float | None:
        """Returns the canary's tolerance; None: no limit. One side in bfloat16 is enough to expect its rounding."""
        if self.canary_tolerance != "auto":
            return self.canary_tolerance
        return tolerance_of(self.checkpoint, self._rounding)

    @property
    def canary_one_token(self) -> float:
        """Returns how many times that tolerance a single token may differ."""
        return one_token_of(self.checkpoint, self._rounding)

    @property
    def _rounding(self) -> str:
        """The coarsest dtype of replicas and learner."""
        sides = (self.replicas_config, self.learner)
        dtypes = [getattr(side, name, "float32") for side in sides for name in ("dtype", "weights_dtype")]
        return "bfloat16" if "bfloat16" in dtypes else "float32"


def config_fields(checkpoint: Path, option: str = "checkpoint") -> dict[str, Any]:
    """Returns what a checkpoint's config.json holds. Raises ValueError, which names the option, for none to be read."""
    path = checkpoint / "config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{option}: cannot read {str(path)!r}: {error}. Fix: give a Hugging Face folder") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{option}: {str(path)!r} must hold an object. Fix: give a Hugging Face folder")
    return fields


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingConfig:
    """The checkpoint that is served, its devices, and the size of its trajectories."""

    checkpoint: Path
    """Hugging Face folder."""
    rollout: RolloutConfig
    """The largest budget that is used."""
    replica: ReplicaConfig | None = None
    """None: for the checkpoint, with room for a trajectory of the budget."""
    replicas: int = 2
    devices: tuple[int, ...] = ()
    """GPUs, `tensor_parallel` for each replica; none for the CPU."""
    tensor_parallel: int = 1
    chat: ChatConfig = field(default_factory=ChatConfig)
    sandbox: SandboxConfig | None = None
    """None: no sandbox."""
    seed: int = 0
    """Seed for sampling."""

    def __post_init__(self) -> None:
        if not (self.checkpoint / "config.json").is_file():
            raise ValueError(
                f"checkpoint: no config.json in {str(self.checkpoint)!r}, and nothing is downloaded from a hub. "
                "Fix: give a Hugging Face folder"
            )
        check_head(config_fields(self.checkpoint), "checkpoint")
        require("replicas", self.replicas, at_least(1))
        needed = self.replicas * self.tensor_parallel
        if self.devices and len(self.devices) != needed:
            example = ",".join(map(str, range(needed)))
            raise ValueError(
                f"devices must be {needed} GPUs for replicas={self.replicas} and "
                f"tensor_parallel={self.tensor_parallel}, got {len(self.devices)}. Fix: devices={example}"
            )
        self.replicas_config  # noqa: B018  its own checks, before anything starts

    @property
    def replicas_config(self) -> ReplicaConfig:
        """Returns the settings of each replica. On GPUs replicas compute in bfloat16, as they do beside a learner."""
        room = self.rollout.max_tokens + BLOCK
        config = self.replica or ReplicaConfig(checkpoint=str(self.checkpoint), max_model_len=room)
        return dataclasses.replace(
            config,
            devices=self.devices,
            tensor_parallel=self.tensor_parallel,
            dtype="bfloat16" if self.devices else config.dtype,
        )
