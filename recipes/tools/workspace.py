"""A workspace that the model edits and runs: a world with the tools list_files, read_file, write_file, replace_text and
run_python.

Invariants
- Editing touches neither jail nor disk: the files are a value of the node (`recipes.tools.snapshot`). Programs run in a
  jail of their own, which gets the files and returns them.
- A program that is stopped, or leaves more than the workspace may hold, leaves it as it was: so a call that is run
  again after a resume has the same effects.
- Calls run one after the other in their order.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from engine.ports import ToolReply, ToolSpec
from engine.tools.python_feedback import joined
from engine.tools.python_tool import clip
from engine.types import Prompt
from recipes.tools.guest import Guest, answer_of, request_of
from recipes.tools.snapshot import BadEdit, Bounds, Snapshot, clean_path
from sandbox import Limits, Sandbox
from sandbox.require import at_least, positive, require

NAME = "files"
RUN = Guest("workspace.py")
SPARE_S = 3.0  # seconds beyond a program's own in which the jail starts it and reads the files back
UNCHANGED = "Note: the files are as before this call."


def spec(name: str, description: str, **parameters: str) -> ToolSpec:
    """Returns a tool whose parameters are texts. One whose description begins with `optional` may be left out."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    required = [key for key, text in parameters.items() if not text.startswith("optional")]
    schema = {"type": "object", "properties": properties, "required": required}
    return ToolSpec(name=name, description=description, parameters=schema)


class Workspaces:
    """The World of tasks that begin from files: `Prompt.metadata["files"]` maps paths to texts, and
    `metadata["root"]`, if there is one, is a folder such as /app by which the task names its workspace.

    wall_s: seconds that a program may run. output_chars: how much of an answer the model reads.
    """

    name = NAME
    tools: Sequence[ToolSpec] = (
        spec("list_files", "Lists the files of the workspace with their sizes in bytes."),
        spec("read_file", "Shows a text file.", path="relative path"),
        spec(
            "write_file", "Writes a text file, in place of any that is there.", path="relative path", text="all of it"
        ),
        spec(
            "replace_text",
            "Replaces a text that occurs once in a file.",
            path="relative path",
            old="what is there",
            new="what stands there afterwards",
        ),
        spec(
            "run_python",
            "Runs a Python file and shows what it prints. Of a file test_*.py it also runs the test functions.",
            path="relative path",
            arguments="optional: command line arguments, separated by spaces",
            input="optional: text for standard input",
        ),
    )

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        wall_s: float = 4.0,
        memory_bytes: int = 512 << 20,
        output_chars: int = 2000,
        bounds: Bounds | None = None,
    ) -> None:
        require("wall_s", wall_s, positive)
        require("output_chars", output_chars, at_least(20))
        self.sandbox, self.wall_s, self.output_chars, self.bounds = sandbox, wall_s, output_chars, bounds or Bounds()
        self.limits = jail_limits(wall_s, memory_bytes, self.bounds)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncIterator[OpenWorkspace]:
        yield OpenWorkspace(self, prompt.id, snapshot_of(prompt, self.bounds), str(prompt.metadata.get("root", "")))


def snapshot_of(prompt: Prompt, bounds: Bounds) -> Snapshot:
    """Returns the files that a prompt begins with. Raises ValueError, which names the prompt, for what are none."""
    files = prompt.metadata.get("files", {})
    try:
        return Snapshot(files={path: text.encode() for path, text in files.items()}, bounds=bounds)
    except (AttributeError, ValueError) as error:
        raise ValueError(f"prompt {prompt.id}: metadata['files'] is no workspace: {error}") from error


def jail_limits(wall_s: float, memory_bytes: int, bounds: Bounds) -> Limits:
    """Returns limits of a jail whose programs have limits of their own within them."""
    room = 2 * bounds.bytes + (1 << 20)  # Latin-1 characters have at most two bytes in UTF-8
    return Limits(
        wall_s=wall_s + SPARE_S,
        cpu_s=2 * wall_s + SPARE_S,
        memory_bytes=memory_bytes,
        output_bytes=room,
        disk_bytes=max(8 << 20, 4 * bounds.bytes),
    )


