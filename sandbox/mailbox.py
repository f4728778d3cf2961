"""A ZeroMQ socket on the running event loop: sends never wait, received messages go to a callback.

Invariants
- ZeroMQ's descriptor is edge-triggered: the socket is drained after every event and after every send, so no message
  is left lying.
- After `close` nothing is sent and no callback comes.
What is in flight is bounded by the Dispatcher's credits, so the socket itself has no high-water mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from . import wire


class Mailbox:
    def __init__(self, kind: int, receive: Callable[[list[bytes]], None]) -> None:
        self._context = zmq.Context(io_threads=1)
        self.socket: zmq.Socket[bytes] = self._context.socket(kind)
        for option, value in ((zmq.LINGER, 200), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self.socket.setsockopt(option, value)
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._fd = int(self.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.drain)

    def send(self, message: wire.ToHost | wire.ToClient, *address: bytes) -> None:
        if not self.socket.closed:
            self.socket.send_multipart((*address, wire.encode(message)), zmq.NOBLOCK)
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Hand over every message that has arrived."""
        while not self.socket.closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._receive(self.socket.recv_multipart(zmq.NOBLOCK))

    def close(self) -> None:
        """Deliver what was sent (for at most LINGER ms) and close."""
        self._loop.remove_reader(self._fd)
        self.socket.close()
        self._context.term()
