"""What a model is shown of a plain function, and what it reads of its calls."""

from typing import Annotated, Literal, Optional

import pytest

from engine.ports import ToolReply
from engine.tools.function_tool import FunctionTool


async def search(
    query: str,
    limit: int = 3,
    exact: bool = False,
    least: Optional[float] = None,  # noqa: UP045  as people write it
    words: list[str] = [],  # noqa: B006  as people write it
    order: Literal["date", "score"] = "score",
    place: Annotated[str, "where to look"] = "all",
) -> dict:
    """Searches the books.

    What follows is for people.

    Args:
        query: what to look for,
            in any language
        limit (int): how many are named
        place: not this, where the type says it
    """
    return {"query": query, "least": least, "words": words, "order": order}


def test_types_and_defaults_become_a_schema():
    tool = FunctionTool(search)
    assert tool.description == "Searches the books."
    assert tool.parameters["required"] == ["query"]
    assert tool.parameters["properties"] == {
        "query": {"type": "string", "description": "what to look for, in any language"},
        "limit": {"type": "integer", "description": "how many are named", "default": 3},
        "exact": {"type": "boolean", "default": False},
        "least": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": None},
        "words": {"type": "array", "items": {"type": "string"}, "default": []},
        "order": {"enum": ["date", "score"], "default": "score"},
        "place": {"type": "string", "description": "where to look", "default": "all"},
    }


@pytest.mark.parametrize(
    ("arguments", "outcome", "part"),
    [
        ({"query": "roc", "least": 1, "words": ["a"], "order": "date"}, "ok", '"least": 1.0, "words": ["a"]'),
        ({"query": "roc", "order": "size"}, "error", "size"),
        ({"query": "roc", "words": [1]}, "error", "words"),
        ({"query": "roc", "exact": "yes"}, "error", "exact"),
    ],
)
async def test_arguments_are_checked_by_their_types(arguments, outcome, part):
    reply = await FunctionTool(search)(arguments)
    assert (reply.outcome, part in reply.text) == (outcome, True), reply


def in_the_style_of_sphinx(x: int) -> str:
    """Doubles.

    :param x: a number
    """
    return str(2 * x)


def in_the_style_of_numpy(x: int) -> str:
    """Doubles.

    Parameters
    ----------
    x : int
        a number
    """
    return str(2 * x)


def without_a_blank_line(x: int) -> str:
    """Doubles.
    Args:
        x: a number
    """
    return str(2 * x)


@pytest.mark.parametrize("function", [in_the_style_of_sphinx, in_the_style_of_numpy, without_a_blank_line])
async def test_any_usual_docstring_describes_the_parameters(function):
    tool = FunctionTool(function)
    assert tool.description == "Doubles."
    assert tool.parameters["properties"]["x"]["description"] == "a number"
    assert await tool({"x": 21}) == ToolReply(outcome="ok", text="42")


def without_a_docstring(x: int) -> str:
    return str(x)


def with_an_odd_one(x: int) -> str:
    """Says a number.

    : :param x: which the parser cannot read
    """
    return str(x)


@pytest.mark.parametrize(("function", "shown"), [(without_a_docstring, ""), (with_an_odd_one, "Says a number.")])
async def test_a_function_may_say_nothing_of_its_parameters(function, shown):
    tool = FunctionTool(function)
    assert tool.description == shown
    assert tool.parameters["properties"] == {"x": {"type": "integer"}}
    assert (await tool({"x": 3})).text == "3"
