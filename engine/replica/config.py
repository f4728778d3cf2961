"""How a replica's engine is configured, and what must be set before vLLM is imported. Imports nothing heavy."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandbox.require import at_least, none_or, one_of, positive, require, require_fields, within

# These are set before torch and vLLM are imported. Engine processes inherit them.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # an engine is pinned to one core; two OpenMP threads on it would spin against each other
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the affinity is set by the node, per engine
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # hides a NUMA notice per engine
}
# These replace what the user has set. A replica is on one machine; without them its gloo, NCCL and message queues would
# listen, without a key, on the interface of the machine's name or of the user's variables.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
_PREPARED: list[bool] = []  # not empty once `prepare_environment` was called in this process
_M_ARENA_MAX = -8  # malloc.h
# Shares of a GPU's memory: vLLM's own default, and the share where a resting learner keeps its weights there in fp32
# (4 bytes a parameter, over its ranks; training takes 18 and more).
MEMORY_SHARE, MEMORY_SHARE_BY_TURNS = 0.92, 0.6
MEMORY_SHARE_BESIDE = 0.3  # of a replica that keeps its memory beside a learner that trains
STEP_TOKENS = 8192  # at most in one engine step; vLLM's own default on a GPU is 2,048
CPU_KV_BLOCKS = 1024
SLEEPS_SINCE = (0, 32)  # earlier versions lose block tables in sleep, and a replica that wakes computes garbage
QUANTIZATIONS = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # the CPU platform makes several processes of "uni"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM can make room for
OWN_HEAD = ("deepseek_v3", "glm4_moe", "gpt_oss", "olmoe")  # vLLM gives them a head of its own, tied or not


def check_head(fields: Mapping[str, Any], option: str) -> None:
    """Raises ValueError for a model whose head vLLM would leave unfilled. fields: of its config.json. option: names the
    checkpoint.
    """
    kind = fields.get("model_type")
    if fields.get("tie_word_embeddings") and kind in OWN_HEAD:
        raise ValueError(
            f"{option}: tie_word_embeddings must be false for {kind!r}, got true: vLLM would sample with a head that "
            "nothing fills. Fix: a checkpoint with a head of its own"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaConfig:
    """How an engine is built. Of the fields for GPUs `devices` with one GPU, `sleeps` and `eager` were run on one."""

    checkpoint: str
    """A Hugging Face folder."""
    max_model_len: int = 1024
    """Tokens of the longest sequence."""
    max_num_seqs: int = 256
    """Requests that run at once."""
    kv_blocks: int | None = None
    """The KV cache holds kv_blocks x block_size tokens. None: on GPUs as many as fit their memory; on the CPU 1,024, or
    what one sequence of max_model_len takes if that is more."""
    block_size: int = 32
    dtype: str = "float32"
    """Type of the weights and the computation: "float32" or "bfloat16", which GPUs need."""
    devices: tuple[int, ...] = ()
    """The GPUs of all replicas; empty for the CPU. Replica i takes `tensor_parallel` of them, from i x tensor_parallel
    on.
    """
    tensor_parallel: int = 1
    """GPUs per replica; on the CPU processes, each with a part of every layer."""
    kv_offload_bytes: int = 0
    """Host memory for blocks that leave the cache (vLLM's native offloading, kv_offloading_size)."""
    weight_transfer: str = "shm"
    """How weights come from the learner: "shm" (one host) or "gloo"; between GPUs also "nccl". "adapter":
    only the adapter of a LoRA run leaves the learner, and its versions are served side by side."""
    lora_rank: int = 0
    """Rank of the adapters, the same as in the learner."""
    lora_targets: tuple[str, ...] = ()
    """Names of the layers that the adapters change, the same as in the learner. vLLM prepares no other layers."""
    adapters: int = 1
    """Versions of the adapter that are served at once: one more than a trajectory may be old."""
    quantization: str | None = None
    """How replicas on GPUs quantise weights that they receive: "fp8_per_tensor", "fp8_per_channel" or
    "fp8_per_block". Not yet run."""
    returns_routes: bool = False
    """Whether a replica of a mixture of experts reports which experts it chose for each token, as a learner with
    `LearnerConfig.replay_routing` needs. On GPUs vLLM does that (`enable_return_routed_experts`). On the CPU an engine
    has to be one process."""
    sleeps: bool = False
    """Whether a replica at rest gives its GPU memory up (vLLM's sleep mode)."""
    eager: bool = False
    """Whether an engine on GPUs neither compiles its model nor captures CUDA graphs. It is then up in seconds in place
    of a minute or two, and takes longer for each token."""
    memory_share: float | None = None
    """Share of each GPU's memory that a replica takes, in (0, 1]. None: nearly all of it, but three fifths if it
    `sleeps`, since a learner at rest is there too.
    """
    start_deadline_s: float = 300.0
    """Seconds to come up. On a GPU these include compiling the model."""
    step_deadline_s: float = 300.0
    """Seconds without a step, while requests are in flight, after which the engine counts as stalled. As long as vLLM
    waits for its own workers: on the CPU one step computes all prompts that wait, which can take minutes."""
    update_deadline_s: float = 60.0
    """Seconds for a weight update, a canary, falling asleep, or waking up."""

    def __post_init__(self) -> None:
        require_fields(self, at_least(1), "max_model_len", "max_num_seqs", "block_size")
        require("dtype", self.dtype, one_of("float32", "bfloat16"))
        require_fields(self, positive, "start_deadline_s", "step_deadline_s", "update_deadline_s")
        if "[" in self.checkpoint:
            raise ValueError(
                f"checkpoint must be a path without '[', which vLLM takes for a pattern, got {self.checkpoint!r}"
            )
        if self.kv_blocks is not None and self.kv_blocks < self._least_blocks:
            raise ValueError(
                f"kv_blocks {self.kv_blocks} x block_size {self.block_size} do not hold one sequence of "
                f"max_model_len {self.max_model_len}. Fix: at least {self._least_blocks} blocks (one is vLLM's own)"
            )
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices must differ, got {self.devices}")
        if self.tensor_parallel < 1 or len(self.devices) % self.tensor_parallel:
            raise ValueError(f"tensor_parallel must divide the {len(self.devices)} devices, got {self.tensor_parallel}")
        require("kv_offload_bytes", self.kv_offload_bytes, at_least(0))
        require("memory_share", self.memory_share, none_or(within("(0, 1]")))
        known = ("shm", "gloo", "adapter", "nccl") if self.devices else ("shm", "gloo", "adapter")
        require("weight_transfer", self.weight_transfer, one_of(*known))
        if (self.weight_transfer == "adapter") != (self.lora_rank > 0):
            raise ValueError(f'lora_rank must be positive with weight_transfer "adapter" alone, got {self.lora_rank}')
        if self.lora_rank and not self.lora_targets:
            raise ValueError("lora_targets must name the layers of the adapters if lora_rank is positive, got ()")
        if self.lora_rank > LORA_RANKS[-1]:
            raise ValueError(f"lora_rank must be at most {LORA_RANKS[-1]} for vLLM, got {self.lora_rank}")
        require("adapters", self.adapters, at_least(1))
        require("quantization", self.quantization, none_or(one_of(*QUANTIZATIONS)))
        if self.devices:
            return
        if self.quantization is not None:
            raise ValueError(f"quantization must be None on the CPU, got {self.quantization!r}")
        if self.sleeps:
            raise ValueError("sleeps must be False on the CPU, got True")
        if self.eager:
            raise ValueError("eager must be False on the CPU, where engines never compile, got True")
        if self.block_size % 32:
            raise ValueError(f"block_size must be a multiple of 32 on the CPU, got {self.block_size}")
        if self.returns_routes and self.tensor_parallel > 1:
            raise ValueError(
                "tensor_parallel must be 1 with returns_routes (learner.replay_routing) on the CPU, got "
                f"{self.tensor_parallel}"
            )
        if self.kv_offload_bytes:
            raise ValueError(f"kv_offload_bytes must be 0 on the CPU, got {self.kv_offload_bytes}")
        if self.memory_share is not None:
            raise ValueError(f"memory_share must be None on the CPU, got {self.memory_share}")

    @property
    def _least_blocks(self) -> int:
        """Blocks that hold one sequence, plus vLLM's own."""
        return -(-self.max_model_len // self.block_size) + 1

    @property
    def blocks(self) -> int | None:
        """Blocks of the KV cache. None, on GPUs only: as many as fit their memory."""
        if self.kv_blocks is None and not self.devices:
            return max(CPU_KV_BLOCKS, self._least_blocks)
        return self.kv_blocks

    def devices_of(self, index: int) -> tuple[int, ...]:
        """Returns the GPUs of replica `index`. Raises ValueError if there are too few."""
        devices = self.devices[index * self.tensor_parallel :][: self.tensor_parallel]
        if self.devices and not devices:
            raise ValueError(
                f"devices {self.devices} are too few for replica {index} with tensor_parallel {self.tensor_parallel}"
            )
        return devices

    def arguments(self, index: int) -> dict[str, Any]:
        """Returns the arguments of vLLM's AsyncEngineArgs for replica `index`."""
        common = {
            "model": self.checkpoint,
            "skip_tokenizer_init": True,
            "trust_remote_code": False,
            "load_format": "safetensors",  # other formats are pickles
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "num_gpu_blocks_override": self.blocks,
            "block_size": self.block_size,
            "seed": 0,
            "use_tqdm_on_load": False,
            "worker_extension_cls": "engine.replica.weight_transfer.WorkerExtension",
        }
        if self.lora_rank:
            common |= {
                "enable_lora": True,
                "lora_target_modules": [target.rpartition(".")[2] for target in self.lora_targets],
                "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= self.lora_rank),
                "max_loras": self.adapters,
                "max_cpu_loras": self.adapters + 1,  # a new one is loaded before the oldest is removed
            }
        if self.devices:
            if self.returns_routes:
                common["enable_return_routed_experts"] = True
            return common | {
                "device_ids": list(self.devices_of(index)),
                "tensor_parallel_size": self.tensor_parallel,
                "max_num_batched_tokens": max(STEP_TOKENS, self.max_num_seqs),
                "enable_sleep_mode": self.sleeps,
                "enforce_eager": self.eager,
                "quantization": self.quantization,
                "gpu_memory_utilization": self.memory_share or (MEMORY_SHARE_BY_TURNS if self.sleeps else MEMORY_SHARE),
                "kv_offloading_size": self.kv_offload_bytes / (1 << 30) or None,  # GiB
            }
        return common | {
            "enforce_eager": True,
            # A prefill that is split over steps kills a seeded request on the CPU. No step computes more tokens than
            # the KV cache holds, so this bound splits none.
            "max_num_batched_tokens": max(STEP_TOKENS, (self.blocks or 0) * self.block_size),
            "kv_cache_memory_bytes": 1 << 28,
            "gpu_memory_utilization": 0.05,
            "tensor_parallel_size": self.tensor_parallel,
            "distributed_executor_backend": "mp" if self.tensor_parallel > 1 else UNIPROC,
        }


def check_sleep(version: str) -> None:
    """Raises ValueError for a version of vLLM whose replicas lose state when they sleep."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers and numbers < SLEEPS_SINCE:  # a development build may have no number
        raise ValueError(
            f"vLLM {version} loses block tables when a replica sleeps. Fix: install vLLM 0.32 or later; or let the "
            "replicas keep their memory beside the learner's (sleep=false), if the model is small against the GPU; or "
            "give both GPUs of their own (as many devices as both need together)"
        )


def prepare_environment() -> None:
    """Sets what torch and vLLM read when they are imported and what their processes inherit. Later calls do nothing.

    `training`, `serving` and a replica's start call it. Raises RuntimeError if something else has imported vLLM.
    """
    if _PREPARED:
        return
    if "vllm" in sys.modules:
        raise RuntimeError(
            "vLLM was imported before the run began, with other settings than a replica needs. Fix: import vllm later, "
            "or call engine.replica.config.prepare_environment() first"
        )
    _PREPARED.append(True)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ.update(LOOPBACK)
    if "torch" in sys.modules:  # it has read OMP_NUM_THREADS already
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # Allow one malloc arena: an engine is forked from a thread, and a thread's own arena keeps no freed pages.
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # a CPU needs no Triton
    # vLLM's info cache spares the next start a second. Without a home folder for it vLLM would log three tracebacks.
    logging.getLogger("vllm.model_executor.models.registry").addFilter(lambda it: "info cache" not in str(it.msg))
    warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated", category=FutureWarning)
