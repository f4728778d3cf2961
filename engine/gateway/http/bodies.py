"""Decodes the body of a request, of whichever dialect."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.gateway.requests import BadRequest


def decoded_object(data: bytes) -> dict[str, Any]:
    """Returns the fields of a body. Raises BadRequest if it is no JSON object.

    >>> decoded_object(b'{"n": 1}')
    {'n': 1}
    """
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest("body", f"must be JSON: {error}") from error
    except RecursionError as error:
        raise BadRequest("body", "is nested too deeply") from error
    if not isinstance(fields, dict):
        raise BadRequest("body", f"must be a JSON object, got {type(fields).__name__}")
    return fields
