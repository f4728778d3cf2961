"""Reads what an engine sends straight from its socket, in the place of vLLM's task on pyzmq's asyncio socket.

That takes three futures and five callbacks of the event loop for each message, which cost more than twice what reading
it does. This adapts an interface that may change. It imports vLLM, so only code that builds an engine imports it.

Invariants
- Every message is read once and in order: outputs of our requests go to their streams, results of calls to their
  callers, and everything else into the queue from which vLLM's output handler takes it.
- An engine that says that it is dead, and a client that is shut down, end up in that queue as errors.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import zmq
from vllm.v1.engine.core_client import _process_utility_output
from vllm.v1.engine.exceptions import EngineDeadError

_POLLIN = int(zmq.POLLIN)  # arithmetic on pyzmq's enums takes microseconds


def read_directly(client: Any, deliver: Callable[[Sequence[Any]], list[Any]]) -> None:
    """Lets vLLM's AsyncMPClient read in this way when it first reads. client: has not read yet. deliver: takes the
    outputs of a message and returns those that vLLM's output handler is to have.
    """
    resources, queue, calls, decoder = client.resources, client.outputs_queue, client.utility_results, client.decoder

    def ensure() -> None:
        if resources.output_queue_task is None:
            reading = _read(resources, queue, calls, decoder, deliver)
            # vLLM's resources own the task: they cancel it when the client is shut down. Its errors go into the queue.
            resources.output_queue_task = asyncio.create_task(reading, name="engine-outputs")

    assert resources.output_queue_task is None, "vLLM reads already"
    client._ensure_output_queue_task = ensure


async def _read(
    resources: Any,
    queue: asyncio.Queue[Any],
    calls: dict[int, Any],
    decoder: Any,
    deliver: Callable[[Sequence[Any]], list[Any]],
) -> None:
    loop = asyncio.get_running_loop()
    socket: zmq.Socket[bytes] = zmq.Socket.shadow(resources.output_socket.underlying)
    failed: asyncio.Future[None] = loop.create_future()

    def read_all() -> None:
        """Reads until nothing is there; only then does the descriptor tell of new messages."""
        if resources.output_socket.closed:
            return
        try:
            while int(socket.getsockopt(zmq.EVENTS)) & _POLLIN:  # asking is cheaper than an exception at the end
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                resources.validate_alive(frames)
                outputs = decoder.decode(frames)
                if outputs.utility_output:
                    _process_utility_output(outputs.utility_output, calls)
                    continue
                outputs.outputs = deliver(outputs.outputs)
                if outputs.outputs or outputs.scheduler_stats:
                    queue.put_nowait(outputs)
        except Exception as error:
            if not failed.done():
                failed.set_exception(error)

    descriptor = None
    try:
        descriptor = os.dup(int(socket.getsockopt(zmq.FD)))  # vLLM closes its socket before it cancels this task
        loop.add_reader(descriptor, read_all)
        read_all()
        await failed
    except asyncio.CancelledError:
        queue.put_nowait(EngineDeadError())
        raise
    except Exception as error:
        queue.put_nowait(error)
    finally:
        if descriptor is not None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