class OpenWorkspace:
    """The workspace of one trajectory."""

    def __init__(self, owner: Workspaces, prompt_id: str, snapshot: Snapshot, root: str) -> None:
        self.snapshot = snapshot
        self._owner, self._prompt_id, self._root = owner, prompt_id, root
        self._turn = asyncio.Lock()
        self._runs = 0

    def state(self) -> bytes:
        return self.snapshot.state()

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolReply:
        async with self._turn:
            try:
                wrong = [name for name, value in arguments.items() if not isinstance(value, str)]
                if wrong:
                    raise BadEdit(f"TypeError: {wrong[0]!r:.60} must be a string")
                return await self._call(tool, arguments)
            except KeyError as error:
                return ToolReply(outcome="error", text=f"TypeError: the argument {error} is missing", executed=False)
            except BadEdit as error:
                return ToolReply(outcome="error", text=str(error))

    async def _call(self, tool: str, arguments: Mapping[str, str]) -> ToolReply:
        if tool == "run_python":
            words = arguments.get("arguments", "").split()
            return await self._run(clean_path(arguments["path"], self._root), words, arguments.get("input", ""))
        self.snapshot, text = edited(self.snapshot, tool, arguments, self._root)
        return ToolReply(outcome="ok", text=clip(text, self._owner.output_chars))

    async def _run(self, path: str, words: list[str], stdin: str) -> ToolReply:
        owner = self._owner
        self.snapshot.text(path)  # raises for a file that is not there
        head = {
            "path": path,
            "arguments": words,
            "stdin": stdin.encode("utf-8", "replace").decode(),
            "wall_s": owner.wall_s,
            "output_bytes": 4 * owner.output_chars,
            "most_files": owner.bounds.files,
            "most_bytes": owner.bounds.bytes,
        }
        self._runs += 1
        request = request_of(head, self.snapshot.files)
        result = await RUN.run(owner.sandbox, "run", request, owner.limits, seed_of(self._prompt_id, self._runs))
        if result.outcome != "ok":
            text = f"Error: the program was stopped ({result.outcome})\n{UNCHANGED}"
            return ToolReply(outcome=result.outcome, text=text, jailed=result.jailed, queue_s=result.queue_s)
        answer, files = answer_of(result.stdout)
        outcome, ending = ending_of(answer["status"], owner.wall_s)
        note = UNCHANGED if outcome == "timeout" else self._take(files, answer["problem"])
        if note and outcome == "ok":
            outcome = "error"
        printed = clip(joined(answer["stdout"].strip("\n"), answer["stderr"].strip("\n")), owner.output_chars)
        text = joined(printed, ending, note)
        return ToolReply(outcome=outcome, text=text, jailed=result.jailed, queue_s=result.queue_s)

    def _take(self, files: Mapping[str, bytes], problem: str | None) -> str:
        """Takes over the files that a program has left; returns a note if they are no workspace."""
        try:
            if problem is not None:
                raise BadEdit(problem)
            self.snapshot = Snapshot(files=files, bounds=self.snapshot.bounds)
        except ValueError as error:
            return joined(f"Error: {str(error)[:300]}", UNCHANGED)
        return ""


def edited(snapshot: Snapshot, tool: str, arguments: Mapping[str, str], root: str = "") -> tuple[Snapshot, str]:
    """Returns the files after a call of a tool that runs nothing, and its reply. Raises BadEdit or KeyError."""
    if tool == "list_files":
        lines = [f"{path}  {len(content)}" for path, content in sorted(snapshot.files.items())]
        return snapshot, "\n".join(lines) or "(no files)"
    path = clean_path(arguments["path"], root)
    if tool == "read_file":
        return snapshot, snapshot.text(path)
    if tool == "write_file":
        after = snapshot.written(path, arguments["text"])
    else:
        after = snapshot.replaced(path, arguments["old"], arguments["new"])
    return after, f"{path}: {len(after.files[path])} bytes"


def ending_of(status: int | None, wall_s: float) -> tuple[str, str]:
    """Returns the outcome of a program, and a line about it, by its wait status; None: it ran too long."""
    if status is None:
        return "timeout", f"TimeoutError: stopped after {wall_s:g} s"
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return "killed", f"Error: killed by signal {-code}"
    return ("error", f"exit code {code}") if code else ("ok", "")


def seed_of(prompt_id: str, number: int) -> int:
    """Returns the seed of a trajectory's run: the same when the call is run again after a resume."""
    return int.from_bytes(hashlib.blake2b(f"{prompt_id}/{number}".encode(), digest_size=7).digest(), "big")
