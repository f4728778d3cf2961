"""A teacher behind a server: our own gateway, and servers that fail, refuse or mean something else."""

import asyncio
import json
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import ClientSession, web

from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.server import ServerConfig, serve
from engine.gateway.session import SessionRules
from engine.replica.port import ReplicaDied
from engine.teacher.config import TeacherConfig
from engine.teacher.endpoint import endpoint_of
from engine.teacher.teacher import Teacher, TeacherLost
from engine.telemetry.timeline import Timeline
from sandbox.http.listener import Address
from tests.support.fakes import Replicas, fleet_of
from tests.support.node import CHAT
from tests.support.paths import TINY


@asynccontextmanager
async def gateway(token=""):
    """Our gateway over a fleet that continues any tokens: (fleet, URL)."""
    async with fleet_of(Replicas(), 1) as fleet:
        over = Gateway(fleet, CHAT, Timeline(), GatewayConfig(rules=SessionRules(max_tokens=400)))
        async with serve(over, ServerConfig(model="tiny", address=Address(token=token))) as address:
            yield fleet, f"{address}/v1"


async def at_once(seconds):
    """No wait."""


def config_of(url, **options):
    return TeacherConfig(teacher=str(url), **options)


def row(token, logprob=-0.5, rank=1, text=None):
    return {
        str(token): {"logprob": logprob, "rank": rank, "decoded_token": CHAT.decode([token]) if text is None else text}
    }


@asynccontextmanager
async def server(answer):
    """A server that gives for a completion what `answer(body)` returns: (status, choice)."""
    asked = []

    async def models(request):
        return web.json_response({"data": [{"id": "tiny"}]})

    async def completions(request):
        asked.append(await request.json())
        status, choice = answer(asked[-1])
        return web.json_response({"choices": [choice]} if status == 200 else {"error": "no"}, status=status)

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}/v1", asked
    finally:
        await runner.cleanup()


def rows_of(body, text=None):
    return {"prompt_logprobs": [None, *(row(token, text=text) for token in body["prompt"][1:])]}


@pytest.mark.parametrize("top", [0, 3])
async def test_our_gateway_scores_as_its_fleet_does(top):
    async with gateway() as (fleet, url), endpoint_of(config_of(url)) as endpoint:
        ids = [5, 6, 7, 9, 300]
        theirs, ours = await endpoint.score(ids, 2, top), await fleet.score(ids, 2, top)
        assert theirs.logprobs_T.tolist() == ours.logprobs_T.tolist()
        assert theirs.top_ids.tolist() == ours.top_ids.tolist()
        assert theirs.top_logprobs.tolist() == ours.top_logprobs.tolist()
        await endpoint.check(CHAT, TINY, longest=200)


async def test_the_gateway_answers_in_the_form_of_vllm():
    async with gateway() as (_, url), ClientSession() as session:
        url, body = f"{url}/completions", {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1, "prompt_logprobs": 2}
        async with session.post(url, json=body) as response:
            first, second = (await response.json())["choices"]
        assert first["prompt_logprobs"][0] is None
        assert [len(entry) for entry in first["prompt_logprobs"][1:]] == [3, 3]
        assert first["prompt_logprobs"][2]["7"] == {
            "logprob": -8 / 1024,
            "rank": None,
            "decoded_token": CHAT.decode([7]),
        }
        assert [entry["rank"] for entry in second["prompt_logprobs"][1].values()] == [None, 1, 2]
        for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": 1, "stream": True}):
            async with session.post(url, json={**body, **wrong}) as response:
                assert response.status == 400
                assert "prompt_logprobs" in (await response.json())["error"]["message"]
        async with session.post(url, json={**body, "prompt_logprobs": None}) as response:
            assert "prompt_logprobs" not in (await response.json())["choices"][0]


async def test_what_fails_for_a_while_is_asked_again():
    answers = iter([(503, {}), (429, {}), (500, {})])
    async with (
        server(lambda body: next(answers, (200, rows_of(body)))) as (url, asked),
        endpoint_of(config_of(url), sleep=at_once) as endpoint,
    ):
        assert (await endpoint.score([5, 6, 7], 1)).logprobs_T.tolist() == [-0.5, -0.5]
    assert len(asked) == 4
    assert asked[0]["prompt"] == [5, 6, 7]
    assert (asked[0]["model"], asked[0]["prompt_logprobs"]) == ("tiny", 0)


@pytest.mark.parametrize(
    ("status", "choice", "said"),
    [
        (400, {}, "HTTP 400"),
        (200, {}, "prompt_logprobs"),
        (200, {"prompt_logprobs": None}, "prompt_logprobs"),
        (200, {"prompt_logprobs": [None, row(6)]}, "prompt_logprobs"),
        (200, {"prompt_logprobs": [None, row(6), row(8)]}, "token 7"),
        (200, {"prompt_logprobs": [None, row(6), {"7": {"logprob": None}}]}, "token 7"),
        (200, {"prompt_logprobs": [None, row(6), None]}, "token 7"),
    ],
)
async def test_an_answer_without_the_scores_is_an_error_and_never_a_zero(status, choice, said):
    async with server(lambda body: (status, choice)) as (url, asked), endpoint_of(config_of(url)) as endpoint:
        with pytest.raises(ValueError, match=said):
            await endpoint.score([5, 6, 7], 1)
        assert len(asked) == 1


