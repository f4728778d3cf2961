"""A stage as a recipe may have it, for the question what a stage costs."""

from __future__ import annotations

from engine.pipeline.pipeline import Inbox, Outbox


async def skip_easy(inbox: Inbox, outbox: Outbox) -> None:
    """Drops the groups of which the model solves more than half."""
    async for group in inbox:
        if group.rewards_G.mean() <= 0.5:
            await outbox.put(group)
