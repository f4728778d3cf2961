"""The outputs of our requests, from an engine's front end to their readers; vLLM's own requests are left to it."""

import asyncio
from types import SimpleNamespace

import pytest

from engine.replica.config import prepare_environment
from engine.replica.output_bundler import AT_ONCE, BUNDLE_SIZE, DELIVER_AT

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the import of vLLM
OURS = {DELIVER_AT: [], BUNDLE_SIZE: 4}


def request(name, extra=OURS):
    """Returns what looks like vLLM's EngineCoreRequest, which has a name of its own beside the caller's."""
    parameters = SimpleNamespace(extra_args=extra)
    return SimpleNamespace(request_id=f"{name}-7f", external_req_id=name, sampling_params=parameters)


@pytest.fixture
def streams():
    prepare_environment()
    from vllm.v1.engine.output_processor import OutputProcessor

    from engine.replica.token_streams import TokenStreams

    return TokenStreams(OutputProcessor(None, log_stats=True))


def output(name, tokens, finish=None):
    from vllm.v1.engine import EngineCoreOutput

    return EngineCoreOutput(f"{name}-7f", tokens, finish_reason=finish)


def ended():
    from vllm.v1.engine import FinishReason

    return FinishReason.STOP


async def test_outputs_come_in_order_also_those_that_came_before_their_reader(streams):
    streams.add_request(request("a"))
    assert streams.deliver([output("a", [1, 2]), output("b", [9])]) == [output("b", [9])], "vLLM's own are not ours"
    stream = streams.stream("a")
    assert (await stream.next()).new_token_ids == [1, 2]
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    streams.deliver([output("a", [3], ended())])
    assert (await waiting).new_token_ids == [3]
    assert streams.sampled() == {"a": 3}
    assert streams.close("a") is None, "it has ended: nothing is to be aborted"
    assert streams.sampled() == {}


async def test_an_abort_comes_after_what_was_there_and_only_once(streams):
    streams.add_request(request("a"))
    streams.deliver([output("a", [1])])
    assert streams.abort_requests(["a"], internal=False) == ["a-7f"]
    assert streams.abort_requests(["a"], internal=False) == []
    streams.deliver([output("a", [2])])  # on its way when it was aborted
    stream = streams.stream("a")
    first, last = await stream.next(), await stream.next()
    assert (first.new_token_ids, last.new_token_ids, str(last.finish_reason)) == ([1], [], "abort")
    assert streams.close("a") is None


async def test_a_reader_that_leaves_early_aborts_its_request(streams):
    streams.add_request(request("a"))
    running = streams.close("a")
    assert streams.abort_requests([running], internal=True) == ["a-7f"]
    assert streams.close("a") is None


async def test_an_engine_that_fails_is_told_to_all_readers_and_leaves_nothing_to_abort(streams):
    streams.add_request(request("a"))
    streams.add_request(request("b"))
    stream, other = streams.stream("a"), streams.stream("b")
    waiting = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    streams.deliver([output("b", [1])])
    streams.propagate_error(RuntimeError("it died"))
    assert (await other.next()).new_token_ids == [1], "what came before the failure is not lost"
    for reading in (waiting, other.next()):
        with pytest.raises(RuntimeError, match="it died"):
            await reading
    assert streams.close("a") is None
    assert streams.close("b") is None


async def test_of_many_outputs_that_come_together_some_wait_so_that_the_loop_is_not_held_up(streams):
    names = [f"r{number}" for number in range(2 * AT_ONCE + 1)]
    for name in names:
        streams.add_request(request(name))
    streams.deliver([output(name, [1]) for name in names])
    delivered = []
    while streams.delivering:
        await asyncio.sleep(0)
        delivered.append(sum(streams.sampled().values()))
    assert delivered == [AT_ONCE, 2 * AT_ONCE, 2 * AT_ONCE + 1]
