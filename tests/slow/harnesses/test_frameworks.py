"""Agent frameworks from their packages, unmodified and in their default ways, in each dialect that they speak.

The scripts are in clients/. What each case of one returned is compared, and the gateway must have recognised its
conversation and kept its tokens.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.clients import FRAMEWORKS
from tests.support.framework import answering, call, check_exact, cost_of, said_by
from tests.support.packages import own_environment

SCRIPTS = Path(__file__).parent / "clients"
RUNS, SAYS, NUMBER = call("python", code="6 * 7"), "It is 42.", '{"value": 42}'
USES_TOOL = (RUNS, SAYS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What the model says in turn, what the case answers, and in how many lineages its turns are.

    constrained: turns that a grammar has to force. unasked: turns beside these, for which the framework asks by itself.
    tells_usage: the case answers the tokens of its session too.
    """

    turns: tuple[str, ...]
    answer: object
    lineages: int = 1
    constrained: int = 0
    unasked: int = 0
    tells_usage: bool = False


@dataclass(frozen=True, kw_only=True)
class Client:
    """agents: the same for coroutines that get an endpoint, three at once in the process."""

    script: str
    cases: dict[str, Case]
    agents: dict[str, Case]

    @property
    def all_cases(self) -> dict[str, Case]:
        return self.cases | {f"{name}_{number}": case for name, case in self.agents.items() for number in range(3)}


def uses_tool(answer=SAYS, **counts):
    return Case(turns=USES_TOOL, answer=answer, **counts)


def says(turn=SAYS, answer=SAYS):
    return Case(turns=(turn,), answer=answer)


def typed(turn=NUMBER, answer=42):
    return Case(turns=(turn,), answer=answer, constrained=1)


def fields(**values):
    """An answer as dspy asks for it."""
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in [*values.items(), ("completed", "")])


