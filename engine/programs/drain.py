"""Ends a rollout node on SIGTERM, by which Slurm, Kubernetes and others take a machine back.

The node drains if it makes groups, and ends at once if it has not begun yet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from engine.nodes.node import NodeDrained, RolloutNode
from engine.telemetry.watchdog import end_on_signals

LEFT = "was told to leave, and has left"
Result = TypeVar("Result")


class Drain:
    """`await Drain().run(work)` runs a node's work until it ends or a signal ends it.

    node: the part that drains, once there is one.
    """

    def __init__(self) -> None:
        self.node: RolloutNode | None = None
        self._told = False

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Returns what the work returns. Raises what it raises, and NodeDrained if SIGTERM has ended it."""
        task = asyncio.current_task()
        assert task is not None

        def terminate() -> None:
            self._told = True
            if self.node is None:
                task.cancel()
            else:
                self.node.drain()

        with end_on_signals(task, terminate=terminate):
            try:
                return await work
            except asyncio.CancelledError:
                if not self._told:
                    raise
                raise NodeDrained(LEFT) from None
