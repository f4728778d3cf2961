"""A teacher behind an OpenAI-compatible server: `rocstar gateway`, or vLLM's own. It is asked by token ids.

POST /completions with `prompt` as ids and vLLM's `prompt_logprobs`: the answer has, for each position but the first,
the log-probability of the token that is there and of the likeliest ones.

Invariants
- What fails for a while (no connection, HTTP 408, 429 and 5xx) is asked again until the caller's deadline; what the
  server refuses is not.
- A failure that lasts for some seconds is told once, and its end too.
- The key is read from the environment only: it is in no configuration, no message and no file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from engine.replica.port import ReplicaDied
from engine.rollout.chat_template import ChatTemplate
from engine.teacher.config import TeacherConfig
from engine.teacher.vocabulary import SHOWN, vocabulary
from engine.types import TokenScores

RETRIED = (408, 429)
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 5.0
CONNECT_S = 10.0  # a host that is not there may not even refuse
COMPARED = 2048  # token ids that are compared with the server's, evenly over the vocabulary
CHUNK = 512  # of them in one request
FIXES = {
    401: ". Fix: put the server's key into the environment variable {key_variable}",
    403: ". Fix: put the server's key into the environment variable {key_variable}",
    404: ". Fix: give the URL up to and including /v1, http://HOST:PORT/v1",
}
UNKNOWN = "�"  # in the text of a token that is no whole character


class _Fails(Exception):
    """There was no answer, but there may be one later."""


class Endpoint:
    """`async with endpoint_of(config) as endpoint`. It satisfies `engine.teacher.teacher.Scores`."""

    def __init__(
        self,
        config: TeacherConfig,
        session: aiohttp.ClientSession,
        sleep: Callable[[float], Awaitable[None]],
        note: Callable[[str], None],
    ) -> None:
        self.trouble = ""
        """Why the server's last answer was none; empty if it was one."""
        self._config, self._session, self._sleep, self._note = config, session, sleep, note
        self._url = config.teacher.rstrip("/")
        self._places = asyncio.Semaphore(config.in_flight)
        self._model = ""
        self._noted = False

    async def score(self, token_ids: Sequence[int], start: int, top: int = 0) -> TokenScores:
        """See `engine.teacher.teacher.Scores`. It asks until it is answered: the caller has a deadline."""
        rows = await self._rows(token_ids, top)
        pairs = [_of_row(row, token, top) for row, token in zip(rows[start:], token_ids[start:], strict=True)]
        ids = [number for _, likeliest in pairs for number, _ in likeliest]
        logprobs = [value for _, likeliest in pairs for _, value in likeliest]
        return TokenScores(
            logprobs_T=np.asarray([own for own, _ in pairs], np.float32),
            top=top,
            top_ids=np.asarray(ids, np.int32),
            top_logprobs=np.asarray(logprobs, np.float32),
        )

    async def check(self, chat: ChatTemplate, student: Path, *, longest: int, top: int = 0) -> None:
        """Compares what token ids mean to the server with what they mean to the student, and asks once for as much as
        the run will ask for: the scores of the longest sequence, with the likeliest tokens.

        longest: tokens of the longest sequence. Raises ReplicaDied if the server does not answer in time, and
        ValueError if it refuses, or if an id means something else there.
        """
        known = sorted(vocabulary(student))
        chosen = [known[at] for at in np.unique(np.linspace(0, len(known) - 1, COMPARED).astype(int))]
        size = min(CHUNK, longest - 1)
        try:
            async with asyncio.timeout(self._config.deadline_s):
                try:
                    await self.score([chosen[0]] * longest, 1, top)
                except ValueError as error:
                    raise ValueError(
                        f"teacher {self._url} gives no scores for {longest} tokens, as many as a trajectory may have, "
                        f"with the {top} likeliest of each: {error}. Fix: start the server with room for one token "
                        "more, or lower rollout.max_tokens"
                    ) from error
                for begin in range(0, len(chosen), size):
                    part = chosen[begin : begin + size]
                    rows = await self._rows([part[0], *part], 0)
                    _compare(part, rows[1:], chat, self._url)
        except TimeoutError as error:
            cause = self.trouble or "it does not answer"
            raise ReplicaDied(
                f"teacher {self._url} gave no scores within {self._config.deadline_s:g} s: {cause}. Fix: start the "
                "server, or correct the URL"
            ) from error

    async def _rows(self, token_ids: Sequence[int], top: int) -> list[Any]:
        """Returns the answer's `prompt_logprobs`. Raises ValueError for a request that the server refuses."""
        async with self._places:
            wait_s = FIRST_WAIT_S
            while True:
                try:
                    rows = await self._ask(list(token_ids), top)
                except _Fails as failure:
                    self.trouble = str(failure)
                    if wait_s == LONGEST_WAIT_S and not self._noted:
                        self._noted = True
                        patience = f"asking again, {self._config.deadline_s:g} s in all"
                        self._note(f"the teacher {self._url} gives no scores: {failure}; {patience}")
                    await self._sleep(wait_s)
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S)
                else:
                    if self._noted:
                        self._note(f"the teacher {self._url} answers again")
                    self.trouble, self._noted = "", False
                    return rows

    async def _ask(self, token_ids: list[int], top: int) -> list[Any]:
        if not self._model:
            models = await self._sent("GET", "/models", None)
            self._model = str(_value_at(models, "data", 0, "id"))
        body = {
            "model": self._model,
            "prompt": token_ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top,
        }
        rows = _value_at(await self._sent("POST", "/completions", body), "choices", 0, "prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(token_ids):
            raise ValueError(
                f"{self._url} answers without prompt_logprobs for each of {len(token_ids)} tokens: {rows!r:.100}"
            )
        return rows

    async def _sent(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                data = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _Fails(f"it fails ({type(error).__name__}: {error})") from error
        if response.status >= 500 or response.status in RETRIED:
            raise _Fails(f"it answers with HTTP {response.status}")
        if response.status != 200:
            fix = FIXES.get(response.status, "").format(key_variable=self._config.key_variable)
            answer = data.decode(errors="replace")
            raise ValueError(f"{self._url} refuses with HTTP {response.status}: {answer:.300}{fix}")
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise _Fails("its answer is no JSON") from error


def _value_at(answer: Any, *keys: str | int) -> Any:
    for key in keys:
        try:
            answer = answer[key]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the server's answer has no {key!r}: {answer!r:.200}") from None
    return answer


def _of_row(row: Any, token: int, top: int) -> tuple[float, list[tuple[int, float]]]:
    """Returns the log-probability of the token at a position, and the likeliest tokens with theirs, in their order.

    Raises ValueError for another form than vLLM's, {id: {"logprob": ..., "rank": ...}}.
    """
    try:
        own = float(row[str(token)]["logprob"])
        entries = [(entry.get("rank"), int(number), float(entry["logprob"])) for number, entry in row.items()]
        ranked = sorted(entry for entry in entries if entry[0] is not None)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"prompt_logprobs of token {token} must hold its logprob and rank, got {row!r:.200}") from None
    likeliest = [(number, value) for rank, number, value in ranked if rank <= top][:top]
    if len(likeliest) < top:
        raise ValueError(f"prompt_logprobs of token {token} must hold the {top} likeliest, got {len(likeliest)}")
    return own, likeliest


def _compare(token_ids: Sequence[int], rows: Sequence[Any], chat: ChatTemplate, url: str) -> None:
    wrong = []
    for token, row in zip(token_ids, rows, strict=True):
        ours, theirs = chat.decode([token]), _value_at(row, str(token)).get("decoded_token")
        if theirs is not None and theirs != ours and UNKNOWN not in ours + theirs:
            wrong.append(f"{token} is {ours!r} and {theirs!r}")
    if wrong:
        raise ValueError(
            f"teacher {url} has another vocabulary than the student: of {len(token_ids)} compared tokens {len(wrong)} "
            f"differ: {', '.join(wrong[:SHOWN])}. Fix: a teacher with the student's tokenizer"
        )


@asynccontextmanager
async def endpoint_of(
    config: TeacherConfig,
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    note: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Endpoint]:
    """Opens connections to a server. note: is told when it fails, and when it answers again."""
    key = os.environ.get(config.key_variable, "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # Whoever asks has a deadline. One of the session's own, at the same moment, would hide it from the loop that asks.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        yield Endpoint(config, session, sleep, note)