async def test_too_few_likely_tokens_are_refused():
    async with server(lambda body: (200, rows_of(body))) as (url, _), endpoint_of(config_of(url)) as endpoint:
        with pytest.raises(ValueError, match="the 3 likeliest, got 1"):
            await endpoint.score([5, 6, 7], 1, top=3)


async def test_another_vocabulary_is_refused_with_the_tokens_that_differ():
    async with server(lambda body: (200, rows_of(body, text="?"))) as (url, _), endpoint_of(config_of(url)) as endpoint:
        with pytest.raises(ValueError, match="another vocabulary"):
            await endpoint.check(CHAT, TINY, longest=200)


async def test_a_server_that_is_not_there_is_said_within_the_deadline():
    config = config_of("http://127.0.0.1:9/v1", deadline_s=0.2)
    async with endpoint_of(config) as endpoint:
        with pytest.raises(ReplicaDied, match=r"127\.0\.0\.1:9.*within 0\.2 s"):
            await endpoint.check(CHAT, TINY, longest=200)


async def test_the_key_goes_into_a_header_and_nowhere_else(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "secret")
    async with gateway(token="secret") as (_, url):
        config = config_of(url, key_variable="TEACHER_KEY")
        async with endpoint_of(config) as endpoint:
            assert np.isfinite((await endpoint.score([5, 6, 7], 1)).logprobs_T).all()
        assert "secret" not in repr(config)
        async with endpoint_of(config_of(url, key_variable="NO_KEY")) as endpoint:
            with pytest.raises(ValueError, match=r"HTTP 401.*NO_KEY") as refused:
                await endpoint.score([5, 6, 7], 1)
    assert "secret" not in json.dumps(str(refused.value))


async def test_a_server_with_less_room_than_a_trajectory_is_refused_at_the_start():
    def answer(body):
        return (400, {}) if len(body["prompt"]) > 100 else (200, rows_of(body))

    async with server(answer) as (url, _), endpoint_of(config_of(url)) as endpoint:
        await endpoint.check(CHAT, TINY, longest=100)
        with pytest.raises(ValueError, match=r"200 tokens.*Fix:.*rollout\.max_tokens"):
            await endpoint.check(CHAT, TINY, longest=200)


async def test_a_server_that_names_too_few_likely_tokens_is_refused_at_the_start():
    async with server(lambda body: (200, rows_of(body))) as (url, _), endpoint_of(config_of(url)) as endpoint:
        with pytest.raises(ValueError, match="the 3 likeliest"):
            await endpoint.check(CHAT, TINY, longest=100, top=3)


@pytest.mark.parametrize(("failures", "lines"), [(1, 0), (9, 2)])
async def test_a_failure_that_lasts_is_told_once_and_its_end_too(failures, lines):
    notes, answers = [], iter([(503, {})] * failures)
    async with (
        server(lambda body: next(answers, (200, rows_of(body)))) as (url, _),
        endpoint_of(config_of(url), sleep=at_once, note=notes.append) as endpoint,
    ):
        await endpoint.score([5, 6, 7], 1)
        await endpoint.score([5, 6, 7], 1)
    assert len(notes) == lines
    if notes:
        assert "HTTP 503" in notes[0]
        assert "answers again" in notes[1]


async def test_a_teacher_that_is_gone_is_named_with_the_cause():
    async with (
        server(lambda body: (503, {})) as (url, _),
        endpoint_of(config_of(url), sleep=at_once) as endpoint,
    ):
        teacher = Teacher(
            endpoint, name=url, top=0, deadline_s=0.2, tokens=512, known=512, trouble=lambda: endpoint.trouble
        )
        with pytest.raises(TeacherLost, match=r"HTTP 503.*Fix: start the server again"):
            await teacher.score([5, 6, 7], 1)


async def test_a_url_without_its_end_is_refused_with_a_fix():
    async with gateway() as (_, url), endpoint_of(config_of(url.removesuffix("/v1"))) as endpoint:
        with pytest.raises(ValueError, match="/v1"):
            await endpoint.check(CHAT, TINY, longest=200)


@pytest.mark.parametrize("deadline_s", [0.05, 0.1, 0.2])
async def test_a_server_that_takes_a_request_and_never_answers_is_given_up_at_the_deadline(deadline_s):
    accepted = asyncio.Event()

    async def silent(reader, writer):
        await accepted.wait()
        writer.close()

    listener = await asyncio.start_server(silent, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    try:
        config = config_of(f"http://{host}:{port}/v1", deadline_s=deadline_s)
        async with endpoint_of(config) as endpoint, asyncio.timeout(10):
            teacher = Teacher(endpoint, name="t", top=0, deadline_s=deadline_s, tokens=512, known=512)
            with pytest.raises(ReplicaDied, match="does not answer"):
                await endpoint.check(CHAT, TINY, longest=200)
            with pytest.raises(TeacherLost, match="no scores within"):
                await teacher.score([5, 6, 7], 1)
    finally:
        accepted.set()
        listener.close()
