"""Tool calls as the peers parse them, where they agree with our decisions."""

from engine.rollout.tool_call_parser import ToolCall
from tests.support.golden import over, rows
from tests.unit.engine.rollout.test_tool_call_parser import parse


@over(rows("tool_parse"), lambda row: f"{row['params']['peer']}-{row['params']['case']}")
def test_the_peers_where_they_agree_with_our_decisions(row):
    """rStar for whole texts (a bad call is an answer), vLLM for streams (where it does not emit broken calls)."""
    calls, _ = parse(row["inputs"].get("chunks") or [row["inputs"]["text"]])
    streamed = "chunks" in row["inputs"]
    found = [{"name": c.name, "arguments": c.arguments} if isinstance(c, ToolCall) else "error" for c in calls]
    wanted = [
        "error" if "error" in c else {"name": c["name"], "arguments": c["arguments"]} for c in row["outputs"]["calls"]
    ]
    assert [c for c in found if not (streamed and c == "error")] == wanted
