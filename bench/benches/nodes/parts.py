"""A real lead without replicas, and made-up groups, for the bench of nodes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import ROOT
from engine.nodes.config import LeadConfig
from engine.nodes.door import Door
from engine.nodes.lead import Lead
from engine.run.journal import Journal
from engine.run.journal_records import Decided, Drawn, Ended, Grown, Piece, Record
from engine.telemetry.timeline import Timeline
from engine.types import Prompt, StopReason, Trajectory, Turn

CHECKPOINT = ROOT / "recipes" / "tiny" / "agent"
RECIPE = ROOT / "recipes" / "quickstart.py"


@asynccontextmanager
async def a_lead(listen: str, keys: Path, folder: Path) -> AsyncIterator[Lead]:
    """Runs a lead with a journal on the disk, as every lead has."""
    config = LeadConfig(listen=listen, keys=keys, recipe=RECIPE, options=(), nodes_only=True)
    async with Door(config, checkpoint=CHECKPOINT, note=lambda line: None) as door, _lead(config, door, folder) as lead:
        yield lead


def _lead(config: LeadConfig, door: Door, folder: Path) -> Lead:
    return Lead(
        config,
        door,
        folder=folder,
        journal=Journal(folder / "journal"),
        group_tokens=1,
        min_version=lambda lease: 0,
        kv_tokens=lambda: (0, 0),
        version=lambda: 0,
        rolling=False,
        timeline=Timeline(),
        note=lambda line: None,
    )


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A group of so many rollouts of so many turns of so many sampled tokens, about four characters each."""

    name: str
    rollouts: int
    turns: int
    tokens: int

    @property
    def group_tokens(self) -> int:
        return self.rollouts * self.turns * self.tokens

    @property
    def records(self) -> int:
        """Counts the records that a node sends of a group: the turns (the last one with the end), and the decision."""
        return self.rollouts * self.turns + 1


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(name="quickstart", rollouts=16, turns=2, tokens=15),
        Shape(name="math8k", rollouts=32, turns=4, tokens=780),
    )
}


def a_prompt(number: int) -> Prompt:
    return Prompt(id=f"prompt-{number}", messages=({"role": "user", "content": "What is 6 * 7?"},), answer="42")


def records_of(drawn: Drawn, shape: Shape) -> Iterator[Record]:
    """Yields records as a node makes them, turn by turn over all rollouts, and the decision."""
    lease, attempt = drawn.lease, drawn.attempt
    for turn in range(shape.turns - 1):
        for sample in range(shape.rollouts):
            piece = Piece(**_parts(shape, turn))
            yield Grown(lease=lease, attempt=attempt, sample=sample, piece=piece, tokens=(turn + 1) * shape.tokens)
    for sample in range(shape.rollouts):
        trajectory = Trajectory(
            prompt=Prompt(id="", messages=(), answer=""),
            sample=sample,
            seed=0,
            temperature=1.0,
            started_at=0.0,
            finished_at=0.0,
            **_parts(shape, shape.turns - 1),
            stop=StopReason.ANSWER,
            reward=1.0,
        )
        tokens = shape.turns * shape.tokens
        yield Ended(lease=lease, attempt=attempt, sample=sample, trajectory=trajectory, tokens=tokens)
    members = tuple(range(shape.rollouts))
    yield Decided(lease=lease, attempt=attempt, members=members, drop=None, waste={})


def _parts(shape: Shape, number: int) -> dict[str, Any]:
    tokens = shape.tokens
    start = number * tokens
    return {
        "token_ids_T": np.arange(tokens, dtype=np.int32),
        "sampled_T": np.ones(tokens, np.bool_),
        "logprobs_T": np.full(tokens, -0.5, np.float32),
        "versions_T": np.zeros(tokens, np.int32),
        "turns": (
            Turn(
                start=start,
                end=start + tokens,
                tool_uses=(),
                replica=0,
                cached_tokens=0,
                queued_at=0.0,
                started_at=0.0,
                finished_at=0.0,
            ),
        ),
        "text": "1234" * tokens,
    }
