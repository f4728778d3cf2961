"""Answers the page "Placement": where the turns of a step were generated, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from engine.recording.outlines import PlacedOutline, RecordedOutline, TurnOutline
from engine.types import Trajectory
from engine.view.answers.trajectories import NotThere, plain, recorded_outlines
from engine.view.run_files import RunFiles

PAGE = 100  # decisions of an answer


class _Decision(NamedTuple):
    """A placement, and where it is: part, turn and placed count within the trajectory, its part and its turn."""

    at: float
    group: int
    member: int
    part: int
    number: int
    placed_number: int
    turn: TurnOutline
    placed: PlacedOutline


def placement_of(run: RunFiles, step: int) -> dict[str, Any]:
    """Returns how many decisions a step had, with means by rule. started_at: when the first trajectory of the step
    began. groups: how many groups can be read, of `groups_written`. Raises NotThere.

    headroom_blocks, waited_s: means. cached: mean share of a turn's input that came from the prefix cache.
    """
    groups = recorded_outlines(run, step)
    by_rule: dict[str, list[_Decision]] = defaultdict(list)
    for decision in _decisions(groups):
        by_rule[decision.placed.rule].append(decision)
    rules = sorted(by_rule, key=lambda rule: -len(by_rule[rule]))
    return {
        "step": step,
        "started_at": _began(groups),
        "count": sum(map(len, by_rule.values())),
        "page": PAGE,
        "groups": len(groups),
        "groups_written": run.recorded.groups_written(step),
        "rules": [{"rule": rule, **_means(by_rule[rule])} for rule in rules],
    }


def decisions_of(run: RunFiles, step: int, page: int) -> dict[str, Any]:
    """Returns PAGE decisions of a step, in order, each with the turn that it was about. Raises NotThere."""
    if page < 0:
        raise NotThere(f"there is no page {page}")
    groups = recorded_outlines(run, step)
    decisions = sorted(_decisions(groups), key=lambda decision: decision.at)
    shown = decisions[page * PAGE : (page + 1) * PAGE]
    wanted = {decision.group for decision in shown}
    whole = {number: run.recorded.group(step, number) for number in wanted}
    rows = []
    for decision in shown:
        recorded = whole[decision.group]
        if recorded is not None:  # its file may have been deleted meanwhile
            rows.append(_row(decision, recorded.group.trajectories[decision.member]))
    return {"step": step, "page": page, "decisions": rows}


def _decisions(groups: Iterable[RecordedOutline]) -> list[_Decision]:
    return [
        _Decision(placed.at, recorded.number, member_number, part, number, placed_number, turn, placed)
        for recorded in groups
        for member_number, member in enumerate(recorded.group.trajectories)
        for part, turns in enumerate(member.parts)
        for number, turn in enumerate(turns)
        for placed_number, placed in enumerate(turn.placed)
    ]


def _began(groups: Iterable[RecordedOutline]) -> float:
    return min((member.started_at for recorded in groups for member in recorded.group.trajectories), default=0.0)


def _means(own: Sequence[_Decision]) -> dict[str, Any]:
    return {
        "count": len(own),
        "headroom_blocks": fmean(decision.placed.headroom_blocks for decision in own),
        "waited_s": fmean(decision.turn.started_at - decision.turn.queued_at for decision in own),
        "cached": fmean(decision.turn.cached_tokens / max(1, decision.turn.start) for decision in own),
    }


def _row(decision: _Decision, member: Trajectory) -> dict[str, Any]:
    turn = decision.turn
    placed = member.parts[decision.part].turns[decision.number].placed[decision.placed_number]
    return {
        **plain(placed),
        "group": decision.group,
        "sample": member.sample,
        "turn": decision.number,
        "start": turn.start,
        "cached_tokens": turn.cached_tokens,
        "queued_at": turn.queued_at,
        "started_at": turn.started_at,
    }
