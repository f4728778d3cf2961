"""Keeps vLLM replicas over several runs: one fleet after the other uses the same engines, each with an empty cache.

Invariants
- An engine is started by the first fleet and ended by `Engines`, however the run ends; one that died is replaced.
- `Engines.on_sample` gets each sample before its fleet does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from engine.replica.config import ReplicaConfig
from engine.replica.port import KvSample
from engine.replica.replica import Replica

# 3 M parameters in fp32: on one core a step costs some milliseconds and a prefilled token about a tenth of one, so that
# filling the KV cache anew takes a like share of a trajectory's life as on a GPU.
LAYERS, HIDDEN, INNER, HEADS, KEY_HEADS, HEAD, VOCABULARY = 4, 256, 768, 8, 4, 32, 512
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_model(folder: Path) -> None:
    """Writes a Qwen3 checkpoint with random weights: a replay sets lengths, and the tokens themselves do not matter."""
    import numpy as np
    from safetensors.numpy import save_file

    queries, keys = HEADS * HEAD, KEY_HEADS * HEAD
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, queries),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for number in range(LAYERS):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(shape, np.float32) if len(shape) == 1 else rng.normal(0, 0.05, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(MODEL))


class KeptReplica(Replica):
    """A replica whose engine survives the fleet that shuts it down; `close` ends it."""

    def __init__(self, config: ReplicaConfig, index: int, core: int | None) -> None:
        super().__init__(config, index, core, self._pass_on)
        self.listener: Callable[[int, KvSample], None] = lambda index, sample: None

    def _pass_on(self, index: int, sample: KvSample) -> None:
        self.listener(index, sample)

    async def start(self) -> None:
        if self._engine is None:
            await super().start()

    async def shutdown(self) -> None:
        if self.died.is_set():
            await self.close()

    async def forget(self) -> None:
        """Empties the prefix cache once the requests of a failed run have released their blocks."""
        while not await self._engine.reset_prefix_cache():  # noqa: ASYNC110 (an engine does not tell by itself)
            await asyncio.sleep(0.02)

    async def close(self) -> None:
        await super().shutdown()


class Engines:
    """`async with Engines(config, 2) as engines`, then `Fleet(..., engines.make, ...)` as often as wanted."""

    def __init__(self, config: ReplicaConfig, count: int) -> None:
        self.config, self.count = config, count
        self.replicas: dict[int, KeptReplica] = {}
        self.on_sample: Callable[[int, KvSample], None] = lambda index, sample: None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for replica in self.replicas.values():
            await replica.close()

    def make(self, index: int, core: int | None, on_step: Callable[[int, KvSample], None]) -> KeptReplica:
        """Makes a replica for a fleet, or gives it the one that is kept."""
        replica = self.replicas.get(index)
        if replica is None or replica.died.is_set():
            replica = self.replicas[index] = self._new(index, core)

        def listener(index: int, sample: KvSample) -> None:
            self.on_sample(index, sample)
            on_step(index, sample)

        replica.listener = listener
        return replica

    def _new(self, index: int, core: int | None) -> KeptReplica:
        return KeptReplica(self.config, index, core)

    async def forget(self, deadline_s: float = 120.0) -> None:
        """Empties every prefix cache. Raises TimeoutError when an engine is silent or its requests keep blocks."""
        async with asyncio.timeout(deadline_s):
            for replica in self.replicas.values():
                if not replica.died.is_set():
                    await replica.forget()
