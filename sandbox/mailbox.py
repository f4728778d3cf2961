"""A ZeroMQ socket on the running event loop: sends never wait, and received messages go to a callback.

Invariants
- ZeroMQ's descriptor is edge-triggered: the socket is drained after every event and after every send, so no message
  stays in it.
- After `close` nothing is sent and no callback comes.
- A message whose callback fails, which is a bug, goes to the loop's exception handler; later messages are delivered all
  the same.
- A message to a peer that is gone is refused, not dropped (a ROUTER's default).

What is in flight is bounded by the Dispatcher's credits, so the socket itself has no high-water mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from sandbox import wire

LINGER_MS = 200  # for last messages when closing


class Mailbox:
    def __init__(
        self, kind: int, receive: Callable[[list[bytes]], None], context: zmq.Context[zmq.Socket[bytes]] | None = None
    ) -> None:
        """context: that of another mailbox, which outlives this one; by default it has one of its own."""
        self._own_context = context is None
        self.context = context or zmq.Context(io_threads=1)
        self.socket: zmq.Socket[bytes] = self.context.socket(kind)
        for option, value in ((zmq.LINGER, LINGER_MS), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self.socket.setsockopt(option, value)
        if kind == zmq.ROUTER:
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._fd = int(self.socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self.drain)

    def bind(self, address: str) -> None:
        """Binds the socket. Raises zmq.ZMQError."""
        self._allow(address)
        self.socket.bind(address)

    def connect(self, address: str) -> None:
        """Connects the socket. Raises zmq.ZMQError."""
        self._allow(address)
        self.socket.connect(address)

    def _allow(self, address: str) -> None:
        """Enables IPv6 for such an address (tcp://[::1]:5700), not for names, which may mean an IPv4 address too."""
        self.socket.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))

    def send(self, message: wire.ToHost | wire.ToClient, *address: bytes) -> bool:
        return self.send_frames(*address, wire.encode(message))

    def send_frames(self, *frames: bytes) -> bool:
        """Sends the frames; returns False if the peer is gone."""
        if self.socket.closed:
            return False
        self._loop.call_soon(self.drain)
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):  # a ROUTER's peer is gone; a DEALER was turned away
                raise
            return False
        return True

    def drain(self) -> None:
        """Delivers every message that has arrived."""
        while not self.socket.closed and int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            try:
                self._receive(frames)
            except Exception as error:
                self._loop.call_exception_handler({"message": "a message was not handled", "exception": error})

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Delivers what was sent (for at most `linger_ms`) and closes."""
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            self.socket.close(linger_ms)
            if self._own_context:
                self.context.term()
