"""Turns that must be calls or JSON, asked for by the clients that people use."""

import json

import anthropic
import openai
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.support.node import END, call, served

QUESTION = {"role": "user", "content": "Who is it?"}
PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL = {"type": "function", "function": {"name": "python", "parameters": PARAMETERS}}
ANTHROPIC_TOOL = {"name": "python", "input_schema": PARAMETERS}


class Person(BaseModel):
    name: str
    age: int


ANSWER = Person(name="Ann", age=7)
SAID = ANSWER.model_dump_json() + END


def of_openai(node):
    return AsyncOpenAI(base_url=f"{node.address}/v1", api_key="none", max_retries=0)


def of_anthropic(node):
    return AsyncAnthropic(base_url=node.address, api_key="none", max_retries=0)


def grammars(node):
    return [sampling.grammar for _, sampling, _ in node.replicas.made[0].requests]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "python"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_openais_client_gets_the_call_that_it_demands(choice, stream):
    async with served([call("1") + END]) as node, of_openai(node) as client:
        options = {"model": "tiny", "messages": [QUESTION], "tools": [TOOL], "tool_choice": choice}
        if stream:
            async with client.chat.completions.stream(**options) as events:
                message = (await events.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.create(**options)).choices[0].message
        assert json.loads(message.tool_calls[0].function.arguments) == {"code": "1"}
        [grammar] = grammars(node)
        assert "<tool_call>" in grammar
        assert ("star" in grammar) == (choice == "required"), "a named function is called once"


async def test_openais_client_parses_the_answer_into_its_model():
    async with served([SAID]) as node, of_openai(node) as client:
        answer = await client.chat.completions.parse(model="tiny", messages=[QUESTION], response_format=Person)
        assert answer.choices[0].message.parsed == ANSWER
        [grammar] = grammars(node)
        assert json.loads(grammar)["format"]["json_schema"]["required"] == ["name", "age"]


async def test_anthropics_client_gets_the_call_that_it_demands():
    async with served([call("1") + END]) as node, of_anthropic(node) as client:
        message = await client.messages.create(
            model="tiny", max_tokens=99, messages=[QUESTION], tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}
        )
        [block] = message.content
        assert (message.stop_reason, block.name, block.input) == ("tool_use", "python", {"code": "1"})
        assert grammars(node) != [None]


async def test_anthropics_client_parses_the_answer_into_its_model():
    async with served([SAID]) as node, of_anthropic(node) as client:
        message = await client.messages.parse(model="tiny", max_tokens=99, messages=[QUESTION], output_format=Person)
        assert message.parsed_output == ANSWER
        [grammar] = grammars(node)
        assert json.loads(grammar)["format"]["json_schema"]["required"] == ["name", "age"]


async def test_an_engine_without_grammars_is_a_clear_refusal_in_each_dialect():
    why = "the engine has no grammars for this model"
    async with served([SAID], prepare=lambda replica: setattr(replica, "refuses", why)) as node:
        async with of_openai(node) as client:
            with pytest.raises(openai.BadRequestError, match=why) as caught:
                await client.chat.completions.create(
                    model="tiny", messages=[QUESTION], response_format={"type": "json_object"}
                )
            assert caught.value.param == "response_format"
            with pytest.raises(openai.BadRequestError, match=why):
                await client.chat.completions.create(
                    model="tiny", messages=[QUESTION], tools=[TOOL], tool_choice="required", stream=True
                )
        async with of_anthropic(node) as client:
            with pytest.raises(anthropic.BadRequestError, match=why):
                await client.messages.create(
                    model="tiny", max_tokens=9, messages=[QUESTION], tools=[ANTHROPIC_TOOL], tool_choice={"type": "any"}
                )
        assert node.gateway.refusals == {"response_format": 1, "tool_choice": 2}


async def test_the_whole_agent_behind_one_request_takes_no_orders_about_its_answer():
    async with served([SAID], tools=True) as node, of_openai(node) as client:
        with pytest.raises(openai.BadRequestError, match="tools=true"):
            await client.chat.completions.parse(model="tiny", messages=[QUESTION], response_format=Person)
