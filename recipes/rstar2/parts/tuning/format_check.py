"""Checks whether a checkpoint calls tools in the right form: samples replies and reads them as a rollout does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import first_error
from engine.replica.config import ReplicaConfig
from engine.replica.port import Generator, Sampling
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.rollout import derive_seed
from engine.rollout.tool_call_parser import ToolCall, ToolCallParser

BLOCK = 32  # tokens of a block of the KV cache
KV_BLOCKS = 1024  # on the CPU; longer sequences get more


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A prompt whose answer should begin with a call. id: no other prompt has it. tools: names of those it shows."""

    id: str
    prompt_ids: list[int]
    tools: frozenset[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A sampled reply and its calls. finished: it ended by itself."""

    id: str
    text: str
    calls: int
    malformed: int
    unknown_tools: int
    finished: bool


def shares(replies: Sequence[Reply]) -> dict[str, float]:
    """Returns shares of the replies: those with a call that could be run, with a malformed one, with a call of a tool
    that does not exist, and those that did not end by themselves.
    """
    n = len(replies)
    return {
        "format/replies": float(n),
        "format/calls": sum(reply.calls > 0 for reply in replies) / n,
        "format/malformed": sum(reply.malformed > 0 for reply in replies) / n,
        "format/unknown_tool": sum(reply.unknown_tools > 0 for reply in replies) / n,
        "format/unfinished": sum(not reply.finished for reply in replies) / n,
    }


async def check_format(
    checkpoint: Path,
    questions: Sequence[Question],
    chat: ChatTemplate,
    *,
    max_reply_tokens: int,
    temperature: float,
    seed: int,
    device: int | None,
) -> list[Reply]:
    """Samples one reply to each question on a replica of its own. device: its GPU; None: the CPU.

    Raises ReplicaDied.
    """
    longest = max(len(question.prompt_ids) for question in questions) + max_reply_tokens
    config = ReplicaConfig(
        checkpoint=str(checkpoint),
        max_model_len=longest,
        kv_blocks=max(KV_BLOCKS, longest // BLOCK + 2) if device is None else None,
        block_size=BLOCK,
        devices=() if device is None else (device,),
        dtype="float32" if device is None else "bfloat16",
    )
    async with AsyncExitStack() as stack:
        replica = Replica(config, index=0, core=None, on_step=lambda index, sample: None)
        stack.push_async_callback(replica.shutdown)
        await replica.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(
                        ask(replica, question, chat, max_tokens=max_reply_tokens, temperature=temperature, seed=seed),
                        name=f"format-{question.id}",
                    )
                    for question in questions
                ]
        except BaseExceptionGroup as failures:
            raise first_error(failures) from failures
        return [task.result() for task in asked]


async def ask(
    generator: Generator, question: Question, chat: ChatTemplate, *, max_tokens: int, temperature: float, seed: int
) -> Reply:
    sampling = Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        seed=derive_seed(seed, question.id, 0, 0),
        stop_token_ids=(chat.end_of_turn,),
    )
    ids: list[int] = []
    finish = None
    async with aclosing(generator.generate(question.prompt_ids, sampling, question.id)) as deltas:
        async for delta in deltas:
            ids += delta.token_ids
            finish = delta.finish
    text = chat.decode(ids)
    parser = ToolCallParser()
    parsed = list(parser.feed(text))
    if finish == "stop":  # otherwise a call that is open at the end was cut off, which says nothing about the model
        parsed += parser.finish()
    calls = [each for each in parsed if isinstance(each, ToolCall)]
    known = [call for call in calls if call.name in question.tools]
    return Reply(
        id=question.id,
        text=text,
        calls=len(known),
        malformed=len(parsed) - len(calls),
        unknown_tools=len(calls) - len(known),
        finished=finish == "stop",
    )


def names(tools: Sequence[Any]) -> frozenset[str]:
    """Returns the names of tools by their schemas."""
    return frozenset(tool["function"]["name"] for tool in tools)
