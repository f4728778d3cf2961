"""The answers of GET /v1/models, in one form that has the fields of both dialects and those of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def model_entry(name: str, room: int | None) -> dict[str, Any]:
    """Returns a model as clients expect it. room: the most tokens of a conversation, None if that is not known.

    OpenAI's clients read `object`, `created` and `owned_by`; Anthropic's read `type`, `display_name`, `created_at` and
    the two limits; those of vLLM read `max_model_len`.
    """
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "rocstar",
        "max_model_len": room,
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": room,
        "max_tokens": room,
    }


def list_of(models: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the only page of a list of models."""
    first, last = models[0]["id"], models[-1]["id"]
    return {"object": "list", "data": models, "has_more": False, "first_id": first, "last_id": last}
