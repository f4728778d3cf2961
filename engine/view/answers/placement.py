"""Answers the page "Placement": where the turns of a step were generated, and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.view.answers.trajectories import plain, recorded_groups
from engine.view.run_files import RunFiles


def placement_of(run: RunFiles, step: int) -> dict[str, Any]:
    """Returns the decisions of a step in order, each with the turn that it was about. started_at: when the first
    trajectory of the step began. Raises NotThere.
    """
    groups = recorded_groups(run, step)
    decisions: list[dict[str, Any]] = [
        {
            **plain(placed),
            "group": recorded.number,
            "sample": member.sample,
            "turn": number,
            "start": turn.start,
            "cached_tokens": turn.cached_tokens,
            "queued_at": turn.queued_at,
            "started_at": turn.started_at,
        }
        for recorded in groups
        for member in recorded.group.trajectories
        for part in member.parts
        for number, turn in enumerate(part.turns)
        for placed in turn.placed
    ]
    decisions.sort(key=lambda decision: decision["at"])
    members = [member for recorded in groups for member in recorded.group.trajectories]
    return {
        "step": step,
        "started_at": min((member.started_at for member in members), default=0.0),
        "decisions": decisions,
        "rules": dict(Counter(decision["rule"] for decision in decisions).most_common()),
        "replicas": dict(sorted(Counter(str(decision["replica"]) for decision in decisions).items())),
    }
