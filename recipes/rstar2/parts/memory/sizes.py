"""Public models by name, and settings of `rl.py` for one GPU and for eight. **None of them has been run on a GPU.**

    python recipes/rstar2/fit.py                          # all settings, and whether they fit
    python recipes/rstar2/fit.py size=qwen2.5-7b-8gpu     # one of them in detail, with its command line

Whether a setting fits is arithmetic (`memory.py`), to which a test holds it; how fast it is and how well it
learns nobody knows yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from algo.learner.config import LearnerConfig

# What their config.json says (Hugging Face); enough to build them in transformers.
SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "Qwen3-1.7B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "Qwen2.5-7B-Instruct": {
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Qwen3-14B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}

PROMPT_TOKENS = 2048  # the release's longest prompt; budgets of a stage are of the response


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What to pass to `rl.py` for a model on so many GPUs. All of them are shared: learner and replicas take turns."""

    about: str
    model: str
    """A name in SHAPES."""
    protocol: Literal["report", "release"]
    devices: int
    memory_gb: float
    """Of each GPU, at least."""
    tensor_parallel: int
    memory_share: float
    """Of a GPU, for a replica, which leaves the learner at rest its place."""
    prompts_per_step: int
    group_size: int
    response_tokens: int
    """The longest of the protocol's stages."""
    learner: LearnerConfig

    @property
    def max_tokens(self) -> int:
        return PROMPT_TOKENS + self.response_tokens


SIZES: Mapping[str, Size] = {
    "qwen3-1.7b-lora-1gpu": Size(
        about="adapters on one GPU; their learning rate is our guess, ten times the report's",
        model="Qwen3-1.7B",
        protocol="release",
        devices=1,
        memory_gb=80,
        tensor_parallel=1,
        memory_share=0.85,
        prompts_per_step=32,
        group_size=16,
        response_tokens=8192,
        learner=LearnerConfig(
            lr=1e-5, minibatches=1, micro_batch_tokens=16384, activation_checkpointing=True, lora_rank=32
        ),
    ),
    "qwen3-1.7b-1gpu": Size(
        about="all weights on one GPU",
        model="Qwen3-1.7B",
        protocol="release",
        devices=1,
        memory_gb=80,
        tensor_parallel=1,
        memory_share=0.85,
        prompts_per_step=32,
        group_size=16,
        response_tokens=8192,
        learner=LearnerConfig(lr=1e-6, minibatches=1, micro_batch_tokens=16384, activation_checkpointing=True),
    ),
    "qwen2.5-7b-8gpu": Size(
        about="the public reproduction (RLinf: AIME24 33.65, AIME25 24.11, MATH-500 79.60; no SFT): the first to try",
        model="Qwen2.5-7B-Instruct",
        protocol="release",
        devices=8,
        memory_gb=80,
        tensor_parallel=1,
        memory_share=0.85,
        prompts_per_step=128,
        group_size=16,
        response_tokens=8192,
        learner=LearnerConfig(lr=1e-6, minibatches=1, micro_batch_tokens=20480, activation_checkpointing=True),
    ),
    "qwen3-14b-8gpu-80gb": Size(
        about="the report's model and its three stages on eight GPUs instead of 64",
        model="Qwen3-14B",
        protocol="report",
        devices=8,
        memory_gb=80,
        tensor_parallel=2,
        memory_share=0.8,
        prompts_per_step=512,
        group_size=16,
        response_tokens=12288,
        learner=LearnerConfig(lr=1e-6, minibatches=1, micro_batch_tokens=14336, activation_checkpointing=True),
    ),
    "qwen3-14b-8gpu-141gb": Size(
        about="the same on larger GPUs: longer rows, more trajectories at once",
        model="Qwen3-14B",
        protocol="report",
        devices=8,
        memory_gb=141,
        tensor_parallel=2,
        memory_share=0.85,
        prompts_per_step=512,
        group_size=16,
        response_tokens=12288,
        learner=LearnerConfig(lr=1e-6, minibatches=1, micro_batch_tokens=28672, activation_checkpointing=True),
    ),
}
