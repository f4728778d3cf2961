"""Demonstrations of how the exercises with files are solved: what each way leaves of the workspace."""

import json
import re
from collections import Counter
from itertools import islice

import pytest

from recipes.tiny.task import Mix
from recipes.tools.exercises import exercises
from recipes.tools.file_demonstrations import demonstrations
from recipes.tools.snapshot import BadEdit, Bounds
from recipes.tools.workspace import edited, snapshot_of

CALL = re.compile(r"<tool_call>(.*?)</tool_call>")
MIX = {
    kind: Mix(**{each: float(each == kind) for each in ("head", "clean", "err")}) for kind in ("head", "clean", "err")
}


def replayed(prompt, demonstration):
    """Runs the calls on the exercise's own files. Returns the files at the end, the tools called, and failed calls."""
    workspace, tools, failed, replies = snapshot_of(prompt, Bounds()), [], 0, []
    for message in demonstration[1:]:
        if message["role"] == "tool":
            assert message["content"] == replies.pop(0)
        for found in CALL.findall(message["content"]) if message["role"] == "assistant" else ():
            call = json.loads(found)
            tools.append(call["name"])
            try:
                workspace, reply = edited(workspace, call["name"], call["arguments"])
            except BadEdit as error:
                reply, failed = str(error), failed + 1
            replies.append(reply)
    assert not replies
    return {path: content.decode() for path, content in workspace.files.items()}, tools, failed


def pairs(kind, seed, count=200):
    return zip(islice(exercises("train", seed), count), demonstrations(MIX[kind], seed), strict=False)


@pytest.mark.parametrize(("kind", "failures"), [("clean", 0), ("err", 1)])
def test_who_looks_leaves_the_reference(kind, failures):
    for prompt, demonstration in pairs(kind, 4):
        assert demonstration[0] == prompt.messages[0]
        left, tools, failed = replayed(prompt, demonstration)
        assert left == {**prompt.metadata["files"], **prompt.metadata["solution"]}
        assert "read_file" in tools
        assert failed == failures


def test_who_guesses_is_sometimes_right_and_never_for_a_port():
    right = Counter()
    for prompt, demonstration in pairs("head", 5):
        left, tools, _ = replayed(prompt, demonstration)
        assert "read_file" not in tools
        right[min(prompt.metadata["files"])] += left == {**prompt.metadata["files"], **prompt.metadata["solution"]}
    assert right["client.py"] == 0
    assert 0 < right["sums.py"] < right["example.csv"] < 40
    assert right["counting.py"] > 0
