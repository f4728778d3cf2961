"""What went wrong, in the words of each dialect. Errors of a client are never ours, and ours are never a client's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from aiohttp import web

from engine.fleet.fleet import Superseded
from engine.gateway.gateway import TooManySessions
from engine.gateway.requests import BadRequest
from engine.gateway.session import TOO_LONG
from engine.gateway.tool_loop import Unavailable
from engine.replica.port import ReplicaDied

Dialect = Literal["openai", "anthropic"]


class Refused(Exception):
    """A request is not answered; status is HTTP's."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


@dataclass(frozen=True, slots=True)
class Problem:
    """status is HTTP's; field: what of the request is wrong."""

    status: int
    message: str
    field: str | None = None

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """The error as the dialect's clients know it."""
        if dialect == "anthropic":
            return {
                "type": "error",
                "error": {"type": _ANTHROPIC.get(self.status, "api_error"), "message": self.message},
            }
        kind = _OPENAI.get(self.status, "server_error")
        code = TOO_LONG if TOO_LONG in self.message else None
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": code}}

    def response(self, dialect: Dialect) -> web.Response:
        # aiohttp reads on what the client still sends of a body that is too large; such a connection ends instead.
        response = web.json_response(self.body(dialect), status=self.status, dumps=json.dumps)
        if self.status == 413:
            response.force_close()
        return response


_OPENAI = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def problem_of(error: BaseException) -> Problem | None:
    """None for what is a bug of ours."""
    match error:
        case Refused():
            return Problem(error.status, str(error), error.field)
        case BadRequest():
            return Problem(400, str(error), error.field)
        case msgspec.ValidationError():
            return Problem(400, str(error))
        case msgspec.DecodeError():
            return Problem(400, f"the body must be JSON: {error}")
        case RecursionError():
            return Problem(400, "the body is nested too deeply")
        case TooManySessions():
            return Problem(429, str(error))
        case ReplicaDied() | Superseded() | Unavailable():
            return Problem(503, str(error))
        case web.HTTPException():
            return Problem(error.status, error.text or error.reason)
    return None