CODE = "Thought: I multiply.\n<code>\nfinal_answer(int(python(code='6 * 7')))\n</code>"
COUNTS = "Thought: I multiply.\n<code>\nprint(python(code='6 * 7'))\n</code>"
TOLD = "Thought: I know.\n<code>\nfinal_answer(42)\n</code>"
ANSWERS_BY_CALL = Case(turns=(RUNS, call("final_answer", answer="42")), answer="42", lineages=2, constrained=2)
CLIENTS = {
    "openai and anthropic": Client(
        script="sdk_calls.py",
        cases={
            "parse": typed(),
            "parse_responses": typed(),
            "parse_claude": typed(),
            "stream": says(),
            "stream_responses": says(),
            "stream_claude": says(),
            "runner": uses_tool(),
        },
        agents={"coroutine": says(), "coroutine_claude": says()},
    ),
    "openai-agents": Client(
        script="openai_agents.py",
        cases={
            "tools": uses_tool(),
            "stream": uses_tool([SAYS, SAYS]),
            "typed": Case(turns=(RUNS, NUMBER), answer=42, constrained=2),
            "forced": uses_tool(constrained=1),
            "handoff": Case(turns=(call("transfer_to_expert"), SAYS), answer=["expert", SAYS], lineages=2),
            "memory": Case(turns=("Yes.", SAYS), answer=SAYS),
        },
        agents={"coroutine": uses_tool()},
    ),
    "pydantic-ai": Client(
        script="pydantic_ai_agents.py",
        cases={
            "tools": uses_tool(),
            "chat": uses_tool(),
            "claude": uses_tool(),
            "stream": uses_tool(),
            "typed": Case(turns=(RUNS, call("final_result", value=42)), answer=42, constrained=2),
            "typed_chat": typed(call("final_result", value=42)),
            "typed_claude": typed(call("final_result", value=42)),
            "native": typed(),
            "prompted": typed(),
            "corrected": Case(turns=(call("python", cod="6"), *USES_TOOL), answer=SAYS),
        },
        agents={"coroutine": uses_tool()},
    ),
    "langgraph": Client(
        script="langgraph_agents.py",
        cases={
            "tools": uses_tool(),
            "claude": uses_tool(),
            "responses": uses_tool(),
            "stream": uses_tool(),
            "stream_claude": uses_tool(),
            "typed_agent": Case(turns=(RUNS, call("Number", value=42)), answer=42, constrained=2),
            "typed": typed(),
            "typed_by_call": typed(call("Number", value=42)),
            "typed_claude": typed(call("Number", value=42)),
        },
        agents={"coroutine": uses_tool(), "coroutine_claude": uses_tool()},
    ),
    "smolagents": Client(
        script="smolagents_agents.py",
        cases={
            "tools": ANSWERS_BY_CALL,
            "code": Case(turns=(COUNTS, CODE), answer=42, lineages=2),
            "stream": Case(turns=(COUNTS, CODE), answer=42, lineages=2),
            "structured": typed(json.dumps({"thought": "I know.", "code": "final_answer(42)"})),
        },
        agents={"coroutine": ANSWERS_BY_CALL},
    ),
    "instructor": Client(
        script="instructor_answers.py",
        cases={
            "tools": typed(call("Number", value=42)),
            "provider": typed(call("Number", value=42)),
            "claude": typed(call("Number", value=42)),
            "json": typed(),
            "json_schema": typed(),
            "responses": typed(call("Number", value=42)),
            "retried": Case(turns=(call("Number", value=4), call("Number", value=42)), answer=42, constrained=2),
            "stream": typed(call("PartialNumber", value=42)),
        },
        agents={"coroutine": typed(call("Number", value=42))},
    ),
    "litellm": Client(
        script="litellm_calls.py",
        cases={
            "tools": uses_tool(),
            "claude": uses_tool(),
            "stream": Case(turns=(SAYS,), answer=SAYS, tells_usage=True),
            "stream_claude": Case(turns=(SAYS,), answer=SAYS, tells_usage=True),
            "responses": says(),
            "overflow": Case(turns=(), answer=["ContextWindowExceededError"] * 3, lineages=0),
        },
        agents={"coroutine": says()},
    ),
    "dspy": Client(
        script="dspy_programs.py",
        cases={
            "predict": says(fields(answer="42"), "42"),
            "thought": typed('{"reasoning": "I multiply.", "answer": 42}'),
            "react": Case(
                turns=(
                    fields(next_thought="I run it.", next_tool_name="python", next_tool_args='{"code": "6 * 7"}'),
                    fields(next_thought="I know.", next_tool_name="finish", next_tool_args="{}"),
                    fields(reasoning="I ran it.", answer="42"),
                ),
                answer=42,
                lineages=3,
            ),
        },
        agents={"coroutine": says(fields(reasoning="I multiply.", answer="42"), 42)},
    ),
    "inspect-ai": Client(
        script="inspect_evals.py",
        cases={
            "tools": uses_tool(1.0, lineages=2, unasked=1),
            "claude": uses_tool(1.0),
            "loop": Case(turns=(RUNS, call("submit", answer="42")), answer=1.0),
            "typed": typed(NUMBER, 1.0),
        },
        agents={"coroutine": says()},
    ),
}


def environment_of(name):
    return own_environment(name.replace(" ", "-"), *FRAMEWORKS[name])


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_framework_gets_what_the_model_said_and_its_tokens_are_kept(name, tmp_path):
    client = CLIENTS[name]
    environment = environment_of(name)
    async with answering({case: wanted.turns for case, wanted in client.all_cases.items()}) as node:
        answers = await said_by(environment, SCRIPTS / client.script, node, tmp_path)
        for case, wanted in client.all_cases.items():
            turns = len(wanted.turns) + wanted.unasked
            cost = await cost_of(node, case)
            if not turns:  # each of its requests was refused, and its session ended with it
                assert (answers[case], cost) == (wanted.answer, None), case
                continue
            assert cost is not None, case
            tokens = cost["prompt_tokens"] + cost["sampled_tokens"]
            assert answers[case] == ([wanted.answer, tokens] if wanted.tells_usage else wanted.answer), case
            assert (cost["turns"], cost["lineages"]) == (turns, wanted.lineages), case
            check_exact(node, case, turns=turns, constrained=wanted.constrained)
        assert sum(len(replica.requests) for replica in node.replicas.made) == node.gateway.counts.requests
