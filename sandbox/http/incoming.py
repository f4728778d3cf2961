"""Receives requests for a server before it reads their meaning; the sandbox's servers and the engine's share it.

Invariants
- A server without a token answers only requests that name a loopback host, and takes only bodies of a type that a web
  page cannot send to another site without asking. So no page in the user's browser can use it, not even by a name of
  its own that resolves to 127.0.0.1.
- A client has BODY_S to send its body; the time in which the server does not read it does not count.
- A request that is answered before all of its body is there, or whose body cannot be decoded, is answered with
  `Connection: close`. After every other answer the connection takes the next request.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp import BasicAuth, web
from aiohttp.typedefs import Handler, Middleware

from sandbox.http.connections import Connections

BODY_S = 60.0  # a client that sends slower than this would hold a connection, and memory, that others wait for
UNREAD_S = 5.0  # for the rest of a body that nobody wants: a client reads the answer after it


class Refused(Exception):
    """A request is answered with an HTTP status of 400 or more."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@lru_cache(maxsize=64)
def names_loopback(host: str) -> bool:
    """Returns whether a Host header names this machine and nothing else.

    >>> [names_loopback(host) for host in ("127.0.0.1:8000", "localhost", "[::1]:80", "evil.example", "[::1", "")]
    [True, True, True, False, False, False]
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_local(request: web.Request) -> None:
    """Raises Refused for a request that a web page may have made; for a server without a token."""
    if not names_loopback(request.headers.get("Host", "")):
        raise Refused(403, "without a token only 127.0.0.1 and localhost are served here, and Host names another")
    if request.method == "POST" and request.can_read_body and request.content_type != "application/json":
        raise Refused(415, f"Content-Type must be 'application/json', got {request.content_type!r}")


def token_of(headers: Mapping[str, str]) -> str:
    """Returns the token of a request, "" if it has none.

    A token is a Bearer, the password of basic authentication (which clients send that take just a URL,
    http://any-name:TOKEN@host) or `x-api-key`.

    >>> token_of({"Authorization": "Bearer abc"}), token_of({"Authorization": BasicAuth("name", "abc").encode()})
    ('abc', 'abc')
    """
    authorization = headers.get("Authorization", "")
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    try:
        return BasicAuth.decode(authorization, encoding="utf-8").password
    except ValueError:  # another scheme, or not well-formed
        return headers.get("x-api-key", "")


def authorize(request: web.Request, token: str) -> None:
    """Raises Refused for a request that the server's token does not allow. token: "" if the server has none."""
    if not token:
        check_local(request)
    elif not hmac.compare_digest(token_of(request.headers).encode(errors="surrogateescape"), token.encode()):
        forms = "as `Authorization: Bearer`, as a password or as `x-api-key`"
        raise Refused(401, f"the request must carry the server's token, {forms}")


def authorized(token: str) -> Middleware:
    """Returns a middleware that applies `authorize` to each request."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        authorize(request, token)
        return await handler(request)

    return check


def hear(connections: Connections) -> Middleware:
    """Returns a middleware that notes when a client has sent the headers of a request."""

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        connections.heard(request.transport)
        return await handler(request)

    return note


async def _no_wait(size: int) -> None:
    pass


async def read_body(
    request: web.Request, connections: Connections, *, most: int, grow: Callable[[int], Awaitable[None]] = _no_wait
) -> bytearray:
    """Returns the body of a request.

    grow: waits until so many bytes may be held. Raises Refused for a body that does not come, has more than `most`
    bytes or is not encoded as its headers say.
    """
    if request.content_length is not None and request.content_length > most:
        raise Refused(413, f"the body must be at most {most} bytes, got {request.content_length}")
    clock = asyncio.get_running_loop().time
    body, remaining_s = bytearray(), BODY_S
    while True:
        since = clock()
        try:
            async with asyncio.timeout(remaining_s):
                chunk = await request.content.readany()
        except TimeoutError:
            raise Refused(408, f"the body took longer than {BODY_S:g} s") from None
        except web.RequestPayloadError:
            raise Refused(400, "the body is not encoded as its headers say") from None
        remaining_s -= clock() - since
        if not chunk:
            return body
        body += chunk
        if len(body) > most:
            raise Refused(413, f"the body must be at most {most} bytes")
        await grow(len(body))
        connections.heard(request.transport)


@web.middleware
async def bodies_end(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ends a connection, with the answer, whose request left something unread or undecodable."""
    response = await handler(request)
    if request.content.is_eof() and request.content.exception() is None:
        return response
    response.force_close()
    await response.prepare(request)
    await response.write_eof()
    with suppress(TimeoutError, ConnectionError, web.RequestPayloadError):
        async with asyncio.timeout(UNREAD_S):
            while await request.content.readany():
                pass
    return response
