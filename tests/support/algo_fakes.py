"""Trajectories, batches and a tiny checkpoint for the tests of algo."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from engine.types import Batch, Prompt, StopReason, ToolUse, Trajectory, Turn

CANARY = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]


def tool_use(outcome: str) -> ToolUse:
    return ToolUse(
        name="python",
        arguments="{}",
        outcome=outcome,
        response="",
        closed_at=0.0,
        dispatched_at=0.0,
        finished_at=0.0,
        overlap_s=0.0,
        executed=True,
        jailed=True,
    )


def trajectory(
    text: str = "<answer>\\boxed{1}</answer>",
    *,
    answer: str = "1",
    outcomes: tuple[str, ...] = (),
    turns: int = 1,
    reward: float | None = None,
    stop: StopReason = StopReason.ANSWER,
    truncated: bool = False,
) -> Trajectory:
    """All tool calls belong to the first turn."""
    calls = tuple(tool_use(outcome) for outcome in outcomes)
    return Trajectory(
        prompt=Prompt(id="p", messages=(), answer=answer),
        sample=0,
        seed=0,
        temperature=1.0,
        token_ids_T=np.zeros(2, np.int32),
        sampled_T=np.asarray([False, True]),
        logprobs_T=np.zeros(2, np.float32),
        versions_T=np.zeros(2, np.int32),
        turns=tuple(
            Turn(
                start=1,
                end=2,
                tool_uses=calls if index == 0 else (),
                replica=0,
                cached_tokens=0,
                queued_at=0.0,
                started_at=0.0,
                finished_at=0.0,
                truncated=truncated,
            )
            for index in range(turns)
        ),
        text=text,
        stop=stop,
        started_at=0.0,
        finished_at=0.0,
        reward=reward,
    )


def batch(trajectories: int, *, step: int = 0, vocabulary: int = 512, longest: int = 40) -> Batch:
    """A prompt, a sampled turn, a tool response and a sampled turn each, of random lengths.

    Their log-probabilities are made up: version -1 says that no weights of a learner sampled them.
    """
    rng = np.random.default_rng((trajectories, step))
    lengths_B = rng.integers(12, longest, trajectories).astype(np.int32)
    sampled = []
    for length in lengths_B:
        mask_T = np.zeros(length, np.bool_)
        mask_T[4:8] = True
        mask_T[10:] = rng.random(length - 10) < 0.9
        sampled.append(mask_T)
    sampled_N = np.concatenate(sampled) if sampled else np.zeros(0, np.bool_)
    total = int(lengths_B.sum())
    return Batch(
        step=step,
        token_ids_N=rng.integers(0, vocabulary, total).astype(np.int32),
        sampled_N=sampled_N,
        logprobs_N=np.where(sampled_N, -6.2 + 0.1 * rng.normal(size=total), 0.0).astype(np.float32),
        versions_N=np.full(total, -1, np.int32),
        lengths_B=lengths_B,
        advantages_B=rng.normal(size=trajectories).astype(np.float32),
    )


def with_prefix(whole: Batch, prefix_ids: list[int]) -> Batch:
    """The batch with these tokens, which nobody sampled, before each trajectory."""
    starts_B = np.cumsum(whole.lengths_B) - whole.lengths_B
    places = np.repeat(starts_B, len(prefix_ids))
    before = {
        "token_ids_N": np.tile(np.asarray(prefix_ids, np.int32), len(starts_B)),
        "sampled_N": False,
        "logprobs_N": 0.0,
        "versions_N": -1,
    }
    arrays = {name: np.insert(getattr(whole, name), places, value) for name, value in before.items()}
    lengths_B = (whole.lengths_B + len(prefix_ids)).astype(np.int32)
    return Batch(step=whole.step, lengths_B=lengths_B, advantages_B=whole.advantages_B, **arrays)


def write_checkpoint(path: Path) -> Path:
    """A random two-layer Qwen3 in bf16 with tied embeddings, and a stand-in for a tokenizer file."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    path.mkdir()
    fields = config.to_dict() | {"dtype": "bfloat16", "architectures": ["Qwen3ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(fields))
    state = Qwen3ForCausalLM(config).to(torch.bfloat16).state_dict()
    state = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    (path / "tokenizer_config.json").write_text('{"chat_template": "stand-in"}')
    return path
