"""OpenAI's Responses API: the bodies of /v1/responses, which become requests for a chat.

The fields of `ResponsesBody` are accepted, and IGNORED ones, which change nothing here. All other fields are taken as
in a chat completion, and refused as there: temperature, top_p, seed, stop, return_token_ids and those sent by habit.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.gateway.http import openai_api
from engine.gateway.http.bodies import decoded_object
from engine.gateway.http.responses_items import messages_of
from engine.gateway.http.responses_tools import Offered, shown_name
from engine.gateway.kept_responses import KeptResponses
from engine.gateway.requests import BadRequest, ChatRequest

IGNORED = (
    "client_metadata",
    "context_management",
    "max_tool_calls",
    "prompt_cache_options",
    "stream_options",
    "truncation",  # nothing is cut off: a conversation that is too long is refused
)
OF_CHAT = ("messages", "n", "max_tokens", "max_completion_tokens", "logprobs", "response_format")
LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(msgspec.Struct, kw_only=True):
    """A request for the next turn of a conversation.

    metadata, reasoning, parallel_tool_calls: change nothing here, and are told to the client as it sent them. others:
    the fields that are taken as in a chat completion.
    """

    model: str = ""
    input: str | list[Any] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Any] = []
    tool_choice: str | dict[str, Any] = "auto"
    text: dict[str, Any] = {}
    include: list[str] = []
    max_output_tokens: openai_api.Tokens | None = None
    store: bool = True
    stream: bool = False
    metadata: Any = None
    reasoning: Any = None
    parallel_tool_calls: Any = True
    offered: Offered = Offered()
    others: dict[str, Any] = {}

    def request(self, kept: KeptResponses) -> ChatRequest:
        """Returns the body as a request of the gateway. kept: the responses that it may go on from.

        Raises BadRequest, and msgspec.ValidationError for a wrong field of a chat completion.
        """
        messages: list[Any] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        new = messages_of(self.input, kept.item)
        if self.previous_response_id is not None:
            messages += kept.messages(self.previous_response_id)
        elif not new:
            raise BadRequest("input", "must be text or have at least one item")
        fields = {
            **self.others,
            "messages": messages + new,
            "tools": [*self.offered.functions] or None,
            "tool_choice": self._tool_choice(),
            "max_completion_tokens": self.max_output_tokens,
        }
        if self.parallel_tool_calls is False:
            fields["parallel_tool_calls"] = False
        if self.text:
            fields["response_format"] = self._response_format()
        [request] = openai_api.chat_of(fields).requests()
        return request

    def _tool_choice(self) -> Any:
        """Returns `tool_choice` in the form of chat completions."""
        choice = self.tool_choice
        if isinstance(choice, str):
            return choice
        if choice.get("type") == "allowed_tools":
            tools = choice.get("tools")
            named = [_named(tool) for tool in tools] if isinstance(tools, list) else tools
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": named}}
        return _named(choice)

    def _response_format(self) -> Any:
        """Returns `text.format` in the form of chat completions; None for plain text."""
        form = self.text.get("format")
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            return form
        schema = {name: value for name, value in form.items() if name != "type"}
        return {"type": "json_schema", "json_schema": schema}


def parse(data: bytes) -> ResponsesBody:
    """Reads a body. Raises msgspec.ValidationError and BadRequest."""
    ours: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in decoded_object(data).items():
        if value is None or name in IGNORED:
            continue
        if name in OF_CHAT:
            raise BadRequest(name, "this field is one of chat completions, not of responses")
        (ours if name in _OURS else others)[name] = value
    body = msgspec.convert(ours, ResponsesBody)
    if LOGPROBS in body.include:
        raise BadRequest("include", f"{LOGPROBS!r} is not supported. Fix: return_token_ids=true gives them by token")
    body.offered = Offered.of(body.tools)
    body.others = others
    return body


_OURS = frozenset(ResponsesBody.__struct_fields__) - {"offered", "others"}


def _named(choice: Any) -> Any:
    """Returns the choice of one tool in the form of chat completions; anything else as it is."""
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return choice
    name = choice.get("name")
    name = shown_name(choice.get("namespace"), name) if isinstance(name, str) else name
    return {"type": "function", "function": {"name": name}}
