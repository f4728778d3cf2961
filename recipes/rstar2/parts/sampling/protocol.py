"""The chat of rStar2-Agent: what the model is told, the tool that it calls, and the template that says so.

A turn of the assistant begins with `<reason>`, which the template writes: in training data each message of role
assistant begins with it too. The template is for problems. Conversations of another kind (calls of other tools,
instructions, chat) are rendered as they are by the template's variable `reason=false`.

`REPORT` is what the technical report describes (arXiv 2508.20722), `RELEASE` what its published code does by default.
Their system text and the prefix of a user's message are the same; the words between their first and their last ones
are our own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.ports import StatefulTool, Tool
from engine.rollout.chat_template import ChatConfig
from engine.rollout.rollout import RolloutConfig
from engine.tools.python_feedback import Feedback, judge_feedback, traceback_feedback
from engine.tools.python_tool import Cut, PythonSessions, PythonTool, clip, clip_outside, schema

SYSTEM = (
    "A conversation between User and Assistant. The User asks a question, and the Assistant solves it. The Assistant "
    "first thinks about the reasoning process in the mind and then provides the User with the answer. The reasoning "
    "process is enclosed within <reason> </reason> and answer is enclosed within <answer> </answer> tags, "
    "respectively, i.e., <reason> the reasoning </reason> <answer> the answer </answer>."
)
USER_PREFIX = (
    "You must put your answer inside <answer> </answer> tags, i.e., <answer> the answer </answer>, and what counts as "
    "your answer is inside its \\boxed{} tag.\nThis is the problem:\n"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """How a model is asked, and how it is evaluated.

    >>> RELEASE.tool_name, RELEASE.turns, RELEASE.calls_per_turn
    ('python_code_with_standard_io', 5, 1)
    """

    name: str
    tool_name: str
    """Of the tool that runs each call by itself. It must be the one that the checkpoint was trained with."""
    stateful_tool_name: str
    """Of the tool whose calls share their variables."""
    calls_per_turn: int | None
    """Later calls of a turn are dropped without a reply; None: no limit."""
    reply_chars: int
    """Of a tool's output, which is cut in the middle."""
    cut: Cut
    feedback: Feedback
    """What the model is told of a call."""
    turns: int
    """T of the first stage of training."""
    system: str = SYSTEM
    user_prefix: str = USER_PREFIX
    eval_samples: int
    eval_temperature: float
    eval_max_tokens: int
    eval_turns: int


REPORT = Protocol(
    name="report",
    tool_name="execute_python_code_with_standard_io",
    stateful_tool_name="jupyter_code",  # the report has none; this is the release's
    calls_per_turn=None,
    reply_chars=1000,  # not in the report; this is what the release's code judge returns at most
    cut=clip,
    feedback=traceback_feedback,
    turns=10,
    eval_samples=16,
    eval_temperature=0.6,
    eval_max_tokens=30 * 1024,
    eval_turns=30,
)
RELEASE = Protocol(
    name="release",
    tool_name="python_code_with_standard_io",
    stateful_tool_name="jupyter_code",
    calls_per_turn=1,
    reply_chars=256,
    cut=clip_outside,
    feedback=judge_feedback,
    turns=5,
    eval_samples=16,
    eval_temperature=0.0,  # sixteen times the greedy answer
    eval_max_tokens=30 * 1024,
    eval_turns=5,
)
PROTOCOLS: dict[str, Protocol] = {protocol.name: protocol for protocol in (REPORT, RELEASE)}

_CODE = {"type": "string", "description": "The Python code to run."}
_INPUT = {"type": "string", "description": "What the code reads from standard input; empty where it reads nothing."}
STATELESS_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"code": _CODE, "input": _INPUT},
    "required": ["code", "input"],
}
STATEFUL_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {"code": _CODE}, "required": ["code"]}


def template_text(protocol: Protocol) -> str:
    """The Jinja template, complete."""
    values = {"system_text": protocol.system, "user_prefix": protocol.user_prefix}
    header = "".join(f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in values.items())
    return header + Path(__file__).with_name("chat.jinja").read_text()


def chat_config(protocol: Protocol, *, reason: bool = True) -> ChatConfig:
    """The template, for any checkpoint whose tokenizer knows ChatML. reason=False: for what is no problem to solve."""
    return ChatConfig(template=template_text(protocol), template_arguments={} if reason else {"reason": False})


def python_tool(protocol: Protocol, sandbox: Any, *, stateful: bool) -> Tool | StatefulTool:
    """Python as the protocol names, describes and cuts it. sandbox: whose limits hold, `sandbox.Sandbox`."""
    if stateful:
        sessions = PythonSessions(
            sandbox,
            protocol.stateful_tool_name,
            output_chars=protocol.reply_chars,
            cut=protocol.cut,
            feedback=protocol.feedback,
        )
        sessions.parameters = STATEFUL_PARAMETERS
        return sessions
    tool = PythonTool(
        sandbox,
        protocol.tool_name,
        output_chars=protocol.reply_chars,
        cut=protocol.cut,
        display=True,
        feedback=protocol.feedback,
    )
    tool.parameters = STATELESS_PARAMETERS
    return tool


def tool_schema(protocol: Protocol, *, stateful: bool) -> dict[str, Any]:
    """What the model is shown of the tool, in OpenAI's form: of a row's `tools` in data that demonstrates calls."""
    return schema(python_tool(protocol, None, stateful=stateful))


def limit_calls(protocol: Protocol, budget: RolloutConfig) -> RolloutConfig:
    """A budget with the protocol's calls per turn. Turns and tokens, which change in training, are the caller's."""
    return replace(budget, max_calls_per_turn=protocol.calls_per_turn, surplus_calls="drop")
