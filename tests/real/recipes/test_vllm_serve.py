"""vLLM's own server on an exported checkpoint: its hermes parser finds the calls that a rollout finds.

It needs .venv-serve (`make serve-env`).
"""

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from http.client import HTTPException
from itertools import islice
from urllib.request import urlopen

import pytest
import torch
import torch.distributed as dist
from openai import AsyncOpenAI
from rich.console import Console
from transformers import AutoModelForCausalLM

from algo.learner.model.scorer import Scorer
from algo.learner.state.export import export
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.tool_call_parser import OPEN, ToolCall, ToolCallParser
from engine.tools.python_tool import PythonTool, schema
from recipes.conversation import converse
from recipes.rstar2.parts.sampling.endpoint import OnEndpoint, connect, model_of
from recipes.tiny.task import TOOL_NAME, prompts
from sandbox import Sandbox, SandboxConfig
from tests.support.paths import ROOT, TINY

VLLM = ROOT / ".venv-serve" / "bin" / "vllm"
OPTIONS = (
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--enforce-eager",
    "--served-model-name",
    "tiny",
)
START_S = 400  # on busy cores; else half a minute
AT_ONCE = 16  # a seeded request whose prompt is read in two steps, among many, ends vLLM's engine on the CPU
TOOLS = [schema(PythonTool(runner=None, name=TOOL_NAME))]
QUESTIONS = [prompt.messages[0]["content"] for prompt in islice(prompts("test", 0), 80)]

pytestmark = [
    pytest.mark.skipif(not VLLM.exists(), reason="no .venv-serve. Fix: make serve-env"),
    pytest.mark.timeout(START_S + 200),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The tiny agent as the learner exports it: it has learnt to call, now and then wrongly."""
    folder = tmp_path_factory.mktemp("exported")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        chat = ChatTemplate.load(TINY)
        export(Scorer(model), TINY, folder / "tiny", chat_template=chat.template, end_of_turn=chat.end_of_turn)
    finally:
        dist.destroy_process_group()
    return folder / "tiny"


@pytest.fixture(scope="module")
def url(exported):
    """Of a server that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    log = exported.parent / "server.log"
    with log.open("wb") as out:
        command = [VLLM, "serve", exported, *OPTIONS, "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        ends = time.monotonic() + START_S
        while time.monotonic() < ends and server.poll() is None and not serves(port):
            time.sleep(0.5)
        assert serves(port), log.read_text()[-3000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def serves(port):
    with suppress(OSError, HTTPException), urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as health:
        return health.status == 200
    return False


async def test_every_call_of_an_answer_is_the_one_that_a_rollout_finds_in_its_text(url, exported):
    chat = ChatTemplate.load(exported)
    async with connect(url) as client:
        gate = asyncio.Semaphore(AT_ONCE)
        asked = [answer(client, gate, question, seed) for seed, question in enumerate(QUESTIONS)]
        answers = await asyncio.gather(*asked)
    called = malformed = 0
    for choice in [choice for choice in answers if choice.finish_reason != "length"]:
        text = chat.decode(choice.token_ids).removesuffix(chat.end_of_turn_text)
        parser = ToolCallParser()
        ours = [*parser.feed(text), *parser.finish()]
        assert choice.token_ids.index(chat.end_of_turn) == len(choice.token_ids) - 1
        theirs = [call.function for call in choice.message.tool_calls or ()]
        if all(isinstance(call, ToolCall) for call in ours):
            assert [(call.name, json.loads(call.arguments)) for call in theirs] == [
                (call.name, call.arguments) for call in ours
            ]
            assert choice.message.content == text.partition(OPEN)[0]
            assert choice.finish_reason == ("tool_calls" if ours else "stop")
            called += bool(ours)
        else:  # what is no call to a rollout is none to vLLM either, which leaves it in the text
            assert theirs == []
            assert choice.message.content == text
            malformed += 1
    assert called >= 20
    assert malformed >= 1


async def answer(client: AsyncOpenAI, gate, question, seed):
    async with gate:
        completion = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": question}],
            tools=TOOLS,
            temperature=1.0,
            seed=seed,
            max_tokens=230,
            extra_body={"return_token_ids": True},
        )
    return completion.choices[0]


async def test_twenty_chats_that_call_run_each_call_in_the_jail(url):
    """Through the client of the chat program, which streams. An exception of Python's is an answer like another."""
    chats, ran, names = 0, 0, set()
    async with connect(url) as client, Sandbox(SandboxConfig(slots=2)) as sandbox:
        tools = {TOOL_NAME: PythonTool(sandbox, TOOL_NAME)}
        assert await model_of(client, "") == "tiny"
        for question in QUESTIONS:
            speaker = OnEndpoint(client=client, model="tiny", tools=TOOLS, temperature=1.0, max_tokens=230)
            ended = await converse(question, speaker, tools, max_turns=4, console=Console(file=io.StringIO()))
            made = {
                call["id"]: call["function"] for message in speaker.messages for call in message.get("tool_calls", ())
            }
            replies = [message for message in speaker.messages if message["role"] == "tool"]
            assert len(replies) == len(made) or ended == "tokens"
            for reply in replies:  # broken JSON comes as the model wrote it
                is_call = is_object(made[reply["tool_call_id"]]["arguments"])
                assert reply["content"].startswith("FormatError") != is_call
                ran += is_call
            names |= {call["name"] for call in made.values()}
            chats += bool(made)
            if chats == 20:
                break
    assert chats == 20
    assert ran >= 20
    assert names == {TOOL_NAME}


def is_object(text):
    with suppress(ValueError):
        return isinstance(json.loads(text), dict)
    return False


async def test_a_prompt_of_the_server_is_that_of_a_rollout(url, exported):
    chat = ChatTemplate.load(exported)
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    async with connect(url) as client:
        completion = await client.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, max_tokens=1, extra_body={"return_token_ids": True}
        )
    assert completion.prompt_token_ids == chat.prompt_ids(messages)
