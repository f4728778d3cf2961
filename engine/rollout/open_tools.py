"""The tools of one trajectory: those that have a state are opened for it.

Invariants
- A stateful tool, and a world, is opened once for each trajectory; all tools of a world share what was opened.
- What was opened is closed by the trajectory's exit stack, in reverse order, however the trajectory ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from engine import user_parts as parts
from engine.errors import BadInput
from engine.ports import OpenWorld, StatefulTool, Tool, ToolReply, ToolSpec, World
from engine.tools.function_tool import as_tools
from engine.types import Prompt

MOST_STATE_BYTES = 64 << 20  # each trajectory that has ended carries its states, and the event loop journals them


@dataclass(frozen=True, slots=True)
class WorldTool:
    """A tool of a world."""

    spec: ToolSpec
    world: World

    @property
    def name(self) -> str:
        return self.spec.name


OfferedTool = Tool | StatefulTool | WorldTool


def offered(given: Sequence[Tool | StatefulTool | World | Callable[..., Any]]) -> list[OfferedTool]:
    """Returns the tools that a model may call, those of each world in its place. Raises BadInput for equal names."""
    tools: list[OfferedTool] = []
    for part in given:
        specs = None if callable(part) else getattr(part, "tools", None)
        if specs is None:
            tools += as_tools([part])  # type: ignore[list-item]  # it is no world
        else:
            tools += [WorldTool(spec, part) for spec in specs]  # type: ignore[arg-type]  # it is a world
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise BadInput(f"tools must have different names, got {names}. Fix: rename one, or leave it out")
    worlds = {id(tool.world): tool.world.name for tool in tools if isinstance(tool, WorldTool)}
    if len(set(worlds.values())) < len(worlds):
        raise BadInput(f"worlds must have different names, got {[*worlds.values()]}. Fix: rename one")
    return tools


class OpenTools:
    """The tools of one trajectory by name, once `open` has ended."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tool] = {}
        self._worlds: dict[str, OpenWorld] = {}

    async def open(self, tools: Sequence[OfferedTool], prompt: Prompt, opened: AsyncExitStack) -> None:
        """Opens what has a state; `opened` closes it. Raises WrongPart for a part that gives nothing to call."""
        for tool in tools:
            if isinstance(tool, WorldTool):
                name = tool.world.name
                if name not in self._worlds:
                    self._worlds[name] = await _entered(tool.world, "call", opened, prompt)
                self.by_name[tool.name] = _BoundTool(tool.name, self._worlds[name])
            else:
                self.by_name[tool.name] = tool if callable(tool) else await _entered(tool, "__call__", opened)

    def states(self) -> dict[str, bytes]:
        """Returns the present state of each world by its name. Raises WrongPart for another type or size."""
        states = {name: world.state() for name, world in self._worlds.items()}
        for name, state in states.items():
            if type(state) is not bytes:
                raise parts.WrongPart(f"state() of the world {name} gave {state!r:.100}. Fix: return bytes")
            if len(state) > MOST_STATE_BYTES:
                fix = "Fix: refuse the calls that would make it larger, or return a digest of it"
                place = f"state() of the world {name}"
                raise parts.WrongPart(f"{place} gave {len(state)} bytes, and {MOST_STATE_BYTES} are the most. {fix}")
        return states


@dataclass(slots=True)
class _BoundTool:
    """A tool of the world that a trajectory has opened."""

    name: str
    world: OpenWorld

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolReply:
        return await self.world.call(self.name, arguments)


async def _entered(part: Any, method: str, opened: AsyncExitStack, *arguments: Any) -> Any:
    """Returns what `part.open(*arguments)` yields, which `opened` closes. Raises WrongPart if that lacks `method`."""
    what = "world" if arguments else "tool"
    place = f"open() of the {what} {part.name} ({type(part).__name__})"
    with parts.no_exit(what, part):
        made = part.open(*arguments)
        if not hasattr(made, "__aenter__"):
            fix = f"Fix: @asynccontextmanager above async def open, which yields a {what}"
            raise parts.WrongPart(f"{place} gave {made!r:.100}. {fix}")
        entered = await opened.enter_async_context(made)
        if not callable(getattr(entered, method, None)):
            raise parts.WrongPart(f"{place} yielded {entered!r:.100}. Fix: yield an object with {method}")
        return entered
