"""Options for the Python tool that a server gives its model, and for the budgets of an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from engine.ports import StatefulTool, Tool
from engine.rollout.rollout import RolloutConfig, SurplusCalls
from engine.tools.python_feedback import FEEDBACKS, FeedbackName
from engine.tools.python_tool import PythonSessions, PythonTool, clip, clip_outside
from sandbox.require import one_of, require

CUTS = {"inside": clip, "outside": clip_outside}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolOptions:
    """Use the values of the training: a model knows its tool by name, description and parameters."""

    name: Annotated[str, "name of the tool"] = "python"
    schema: Annotated[Path | None, "JSON file with the tool in OpenAI's form, in place of the name; none: ours"] = None
    stateful: Annotated[bool, "the calls of an answer share their variables"] = False
    display: Annotated[bool, "a call without output answers with the value of its last expression"] = False
    reply_chars: Annotated[int, "longest output of a call that the model reads; a longer one is cut in its middle"] = (
        1000
    )
    cut: Annotated[str, "inside: the mark of a cut counts in reply_chars; outside: it does not"] = "inside"
    feedback: Annotated[
        FeedbackName, "what an error tells: its traceback, its message, or what rStar2-Agent's judge tells"
    ] = "traceback"
    turns: Annotated[int, "most turns of an answer"] = 10
    calls_per_turn: Annotated[int | None, "most calls of a turn; none: as many as the model writes"] = None
    surplus_calls: Annotated[SurplusCalls, "calls above that: refuse answers them with an error, drop ignores them"] = (
        "refuse"
    )
    response_tokens: Annotated[
        int | None, "most tokens of an answer, replies included; none: what the prompt leaves"
    ] = None
    deadline_s: Annotated[float, "wall time of an answer"] = 600.0

    def __post_init__(self) -> None:
        require("cut", self.cut, one_of(*CUTS))
        self._function()
        self.tool(None)
        self.budget(max_tokens=1)

    def tool(self, sandbox: Any) -> Tool | StatefulTool:
        """Returns the tool. sandbox: a `sandbox.Sandbox`, whose limits hold."""
        function = self._function()
        name = function.get("name", self.name)
        cut, feedback = CUTS[self.cut], FEEDBACKS[self.feedback]
        reader: dict[str, Any] = {"output_chars": self.reply_chars, "cut": cut, "feedback": feedback}
        tool: PythonTool | PythonSessions
        if self.stateful:
            tool = PythonSessions(sandbox, name, **reader)
        else:
            tool = PythonTool(sandbox, name, display=self.display, **reader)
        tool.description = function.get("description", tool.description)
        tool.parameters = function.get("parameters", tool.parameters)
        return tool

    def budget(self, *, max_tokens: int, temperature: float = 1.0) -> RolloutConfig:
        """Returns the budgets. max_tokens: of a conversation, prompt included. temperature: if a request has none."""
        return RolloutConfig(
            max_tokens=max_tokens,
            max_response_tokens=self.response_tokens,
            max_turns=self.turns,
            max_calls_per_turn=self.calls_per_turn,
            surplus_calls=self.surplus_calls,
            temperature=temperature,
            deadline_s=self.deadline_s,
        )

    def _function(self) -> dict[str, Any]:
        """Returns the `function` of the schema, empty without one. Raises ValueError naming the file."""
        if self.schema is None:
            return {}
        try:
            function = json.loads(self.schema.read_text())["function"]
            if not isinstance(function["name"], str) or not function["name"]:
                raise ValueError("its name must be text")
            return dict(function)
        except (OSError, ValueError, KeyError, TypeError) as error:
            cause = f"schema: {str(self.schema)!r} holds no tool: {error!r}"
            raise ValueError(
                f'{cause}. Fix: {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}'
            ) from error
