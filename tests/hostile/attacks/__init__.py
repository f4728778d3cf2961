"""Hostile programs, as data. test_sandbox_attacks.py runs them."""

from . import (
    forgery,
    host,
    idle,
    kernel,
    limits,
    liveness,
    neighbours,
    network,
    output,
    processes,
    session_limits,
    sessions,
    signals,
)
from .cells import PAUSE_S, SessionAttack
from .record import PLANTED, Attack

ATTACKS: tuple[Attack, ...] = (
    *forgery.ATTACKS,
    *output.ATTACKS,
    *processes.ATTACKS,
    *signals.ATTACKS,
    *neighbours.ATTACKS,
    *liveness.ATTACKS,
    *host.ATTACKS,
    *network.ATTACKS,
    *kernel.ATTACKS,
    *limits.ATTACKS,
)

SESSION_ATTACKS: tuple[SessionAttack, ...] = (*idle.ATTACKS, *sessions.ATTACKS, *session_limits.ATTACKS)

__all__ = ["ATTACKS", "PAUSE_S", "PLANTED", "SESSION_ATTACKS", "Attack", "SessionAttack"]
