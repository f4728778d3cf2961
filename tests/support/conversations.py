"""Rows of supervised fine-tuning, and a small model with the chat template of rStar2-Agent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.rstar2.parts.sampling.protocol import REPORT
from recipes.rstar2.template import install
from tests.support.paths import TINY

TOOLS = [REPORT.schema(stateful=False)]


def sum_row(a: int, b: int, **fields: Any) -> dict[str, Any]:
    """A problem that is solved by a call. The system message is its own, and short."""
    arguments = json.dumps({"code": f"print({a} + {b})", "input": ""})
    call = {"type": "function", "function": {"name": REPORT.tool_name, "arguments": arguments}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": "<reason>I add.</reason>", "tool_calls": [call]},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": f"<reason>So.</reason>\n<answer>\\boxed{{{a + b}}}</answer>"},
    ]
    return {"messages": messages, "tools": "", "source": "sums", "id": f"{a}+{b}", **fields}


def chat_row(text: str = "Hello.", **fields: Any) -> dict[str, Any]:
    """No problem to solve."""
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Good day."}]
    return {"messages": messages, "tools": "", "source": "chat", "id": text, **fields}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def installed(folder: Path) -> Path:
    """The tiny agent with the report's template."""
    install(TINY, folder, REPORT)
    return folder
