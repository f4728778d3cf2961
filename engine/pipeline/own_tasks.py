"""What a stage's worker has under way beside its own task: other tasks that it started, and timers that will wake it.

Invariant: a worker that waits for an item, and for which `under_way` is False, can only be woken by another stage.
(A callback of a thread or of the loop to which the worker has no reference is not seen: no group may depend on one.)
"""

from __future__ import annotations

import asyncio
import gc
import types
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

_OWNER: ContextVar[OwnTasks | None] = ContextVar("owner", default=None)
_FRAMES = (types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType)
_STEPS = ("async_generator_asend", "coroutine_wrapper")  # objects between a frame and the one that it awaits


class OwnTasks:
    """The tasks and timers of the worker whose task creates this object."""

    def __init__(self) -> None:
        worker = asyncio.current_task()
        assert worker is not None, "a worker is a task"
        self.worker = worker
        self._tasks: WeakSet[asyncio.Future[Any]] = WeakSet()
        _OWNER.set(self)  # the tasks that this one starts inherit it

    def note(self, task: asyncio.Future[Any]) -> None:
        self._tasks.add(task)

    @property
    def under_way(self) -> bool:
        return any(not task.done() for task in self._tasks) or _has_timer(self.worker.get_coro())


@contextmanager
def tasks_noted() -> Iterator[None]:
    """Inside this context, each new task of the running loop is noted for the worker that started it."""
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()

    def make(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        task = before(loop, coroutine, **options) if before else asyncio.Task(coroutine, loop=loop, **options)
        if (owner := _OWNER.get()) is not None:
            owner.note(task)
        return task

    loop.set_task_factory(make)
    try:
        yield
    finally:
        loop.set_task_factory(before)


def _has_timer(coroutine: Any) -> bool:
    """Returns whether a suspended coroutine, or one that it awaits, holds a timer, such as an `asyncio.timeout`."""
    frames, seen = [coroutine], set[int]()
    while frames:
        frame = frames.pop()
        if id(frame) in seen:
            continue
        seen.add(id(frame))
        for held in gc.get_referents(frame):
            if isinstance(held, _FRAMES) or type(held).__name__ in _STEPS:
                frames.append(held)
            elif _is_timer(held) or any(map(_is_timer, _fields(getattr(held, "__self__", held)))):
                return True
    return False


def _fields(held: Any) -> list[Any]:
    if isinstance(held, types.ModuleType | types.FunctionType | type):
        return []
    return [*gc.get_referents(held), *getattr(held, "__dict__", {}).values()]


def _is_timer(held: Any) -> bool:
    return type(held).__name__ == "TimerHandle" and not held.cancelled()  # asyncio's and uvloop's
