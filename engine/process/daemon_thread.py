"""A thread for blocking calls that the process does not wait for when it exits.

The interpreter joins the threads of every ThreadPoolExecutor before it exits, so a call that never returns hangs it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")
_Call = tuple["Future[Any]", Callable[[], Any]]


class DaemonThread:
    """Runs calls one after the other, from the first `run` or `post` until `close`."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    async def run(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        """Returns or raises what the function does. A call that has begun goes on if this is cancelled."""
        return await asyncio.wrap_future(self.post(function, *args, **kwargs))

    def post(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        """Queues a call without waiting for it. The future gets what the function returns or raises."""
        if self._thread.ident is None:
            self._thread.start()
        future: Future[Result] = Future()
        self._calls.put((future, lambda: function(*args, **kwargs)))
        return future

    def close(self) -> None:
        """Ends the thread once it has made the calls that are queued. Idempotent."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
            del call, future, function  # otherwise they would stay alive while the thread waits
