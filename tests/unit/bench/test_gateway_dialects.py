"""A conversation in each form in which the clients of the gateway's bench may have it."""

from copy import deepcopy

import pytest

from bench.benches.gateway.dialects import begun
from bench.benches.gateway.script import FUNCTION, conversations, reply

CODE = '{"code": "print(1)"}'
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "python", "arguments": CODE}
TEXT = {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "13"}]}
USAGE = {"input_tokens": 60, "output_tokens": 15, "input_tokens_details": {"cached_tokens": 32}, "total_tokens": 75}


def conversation(api, stream=False):
    [prompt] = conversations(1, seed=1)
    return [dict(message) for message in prompt.messages], begun(prompt, api, model="m", tools=True, stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_send_all_items_again_and_continued_ones_only_what_is_new(stream):
    told = {}
    for api in ("responses", "continued"):
        question, talk = conversation(api, stream)
        first = talk.body(100)
        assert (first["input"], first["max_output_tokens"], first["stream"]) == (question, 100, stream)
        assert first["tools"] == [{"type": "function", **FUNCTION}]
        answer = {"id": "resp_1", "output": [CALL], "usage": USAGE}
        answer = talk.joined([{"type": "response.created"}, {"response": answer}]) if stream else answer
        assert talk.read(answer) == ((60, 15, 32), True)
        told[api] = deepcopy(talk.body(100))
        assert talk.read({"id": "resp_2", "output": [TEXT], "usage": USAGE}) == ((60, 15, 32), False)
    output = {"type": "function_call_output", "call_id": "call_1", "output": reply(CODE)}
    assert told["responses"]["input"] == [*question, CALL, output]
    assert not told["responses"]["store"]
    assert "previous_response_id" not in told["responses"]
    assert told["continued"]["input"] == [output]
    assert told["continued"]["previous_response_id"] == "resp_1"


def test_a_streamed_chat_is_joined():
    _, talk = conversation("chat", stream=True)
    pieces = [{"index": 0, "id": "call_1", "function": {"name": "python", "arguments": CODE[:5]}}]
    pieces += [{"index": 0, "function": {"arguments": CODE[5:]}}]
    events = [{"choices": [{"delta": {"content": "I compute."}}]}]
    events += [{"choices": [{"delta": {"tool_calls": [piece]}}]} for piece in pieces]
    events += [{"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 15}}]
    assert talk.read(talk.joined(events)) == ((60, 15, 0), True)
    said, replied = talk.body(100)["messages"][-2:]
    assert said["content"] == "I compute."
    assert said["tool_calls"][0]["function"] == {"name": "python", "arguments": CODE}
    assert replied == {"role": "tool", "tool_call_id": "call_1", "content": reply(CODE)}
