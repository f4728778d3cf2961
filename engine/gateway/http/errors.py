"""Errors in the form of each dialect. A client's error is never reported as ours, nor ours as a client's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from aiohttp import web

from engine.fleet.fleet import DeadlyTurn, Superseded
from engine.gateway.gateway import TooManySessions
from engine.gateway.http.anthropic_api import ThreadUnsupported
from engine.gateway.requests import BadRequest, OverBudget, TooLong
from engine.gateway.tool_loop import Unavailable
from engine.replica.port import ReplicaDied
from engine.types import Boundary
from sandbox.http import incoming

Dialect = Literal["openai", "anthropic"]


class Refused(Exception):
    """A request is not answered. status: the HTTP status."""

    def __init__(self, status: int, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.field = field


class UnknownModel(Refused):
    """There is no model of this name."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__(404, f"The model `{model}` does not exist. Fix: use {served!r}", "model")
        self.model = model


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """An error as the answer to a request.

    status: the HTTP status. field: the wrong part of the request. code: what OpenAI's clients branch on. anthropic: the
    message in Anthropic's wording, where clients look for it. details: what Anthropic's clients branch on. fault:
    whether the request was wrong, rather than beyond the budget of its session or one that its client then changes by
    itself. again: whether the same request may succeed later.
    """

    status: int
    message: str
    field: str | None = None
    code: str | None = None
    anthropic: str | None = None
    details: Mapping[str, Any] | None = None
    fault: bool = True
    again: bool = True

    @property
    def kind(self) -> str:
        """The kind under which the problem is counted."""
        return re.sub(r"\[\d+\]", "", self.field or _OPENAI.get(self.status, "server_error"))

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """Returns the error in a dialect's form."""
        if dialect == "anthropic":
            kind, message = _ANTHROPIC.get(self.status, "api_error"), self.anthropic or self.message
            details = {} if self.details is None else {"details": self.details}
            return {"type": "error", "error": {"type": kind, "message": message, **details}}
        kind, code = _OPENAI.get(self.status, "server_error"), self.code or _CODES.get(self.status)
        return {"error": {"message": self.message, "type": kind, "param": self.field, "code": code}}

    def response(self, dialect: Dialect) -> web.Response:
        """Returns the error as a response, with headers that tell clients whether to retry."""
        response = web.json_response(self.body(dialect), status=self.status, dumps=json.dumps)
        if not self.again:
            response.headers["x-should-retry"] = "false"  # both vendors' clients heed it
        elif self.status in (429, 503):
            response.headers["Retry-After"] = RETRY_S
        return response


RETRY_S = "1"
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
_OPENAI = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    403: "permission_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def problem_of(error: BaseException) -> Problem | None:
    """Returns the problem that an exception stands for; None for a bug of ours."""
    match error:
        case UnknownModel():
            words = f"model: {error.model}"
            return Problem(status=404, message=str(error), field=error.field, code="model_not_found", anthropic=words)
        case Refused():
            return Problem(status=error.status, message=str(error), field=error.field)
        case incoming.Refused():
            return Problem(status=error.status, message=str(error))
        case TooLong():
            return Problem(
                status=400,
                message=str(error),
                field=error.field,
                code=error.code,
                anthropic=f"prompt is too long: {error.tokens} tokens > {error.most} maximum",
                fault=False,
            )
        case ThreadUnsupported():
            return Problem(status=400, message=str(error), field=error.field, details=error.DETAILS, fault=False)
        case BadRequest():
            fault = not isinstance(error, OverBudget)
            return Problem(status=400, message=str(error), field=error.field, code=error.code, fault=fault)
        case msgspec.ValidationError():
            return Problem(status=400, message=str(error), field=_field(str(error)))
        case RecursionError():
            return Problem(status=400, message="the body is nested too deeply")
        case TooManySessions():
            return Problem(status=429, message=str(error))
        case DeadlyTurn():  # not a 5xx status, at which clients retry
            return Problem(status=422, message=str(error), again=False)
        case Unavailable():
            return Problem(status=503, message=str(error), again=error.boundary is not Boundary.REPLICA)
        case ReplicaDied() | Superseded():
            return Problem(status=503, message=str(error))
        case web.HTTPException():
            return Problem(status=error.status, message=error.text or error.reason)
    return None


def _field(message: str) -> str | None:
    """Returns the top-level field that a message of msgspec's names.

    >>> _field("Expected `int` >= 1 - at `$.n`"), _field("Expected `str`, got `int` - at `$.messages[0]`")
    ('n', 'messages')
    """
    match = re.search(r"at `\$\.(\w+)", message) or re.search(r"field `(\w+)`", message)
    return match[1] if match else None
