"""A grammar that takes too long ends its request, and not the engine."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from engine.replica.config import prepare_environment

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the import of vLLM


def request_of(grammar):
    return SimpleNamespace(structured_output_request=SimpleNamespace(grammar=grammar))


def test_a_grammar_that_is_late_is_an_error_and_its_result_is_dropped():
    prepare_environment()
    from engine.replica.grammars import _within

    release = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        late = _within(0.005, thread, release.wait)
        with pytest.raises(TimeoutError, match="smaller schema"):
            late.result(5)
        release.set()
        assert _within(60.0, thread, lambda: 7).result(5) == 7
        with pytest.raises(ZeroDivisionError):
            _within(60.0, thread, lambda: 1 // 0).result(5)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("[07:34:59] /project/cpp/json.cc:49: minProperties\nis wrong"), "minProperties is wrong"),
        (KeyError(), "KeyError"),
    ],
)
def test_a_reason_is_one_line_without_the_place_in_foreign_sources(error, expected):
    prepare_environment()
    from engine.replica.grammars import REFUSED, reason_of

    assert reason_of(request_of(error)) == REFUSED + expected


def test_a_request_that_ends_for_another_reason_has_none():
    prepare_environment()
    from engine.replica.grammars import reason_of

    assert reason_of(request_of(object())) is None
    assert reason_of(SimpleNamespace(structured_output_request=None)) is None
