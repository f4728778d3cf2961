"""Compiles the grammars of requests in the engine's own process: an adapter to an interface of vLLM that may change.

vLLM compiles grammars only where it has loaded a tokenizer, and begins each of them anew. Here the tokenizer is loaded
when the first grammar comes, so that an engine without any pays nothing, and a request that goes on from another
replica goes on in the middle of its grammar.

Invariants
- Compiling never stops the engine: it runs in a thread, and the request waits in vLLM's queue for grammars, at most
  COMPILE_S. What takes longer goes on in its thread, so that the next grammar may be late too.
- Whatever is wrong with a grammar, or with the tokenizer, ends that request alone, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Timer
from typing import Any

from vllm.sampling_params import StructuredOutputsParams, check_json_nesting
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.request import StructuredOutputRequest

REFUSED = "grammar refused: "
"""How the stop reason of a request begins that was ended for its grammar."""
_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")  # of a message in xgrammar's own sources
MOST_CHARS = 500  # of a reason
COMPILE_S = 60.0  # of waiting for a grammar, the load of the tokenizer included


class Grammars:
    """The grammars of one engine. manager: vLLM's StructuredOutputManager, which holds the masks."""

    def __init__(self, manager: Any, config: Any) -> None:
        self._manager = manager
        self._config = config
        self._backend: Any = None
        self._thread: ThreadPoolExecutor | None = None

    def add(self, request: Any, grammar: str, tokens: int) -> None:
        """Makes a new request wait for its grammar, which goes on after the last `tokens` tokens of the prompt."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "grammar")
        so_far = list(request.prompt_token_ids[len(request.prompt_token_ids) - tokens :])
        stops = list(request.sampling_params.all_stop_token_ids)
        waiting = StructuredOutputRequest(params=StructuredOutputsParams(structural_tag=grammar))
        waiting.grammar = _within(COMPILE_S, self._thread, partial(self._compiled, grammar, so_far, stops))
        request.structured_output_request = waiting
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR

    def _compiled(self, grammar: str, so_far: list[int], stops: Sequence[int]) -> Any:
        try:
            backend = self._ready()
        except Exception as error:
            raise ValueError(f"the engine has no grammars for this model: {error}") from error
        check_json_nesting(grammar, structural_tag=True)
        compiled = backend.compile_grammar(StructuredOutputOptions.STRUCTURAL_TAG, grammar, stop_token_ids=stops)
        if so_far and not compiled.accept_tokens("moved", so_far):
            raise RuntimeError("the tokens that it has sampled so far do not obey it")
        return compiled

    def _ready(self) -> Any:
        if self._backend is None:
            from transformers import AutoTokenizer
            from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

            model = self._config.model_config
            tokenizer = AutoTokenizer.from_pretrained(model.tokenizer, trust_remote_code=False)
            vocabulary = model.get_vocab_size()
            if len(tokenizer) < vocabulary // 2:  # transformers makes up an empty one where there are no files
                raise ValueError(f"its tokenizer has {len(tokenizer)} tokens and the model {vocabulary}")
            self._backend = XgrammarBackend(self._config, tokenizer=tokenizer, vocab_size=vocabulary)
            self._manager.backend = self._backend
        return self._backend


def _within(seconds: float, thread: ThreadPoolExecutor, work: Callable[[], Any]) -> Future[Any]:
    """Returns the result of `work` in a thread, or a TimeoutError if there is none after so many seconds."""
    found: Future[Any] = Future()
    late = TimeoutError(f"it is not compiled within {seconds:g} s. Fix: a smaller schema, or fewer tools")
    timer = Timer(seconds, partial(_settle, found.set_exception, late))
    timer.daemon = True
    timer.start()

    def run() -> None:
        try:
            settle = partial(_settle, found.set_result, work())
        except Exception as error:
            settle = partial(_settle, found.set_exception, error)
        timer.cancel()
        settle()

    thread.submit(run)
    return found


def _settle(settle: Callable[[Any], None], value: Any) -> None:
    with suppress(InvalidStateError):  # the other one was first
        settle(value)


def reason_of(request: Any) -> str | None:
    """Returns the stop reason of a request whose grammar was refused; None if that is not why it ends."""
    waiting = request.structured_output_request
    if waiting is None or not isinstance(waiting.grammar, Exception):
        return None
    reason = _PLACE.sub("", str(waiting.grammar) or type(waiting.grammar).__name__)
    return REFUSED + " ".join(reason.split())[:MOST_CHARS]
