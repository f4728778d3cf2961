"""vLLM replicas that outlive a run: one fleet after the other uses the same engine processes, each with an empty cache.

Invariants
- An engine is started by the first fleet and ended by `Engines`, however the run ends; one that died is replaced.
- What a fleet hears of a step, `Engines.on_sample` hears first.
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
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
VOCABULARY = MODEL["vocab_size"]


def write_model(folder: Path) -> None:
    """Writes a Qwen3 checkpoint with random weights: a replay gives lengths, what the tokens say does not matter."""
    import numpy as np
    from safetensors.numpy import save_file

    hidden, inner, head = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["head_dim"]
    queries, keys = MODEL["num_attention_heads"] * head, MODEL["num_key_value_heads"] * head
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes = {"model.embed_tokens.weight": (VOCABULARY, hidden), "model.norm.weight": (hidden,)}
    for number in range(MODEL["num_hidden_layers"]):
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
        super().__init__(config, index, core, self._hear)
        self.listener: Callable[[int, KvSample], None] = lambda index, sample: None

    def _hear(self, index: int, sample: KvSample) -> None:
        self.listener(index, sample)

    async def start(self) -> None:
        if self._engine is None:
            await super().start()

    async def shutdown(self) -> None:
        if self.died.is_set():
            await self.close()

    async def forget(self) -> None:
        """Empties the prefix cache, once the requests of a run that failed have let go of their blocks."""
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
        """A MakeReplica (engine.fleet)."""
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
