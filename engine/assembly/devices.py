"""Decides where the learner's ranks and the replicas run: a few numbers become the settings of the parts.

Invariants
- Learner and replicas have devices of their own, or all of them share all devices, or everything runs on the CPU.
- A rollout node has replicas alone, and all devices that are given are theirs.
- Parts that share a device never compute at the same time: `max_staleness` is then 0, and the replicas rest while the
  learner trains. They sleep then, or with `sleep=False` only pause and keep their memory.

On a GPU only one shared by a learner and a replica was run yet (recipes/machines.md says what was seen); devices of
their own, `tensor_parallel` and several ranks were not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.learner.process import LearnerProcessConfig
from engine.replica.config import MEMORY_SHARE_BESIDE, ReplicaConfig
from sandbox.require import at_least, none_or, one_of, require


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """Which GPUs the learner and the replicas have.

    >>> DevicePlan(devices=(0,), learner_ranks=1, replicas=1).shared
    True
    >>> eight = DevicePlan(devices=tuple(range(8)), learner_ranks=4, replicas=2, tensor_parallel=2, max_staleness=1)
    >>> eight.shared, eight.weight_transfer, eight.learner_devices, eight.replica_devices
    (False, 'nccl', (0, 1, 2, 3), (4, 5, 6, 7))
    >>> DevicePlan(devices=(0,), replicas=1, sleep=False).sleeps
    False
    """

    devices: tuple[int, ...] = ()
    """GPUs; none for the CPU. Either as many as the learner's ranks and the replicas need together, and the learner has
    the first ones, or as many as each side needs, and they share them.
    """
    learner_ranks: int = 1
    """Processes of the learner, each with a GPU. 0 on a rollout node, whose learner is elsewhere."""
    replicas: int = 2
    tensor_parallel: int = 1
    """GPUs of a replica."""
    adapters: bool = False
    """The learner trains adapters, and only they go to the replicas, which serve versions of them side by side."""
    files: bool = False
    """Weights are published as files in host memory, which rollout nodes pull, and never go from GPU to GPU."""
    max_staleness: int = 0
    """Must be 0 if learner and replicas share their GPUs: the replicas rest while it trains."""
    sleep: bool = True
    """Whether replicas that share the learner's GPUs give their memory up while it trains. False: they keep it (by
    default three tenths of a GPU, `ReplicaConfig.memory_share`), and the learner keeps the optimizer's state there. A
    step is then shorter, any supported vLLM will do, and a replica can serve adapters; all must fit side by side."""
    eager: bool = False
    """Replicas on GPUs do not compile their model (`ReplicaConfig.eager`)."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """What replicas and the learner's passes compute in, and what weights are published in; the learner's own weights
    are float32. None: "bfloat16" on GPUs, which have no other; on the CPU what the configurations of replicas and
    learner say. With "bfloat16" a run on the CPU rounds as one on GPUs does."""

    def __post_init__(self) -> None:
        for name, least in (("learner_ranks", 0), ("replicas", 1), ("tensor_parallel", 1), ("max_staleness", 0)):
            require(name, getattr(self, name), at_least(least))
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices must differ, got {self.devices}")
        require("dtype", self.dtype, none_or(one_of("float32", "bfloat16")))
        if self.devices and self.dtype == "float32":
            raise ValueError("dtype must be None or 'bfloat16' on GPUs, got 'float32'")
        self._check_count()
        if self.sleeps and self.adapters:
            raise ValueError(
                "adapters must be False where replicas share the learner's devices and sleep while it trains (only all "
                "weights wake them), got True. Fix: sleep=false, if the model is small against the GPU"
            )
        if self.shared and self.max_staleness:
            raise ValueError(
                f"max_staleness must be 0 where replicas share the learner's devices (they rest while it trains), "
                f"got {self.max_staleness}"
            )
        if not self.sleep and not self.shared:
            raise ValueError(
                "sleep must be True unless learner and replicas share GPUs, got False. Fix: leave it out; replicas on "
                "the CPU or on GPUs of their own never sleep"
            )

    def _check_count(self) -> None:
        count = len(self.devices)
        serving = self.replicas * self.tensor_parallel
        apart = count == self.learner_ranks + serving
        shared = count == self.learner_ranks == serving
        if not count or apart or shared:
            return
        owners = ["learner"] * self.learner_ranks + ["replica"] * serving
        example = ",".join(map(str, range(len(owners))))
        shared_example = f" or {self._shared_example()} (shared)" if self.learner_ranks else ""
        raise ValueError(
            f"devices must be {len(owners)} GPUs for learner_ranks={self.learner_ranks}, replicas={self.replicas} and "
            f"tensor_parallel={self.tensor_parallel}, got {count}. Fix: devices={example} ({', '.join(owners)})"
            f"{shared_example}"
        )

    def _shared_example(self) -> str:
        """Returns the options under which both sides share the learner's GPUs."""
        own = ",".join(map(str, range(self.learner_ranks)))
        if self.learner_ranks % self.tensor_parallel == 0:
            return f"devices={own} replicas={self.learner_ranks // self.tensor_parallel}"
        return f"devices={own} replicas={self.learner_ranks} tensor_parallel=1"

    @property
    def shared(self) -> bool:
        """Whether learner and replicas have the same GPUs."""
        return bool(self.devices) and len(self.devices) == self.learner_ranks

    @property
    def sleeps(self) -> bool:
        """Whether the replicas sleep while the learner trains: both have the same GPUs, by turns."""
        return self.shared and self.sleep

    @property
    def learner_devices(self) -> tuple[int, ...]:
        return self.devices[: self.learner_ranks]

    @property
    def replica_devices(self) -> tuple[int, ...]:
        return self.devices if self.shared else self.devices[self.learner_ranks :]

    @property
    def weight_transfer(self) -> str:
        """nccl if learner and replicas have GPUs of their own; otherwise files in host memory, so that a shared GPU
        holds no third copy of the weights, and that nodes can pull them. Adapters are always such files.
        """
        if self.adapters:
            return "adapter"
        from_gpu_to_gpu = self.devices and self.learner_ranks and not self.shared and not self.files
        return "nccl" if from_gpu_to_gpu else "shm"

    @property
    def without_learner(self) -> DevicePlan:
        """Returns the plan of a rollout node, which has the replicas of this one on their devices.

        >>> DevicePlan(devices=(0, 1, 2), replicas=2).without_learner.replica_devices
        (1, 2)
        """
        return replace(self, devices=self.replica_devices, learner_ranks=0, sleep=True)

    @property
    def rests(self) -> bool:
        """Whether the replicas rest while the learner trains (`Fleet.rest`), without work or without devices."""
        return self.max_staleness == 0

    @property
    def decided_dtype(self) -> str | None:
        """Returns `dtype` with its default on GPUs; None if the configurations of replicas and learner decide."""
        return "bfloat16" if self.devices else self.dtype

    def replica(self, config: ReplicaConfig) -> ReplicaConfig:
        """Returns the replicas' configuration with what this plan decides."""
        return replace(
            config,
            devices=self.replica_devices,
            tensor_parallel=self.tensor_parallel,
            weight_transfer=self.weight_transfer,
            sleeps=self.sleeps,
            memory_share=config.memory_share or (MEMORY_SHARE_BESIDE if self.shared and not self.sleep else None),
            eager=self.eager or config.eager,
            dtype=self.decided_dtype or config.dtype,
        )

    def learner(self, config: LearnerProcessConfig) -> LearnerProcessConfig:
        """Returns the configuration of the learner's processes with what this plan decides."""
        return replace(config, ranks=self.learner_ranks, devices=self.learner_devices)

    @property
    def learner_fields(self) -> dict[str, Any]:
        """The fields of `LearnerConfig` that this plan decides; they agree with the replicas' configuration."""
        fields: dict[str, Any] = {"weight_transfer": self.weight_transfer}
        if self.decided_dtype:
            fields |= dict.fromkeys(("dtype", "weights_dtype"), self.decided_dtype)
        if self.devices:
            fields |= {"device": "cuda", "offload_optimizer": self.sleeps}
        return fields
