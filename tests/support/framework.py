"""Scripts of agent frameworks, each in a process of its own, against the gateway over a scripted replica.

The replica says the next turn of the case that a prompt names, and where the request has a grammar the turn must obey
it. So a client gets what a wise model would have sampled, and tests look at what the client makes of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import xgrammar

from engine.gateway.session import SessionRules
from engine.types import StopReason
from tests.support.fakes import a_prompt
from tests.support.node import CHAT, END, check, served

ROOM = 20_000  # tokens of a conversation: the prompts of some frameworks are long
LONGEST_S = 100.0
CASE = re.compile(r"case:(\w+)")
LAST = 256
COMPILER = xgrammar.GrammarCompiler(
    xgrammar.TokenizerInfo([*(bytes([byte]) for byte in range(256)), b""], stop_token_ids=[LAST]), max_threads=1
)


def call(name: str, **arguments: object) -> str:
    """Returns a call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@asynccontextmanager
async def answering(cases: Mapping[str, Sequence[str]]) -> AsyncIterator[Any]:
    """Serves a model that says these turns, by case.

    Yields a node of `tests.support.node.served`. Its `said` has what the model said after each prompt.
    """
    asked: Counter[str] = Counter()
    said: dict[tuple[int, ...], str] = {}

    def script(token_ids, sampling):
        named = CASE.search(CHAT.decode(token_ids))
        turn = "Hello."  # a client tries whether the model is there
        if named is not None:
            turn = cases[named[1]][asked[named[1]]]
            asked[named[1]] += 1
        said[tuple(token_ids)] = turn + END
        if sampling.grammar is not None:
            matcher = xgrammar.GrammarMatcher(COMPILER.compile_structural_tag(sampling.grammar))
            assert matcher.accept_string(turn), turn
            assert matcher.accept_token(LAST), turn
        return [turn + END]

    def prepare(replica):
        replica._script, replica.usable_blocks = script, 1 << 17

    async with served(prepare=prepare, rules=SessionRules(max_tokens=ROOM, seed=3)) as node:
        node.said = said
        yield node


async def said_by(environment: Path, script: Path, node: Any, folder: Path) -> dict[str, Any]:
    """Runs a script and returns what its cases answered."""
    variables = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "OPENAI_BASE_URL": f"{node.address}/v1",
        "OPENAI_MODEL": "tiny",
        "ANTHROPIC_BASE_URL": node.address,
        "HTTPS_PROXY": "http://127.0.0.1:9",  # nothing leaves this machine
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
    }
    with (folder / "errors").open("w+") as errors:
        process = await asyncio.create_subprocess_exec(
            environment / "bin" / "python", script, cwd=folder, env=variables, stdout=-1, stderr=errors
        )
        try:
            async with asyncio.timeout(LONGEST_S):
                output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        errors.seek(0)
        assert process.returncode == 0, errors.read()[-3000:]
    return json.loads(output.splitlines()[-1])  # a framework may print before


async def cost_of(node: Any, case: str) -> dict[str, Any]:
    """Returns what the gateway says of the session of a case."""
    async with aiohttp.ClientSession() as client, client.get(f"{node.address}/sessions/session-{case}") as response:
        return await response.json()


def check_exact(node: Any, case: str, *, turns: int, constrained: int) -> None:
    """Asserts that the session has so many turns, with the tokens that the replica read and sampled, each once.

    constrained: how many of them the replica sampled under a grammar.
    """
    trajectory = node.gateway.session(f"session-{case}").trajectory(a_prompt(), StopReason.ANSWER)
    check(trajectory)
    [replica] = node.replicas.made
    kept: Counter[tuple[int, ...]] = Counter()
    for part in (trajectory, *trajectory.segments):
        spans = [np.arange(turn.start, turn.end) for turn in part.turns]
        np.testing.assert_array_equal(np.flatnonzero(part.sampled_T), np.concatenate(spans))
        for turn in part.turns:
            read = tuple(part.token_ids_T[: turn.start].tolist())
            said = CHAT._encode(node.said[read])  # a stop text of the client may have cut it off
            assert part.token_ids_T[turn.start : turn.end].tolist() == said[: turn.end - turn.start]
            kept[read] += 1
    assert kept.total() == turns
    assert kept <= Counter(tuple(ids) for ids, _, _ in replica.requests)
    under = [ids for ids, sampling, _ in replica.requests if sampling.grammar is not None and tuple(ids) in kept]
    assert len(under) == constrained, case
