"""Asks a judge behind an OpenAI-compatible server, within bounds on requests and tokens.

Invariants
- Each request has a deadline. After connection errors, HTTP 408, 409, 429 and 5xx, and answers that cannot be read, the
  question is asked again a bounded number of times, with growing waits. If it then has no answer, GraderUnavailable is
  raised; there is never a made-up grade.
- No more than `max_requests` are ever sent. Tokens are known only afterwards: what is in flight when `max_total_tokens`
  are spent is still paid for.
- The same question is paid for once, even if it is asked twice at the same time, and with a file of answers also if the
  run is resumed.
- The key is read from the environment only: it is in no configuration, no message and no file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakValueDictionary

import msgspec

from engine.atomic_files import append, writing
from engine.ports import GraderUnavailable
from sandbox.require import at_least, none_or, positive, require, require_fields

Answer = TypeVar("Answer")
Messages = Sequence[Mapping[str, str]]

LONGEST_WAIT_S = 30.0  # bounds the wait between two tries, whatever a server asks for
RETRIED = (408, 409, 429)


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeConfig:
    """A judge's server, and the bounds on what it is asked."""

    url: str
    """URL of the API, usually with /v1 at the end."""
    model: str
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; a server without keys needs none."""
    temperature: float = 0.0
    max_tokens: int = 512
    """Tokens of one answer; an answer that is cut off there counts as unreadable."""
    request_s: float = 20.0
    """Seconds of one request. The deadline of a grade (`GroupConfig.grade_deadline_s`) covers all tries together."""
    tries: int = 4
    """Requests for one answer."""
    backoff_s: float = 0.5
    """Seconds before the second try, doubled with each further one, unless the server names a time."""
    in_flight: int = 16
    """Requests at once; the others wait."""
    max_requests: int | None = None
    """Requests of the run. Once they are spent, each grade is GraderUnavailable: a monitor then gives no scores, and a
    reward leaves nothing to train, which ends the run with this as the reason."""
    max_total_tokens: int | None = None
    """Tokens of the run, prompts and answers together."""
    cached: int = 100_000
    """Answers that are kept; the oldest ones make room."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "request_s", "tries", "in_flight", "max_requests", "max_total_tokens", "cached"):
            value = getattr(self, name)
            require(name, value, none_or(positive))
        require_fields(self, at_least(0), "temperature", "backoff_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged(Generic[Answer]):
    """What the judge answered, as it was read, and the tokens that this call paid for."""

    value: Answer
    tokens: int


class _Paid(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file of answers: a request that is sent, or the answer to one.

    text: None if there is no answer that can be used again.
    """

    key: str
    requests: int = 0
    text: str | None = None
    tokens: int = 0


class _TryAgain(Exception):
    """There was no answer, but there may be one later."""

    def __init__(self, cause: str, after_s: float | None = None) -> None:
        super().__init__(cause)
        self.after_s = after_s


class JudgeEndpoint:
    """`async with judge_endpoint(config) as endpoint`. counts: requests, tokens, cached, retries, unreadable."""

    def __init__(
        self,
        config: JudgeConfig,
        client: Any,
        key: str,
        sleep: Callable[[float], Awaitable[None]],
        path: Path | None = None,
        file: int | None = None,
    ) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self._client, self._key, self._sleep = client, key, sleep
        self._path, self._file = path, file
        self._places = asyncio.Semaphore(config.in_flight)
        self._answers: dict[str, str] = {}
        self._asked: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def ask(self, messages: Messages, read: Callable[[str], Answer]) -> Judged[Answer]:
        """Asks a question until it has an answer that `read` accepts. Raises GraderUnavailable.

        read: reads the answer's text; raises ValueError when it cannot.
        """
        question = [self.config.model, self.config.temperature, self.config.max_tokens, list(messages)]
        key = hashlib.sha256(msgspec.json.encode(question)).hexdigest()
        lock = self._asked.setdefault(key, asyncio.Lock())
        async with lock:  # callers with the same question wait here, and then read the answer
            if (text := self._answers.get(key)) is not None:
                self.counts["cached"] += 1
                return Judged(value=read(text), tokens=0)
            return await self._until_read(key, messages, read)

    async def _until_read(self, key: str, messages: Messages, read: Callable[[str], Answer]) -> Judged[Answer]:
        tokens, cause = 0, ""
        for attempt in range(self.config.tries):
            try:
                text, paid = await self._request(key, messages)
                tokens += paid
                value = read(text)
            except _TryAgain as failure:
                cause = str(failure)
                if attempt + 1 < self.config.tries:
                    self.counts["retries"] += 1
                    wait_s = self.config.backoff_s * 2**attempt if failure.after_s is None else failure.after_s
                    await self._sleep(min(wait_s, LONGEST_WAIT_S))
            except ValueError as failure:
                cause = f"its answer cannot be read: {failure}"
                self.counts["unreadable"] += 1
                self._note(_Paid(key=key, tokens=paid))
            else:
                self._note(_Paid(key=key, text=text, tokens=paid))
                return Judged(value=value, tokens=tokens)
        raise self._unavailable(f"gave no grade in {self.config.tries} requests, the last one since {cause}")

    async def _request(self, key: str, messages: Messages) -> tuple[str, int]:
        """Returns the answer's text and tokens. Raises _TryAgain and GraderUnavailable."""
        import openai

        config = self.config
        async with self._places:
            self._check_budget()
            self._note(_Paid(key=key, requests=1))  # before it is sent, since it may never return
            try:
                async with asyncio.timeout(config.request_s) as budget:
                    completion = await self._client.chat.completions.create(
                        model=config.model,
                        messages=list(messages),
                        temperature=config.temperature,
                        max_tokens=config.max_tokens,
                    )
            except TimeoutError as error:
                if not budget.expired():
                    raise
                raise _TryAgain(f"no answer came within {config.request_s} s") from error
            except openai.APIStatusError as error:
                if error.status_code < 500 and error.status_code not in RETRIED:
                    raise self._unavailable(f"refuses with HTTP {error.status_code}: {error}") from None
                raise _TryAgain(f"it answers with HTTP {error.status_code}", _seconds(error)) from error
            except (openai.APIError, ValueError) as error:  # no connection, or a body that is no JSON of a completion
                raise _TryAgain(f"it fails: {type(error).__name__}") from error
        try:
            tokens = int(completion.usage.total_tokens) if completion.usage is not None else 0
            choice = completion.choices[0]
            text = choice.message.content
        except (AttributeError, IndexError, TypeError, ValueError):
            text = None
        if not isinstance(text, str):
            raise _TryAgain("its answer holds no message")
        return ("" if choice.finish_reason == "length" else text), tokens

    def _check_budget(self) -> None:
        for name, spent in (("max_requests", "requests"), ("max_total_tokens", "tokens")):
            limit = getattr(self.config, name)
            if limit is not None and self.counts[spent] >= limit:
                raise self._unavailable(f"has spent its budget, {name}={limit}. Fix: raise {name}")

    def _unavailable(self, what: str) -> GraderUnavailable:
        message = f"the judge {self.config.model} at {self.config.url} {' '.join(what.split())}"
        return GraderUnavailable(message.replace(self._key, "***") if self._key else message)

    def _note(self, paid: _Paid) -> None:
        """Counts a payment and writes it to the file of answers. Raises CannotWrite."""
        self._take(paid)
        if self._file is not None:
            assert self._path is not None
            with writing(self._path):
                append(self._file, msgspec.json.encode(paid) + b"\n")

    def _take(self, paid: _Paid) -> None:
        self.counts["requests"] += paid.requests
        self.counts["tokens"] += paid.tokens
        if paid.text is not None:
            self._answers[paid.key] = paid.text
            if len(self._answers) > self.config.cached:
                del self._answers[next(iter(self._answers))]

    def _resume(self, file: int) -> None:
        """Reads the file of answers of an earlier run; an incomplete line at its end is cut off."""
        size, whole = os.fstat(file).st_size, 0
        for line in os.pread(file, size, 0).splitlines(keepends=True):
            try:
                paid = msgspec.json.decode(line, type=_Paid)
            except msgspec.DecodeError:
                break
            if not line.endswith(b"\n"):
                break
            self._take(paid)
            whole += len(line)
        if whole < size:
            os.ftruncate(file, whole)


@asynccontextmanager
async def judge_endpoint(
    config: JudgeConfig, answers: Path | None = None, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> AsyncIterator[JudgeEndpoint]:
    """Connects to a judge.

    answers: a file, in the run's folder for instance, that keeps what was answered and paid for. What a killed run
    wrote there is used again and counts towards the budget.

    Raises CannotWrite.
    """
    from openai import AsyncOpenAI

    key = os.environ.get(config.key_variable, "")
    async with AsyncOpenAI(base_url=config.url, api_key=key or "none", max_retries=0) as client:
        if answers is None:
            yield JudgeEndpoint(config, client, key, sleep)
            return
        with writing(answers):
            file = os.open(answers, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            endpoint = JudgeEndpoint(config, client, key, sleep, answers, file)
            with writing(answers):
                endpoint._resume(file)
            yield endpoint
        finally:
            os.close(file)


def _seconds(error: Any) -> float | None:
    """Returns the seconds after which the server asks to come back; None if it does not."""
    try:
        return max(0.0, float(error.response.headers["retry-after"]))
    except (KeyError, ValueError):
        return None
