"""Where the turns of a step were generated, and why, for the page "Placement"."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.view.answers.trajectories import NotThere
from engine.view.run_files import RunFiles


def placement_of(run: RunFiles, step: int) -> dict[str, Any]:
    """The decisions of a step in their order. Times are seconds since its first trajectory began. Raises NotThere."""
    groups = run.recorded.groups(step)
    if not groups:
        raise NotThere(f"the placement of step {step} is not kept: it is in the recording (record/steps)")
    start = min((member.started_at for group in groups for member in group.trajectories), default=0.0)
    decisions: list[dict[str, Any]] = [
        {
            "at_s": round(placed.at - start, 5),
            "group": group.group,
            "sample": member.sample,
            "turn": number,
            "replica": placed.replica,
            "rule": placed.rule,
            "headroom_blocks": placed.headroom_blocks,
            "stay_s": placed.stay_s,
            "go_s": placed.go_s,
            "free_blocks": {str(replica): free for replica, free in placed.free_blocks.items()},
            "waited_s": round(turn.started_at - turn.queued_at, 5),
            "cached_tokens": turn.cached_tokens,
            "input_tokens": turn.start,
        }
        for group in groups
        for member in group.trajectories
        for sequence in member.sequences
        for number, turn in enumerate(sequence)
        for placed in turn.placed
    ]
    decisions.sort(key=lambda decision: decision["at_s"])
    return {
        "step": step,
        "started_at": start,
        "decisions": decisions,
        "rules": dict(Counter(decision["rule"] for decision in decisions).most_common()),
        "replicas": dict(sorted(Counter(str(decision["replica"]) for decision in decisions).items())),
    }
