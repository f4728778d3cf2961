"""Wraps the coroutines of an agent, so that nothing they do ends the event loop or keeps us waiting.

Invariants
- SystemExit in a task of an agent, or in a task that it starts, is an error of that task. (From a plain task it would
  leave the event loop and end the run.)
- A dropped coroutine takes no further step, however it treats its cancellation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
_INSIDE: ContextVar[bool] = ContextVar("inside_an_agent", default=False)


class HeldCoroutine(Coroutine[Any, Any, T]):
    """Steps another coroutine: `tasks.create_task(HeldCoroutine(agent(...)))`."""

    def __init__(self, inner: Coroutine[Any, Any, T]) -> None:
        self._inner = inner
        self._dropped = False

    def drop(self) -> None:
        """Ends the task of this coroutine with CancelledError at its next step."""
        self._dropped = True

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        """Forwards `cr_frame` and the like, which tell where a task is."""
        return getattr(self._inner, name)

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        if self._dropped:
            with suppress(BaseException):  # its clean-up may raise, or it may ignore its end
                self._inner.close()
            raise asyncio.CancelledError
        try:
            return step(*arguments)
        except SystemExit as error:
            raise RuntimeError(f"SystemExit: {error.code}, in a task of an agent") from error


def enter_agent() -> None:
    """Marks the current task, and all tasks that it starts, as an agent's."""
    loop = asyncio.get_running_loop()
    factory = loop.get_task_factory()
    if not isinstance(factory, _Factory):
        loop.set_task_factory(_Factory(factory))
    _INSIDE.set(True)


class _Factory:
    """Makes tasks as the factory before it does, and wraps the coroutines of agents."""

    def __init__(self, before: Callable[..., Any] | None) -> None:
        self._before = before

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> Any:
        if _INSIDE.get() and asyncio.iscoroutine(coroutine) and not isinstance(coroutine, HeldCoroutine):
            coroutine = HeldCoroutine(coroutine)
        if self._before is not None:
            return self._before(loop, coroutine, **options)
        return asyncio.Task(coroutine, loop=loop, **options)
