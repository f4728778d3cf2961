"""The chat of rStar2-Agent: what the model is told, the tool that it calls, and the template that says so.

    python recipes/rstar2/template.py model=models/Qwen3-14B-Base output=models/rstar2-base protocol=report

writes a checkpoint whose tokenizer has the template, from a base model whose tokenizer knows ChatML's two tokens.

A turn of the assistant begins with `<reason>`, which the template writes: in training data each message of role
assistant begins with it too. The template is for problems. Conversations of another kind (calls of other tools,
instructions, chat) are rendered as they are by the template's variable `reason=false`.

`REPORT` is what the technical report describes (arXiv 2508.20722), `RELEASE` what its published code does by default.
Their system text and the prefix of a user's message are the same; the words between their first and their last ones
are our own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from sandbox.printable import printable

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run in place: the packages lie in the repository root

from engine.console.options import parse
from engine.ports import StatefulTool, Tool
from engine.rollout.chat_template import ChatConfig, ChatTemplate
from engine.rollout.rollout import RolloutConfig
from engine.tools.python_feedback import Feedback, judge_feedback, traceback_feedback
from engine.tools.python_tool import Cut, PythonSessions, PythonTool, clip, clip_outside, schema

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"

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


def install(model: Path, output: Path, protocol: Protocol) -> None:
    """Writes a checkpoint like `model` whose tokenizer has the protocol's template and ends a turn with <|im_end|>.

    Weights and all other files are hard links where the file system allows it, else copies. Of the model's
    generation_config.json only the tokens remain: a server would take its sampling for the default. `output` appears
    when it is complete. Raises ValueError, of which TemplateError is one, for a model that cannot have the template,
    or where `output` exists.
    """
    if not (model / "config.json").is_file():
        raise ValueError(f"model: no config.json in {str(model)!r}. Fix: give a Hugging Face folder")
    if output.exists():
        raise ValueError(f"output: {str(output)!r} exists. Fix: give another folder, or remove it")
    output.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        end = _write_tokenizer(model, made, protocol)
        _write_configuration(model, made, end)
        for path in sorted(model.iterdir()):
            if path.is_file() and not path.name.startswith((".", "chat_template")) and not (made / path.name).exists():
                _link(path.resolve(), made / path.name)
        tools = [tool_schema(protocol, stateful=stateful) for stateful in (False, True)]
        ChatTemplate.load(made).with_tools(tools)  # audited with and without them
        made.chmod(0o755)  # not the temporary folder's
        made.rename(output)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _write_tokenizer(model: Path, output: Path, protocol: Protocol) -> int:
    """Returns the token that ends a turn."""
    from transformers import AutoTokenizer

    if not (model / "tokenizer_config.json").is_file():
        raise ValueError(f"model: no tokenizer_config.json in {str(model)!r}. Fix: give a folder with its tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
    for token in (TURN_START, TURN_END):
        ids = tokenizer.encode(token, add_special_tokens=False)
        if len(ids) != 1 or tokenizer.decode(ids) != token:
            raise ValueError(
                f"model: the tokenizer in {str(model)!r} has no token {token!r}. Fix: take a model that was made for "
                "ChatML (Qwen, SmolLM), or add the token to its tokenizer and its embeddings first"
            )
    tokenizer.chat_template = template_text(protocol)
    tokenizer.eos_token = TURN_END
    tokenizer.save_pretrained(output, save_jinja_files=False)
    return tokenizer.convert_tokens_to_ids(TURN_END)


def _write_configuration(model: Path, output: Path, end: int) -> None:
    """end: the token that ends a turn. The model's own end tokens still end a generation: it may fall back on them."""
    config = json.loads((model / "config.json").read_text())
    path = model / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    own = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = own if isinstance(own, list) else [own]
    others = [token for token in ends if token not in (end, None)]
    tokens = {"eos_token_id": [end, *others] if others else end}
    for name in ("bos_token_id", "pad_token_id"):
        if (token := generation.get(name, config.get(name))) is not None:
            tokens[name] = token
    _write_json(output / "generation_config.json", tokens)
    _write_json(output / "config.json", {**config, "eos_token_id": end})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    model: Annotated[Path, "Hugging Face folder of the base model"] = Path("models/Qwen3-14B-Base")
    output: Annotated[Path, "folder to write the checkpoint to; it must not exist"] = Path("models/rstar2-base")
    protocol: Annotated[Literal["report", "release"], "whose chat it is"] = "report"


def main() -> int:
    config = parse(Config, sys.argv[1:])
    try:
        install(config.model, config.output, PROTOCOLS[config.protocol])
    except (ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    print(f"{config.output}: the chat template of the {config.protocol} on {config.model}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
