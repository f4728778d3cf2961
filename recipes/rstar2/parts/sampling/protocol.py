"""Defines the chat of rStar2-Agent: what the model is told, the tool that it calls, and the template.

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
from typing import Any, Literal

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


_CODE = {"type": "string", "description": "The Python code to run."}
_INPUT = {"type": "string", "description": "What the code reads from standard input; empty where it reads nothing."}
STATELESS_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"code": _CODE, "input": _INPUT},
    "required": ["code", "input"],
}
STATEFUL_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {"code": _CODE}, "required": ["code"]}
PROMPT_TOKENS = 2048  # the longest prompt in the release; the report does not say
DEADLINE_S = 3600.0  # far beyond a trajectory's time: tokens and turns end it

ProtocolName = Literal["report", "release", "none"]
"""none: the checkpoint's own chat template and a tool named python, with the report's values for all else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """How a model is asked, and how it is evaluated.

    >>> RELEASE.tool_name, RELEASE.turns, RELEASE.calls_per_turn
    ('python_code_with_standard_io', 5, 1)
    """

    name: str
    tool_name: str
    """Name of the tool that runs each call by itself. It must be the one that the checkpoint was trained with."""
    stateful_tool_name: str
    """Name of the tool whose calls share their variables."""
    calls_per_turn: int | None
    """Later calls of a turn are dropped without a reply; None: no limit."""
    reply_chars: int
    """The most that the model reads of a tool's output, which is cut in the middle."""
    cut: Cut
    feedback: Feedback
    """What the model is told of a call."""
    turns: int
    """T of the first stage of training."""
    system: str = SYSTEM
    user_prefix: str = USER_PREFIX
    own_chat: bool = False
    """The checkpoint's own chat template and a tool named python, in place of the template and the tool above."""
    eval_samples: int
    eval_temperature: float
    eval_max_tokens: int
    eval_turns: int

    def template(self) -> str:
        """Returns the whole Jinja template."""
        values = {"system_text": self.system, "user_prefix": self.user_prefix}
        header = "".join(f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in values.items())
        return header + Path(__file__).with_name("chat.jinja").read_text()

    def chat(self, *, reason: bool = True) -> ChatConfig:
        """Returns the chat, for any checkpoint whose tokenizer knows ChatML.

        reason=False: for what is no problem to solve.
        """
        if self.own_chat:
            return ChatConfig()
        return ChatConfig(template=self.template(), template_arguments={} if reason else {"reason": False})

    def tool(self, sandbox: Any, *, stateful: bool) -> Tool | StatefulTool:
        """Returns Python, named, described and cut as the protocol says.

        sandbox: a `sandbox.Sandbox`, whose limits hold.

        stateful: the calls of a rollout share their variables.
        """
        if self.own_chat:
            return PythonSessions(sandbox) if stateful else PythonTool(sandbox)
        shown: dict[str, Any] = {"output_chars": self.reply_chars, "cut": self.cut, "feedback": self.feedback}
        if stateful:
            sessions = PythonSessions(sandbox, self.stateful_tool_name, **shown)
            sessions.parameters = STATEFUL_PARAMETERS
            return sessions
        tool = PythonTool(sandbox, self.tool_name, display=True, **shown)
        tool.parameters = STATELESS_PARAMETERS
        return tool

    def schema(self, *, stateful: bool) -> dict[str, Any]:
        """Returns what the model is shown of the tool, in OpenAI's form: an entry of `tools` in a row of data."""
        return schema(self.tool(None, stateful=stateful))

    def budget(
        self,
        *,
        response_tokens: int,
        turns: int,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> RolloutConfig:
        """Returns the budget of a rollout.

        response_tokens: sampled and tool tokens, after a prompt of up to PROMPT_TOKENS. max_tokens: tokens of prompt
        and response together, in place of both.
        """
        budget = RolloutConfig(
            max_tokens=PROMPT_TOKENS + response_tokens if max_tokens is None else max_tokens,
            max_response_tokens=response_tokens if max_tokens is None else None,
            max_turns=turns,
            temperature=temperature,
            deadline_s=deadline_s,
        )
        if self.own_chat:
            return budget
        return replace(budget, max_calls_per_turn=self.calls_per_turn, surplus_calls="drop")

    def eval_budget(
        self, *, turns: int | None, temperature: float | None, max_tokens: int | None, deadline_s: float
    ) -> RolloutConfig:
        """Returns the budget of an evaluation. None: the protocol's own value."""
        return self.budget(
            response_tokens=self.eval_max_tokens,
            turns=turns or self.eval_turns,
            temperature=self.eval_temperature if temperature is None else temperature,
            max_tokens=max_tokens,
            deadline_s=deadline_s,
        )


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
NONE = replace(REPORT, name="none", own_chat=True)
PROTOCOLS: dict[str, Protocol] = {protocol.name: protocol for protocol in (REPORT, RELEASE, NONE)}
