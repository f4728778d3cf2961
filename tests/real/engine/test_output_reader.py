"""What an engine sends, from its socket to vLLM's queue and to the callers of vLLM's calls."""

import asyncio
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio

from engine.replica.config import prepare_environment

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the import of vLLM


class Client:
    """The parts of vLLM's AsyncMPClient that read. The engine is a socket."""

    def __init__(self, path):
        prepare_environment()
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.engine.core_client import BackgroundResources
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        context, self.engines = zmq.asyncio.Context(), zmq.Context()
        self.resources = BackgroundResources(context)
        self.resources.output_socket = context.socket(zmq.PULL)
        self.resources.output_socket.bind(path)
        self.outputs_queue = asyncio.Queue()
        self.utility_results = {}
        self.delivered = []
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.engine = self.engines.socket(zmq.PUSH)
        self.engine.connect(path)
        self._encoder = MsgpackEncoder()

    def send(self, **fields):
        from vllm.v1.engine import EngineCoreOutputs

        self.engine.send_multipart(self._encoder.encode(EngineCoreOutputs(**fields)))

    def deliver(self, outputs):
        """As `TokenStreams.deliver`: the requests "ours" are ours."""
        self.delivered += [output for output in outputs if output.request_id == "ours"]
        return [output for output in outputs if output.request_id != "ours"]

    async def next(self):
        async with asyncio.timeout(10):
            return await self.outputs_queue.get()


@pytest.fixture
async def client(tmp_path):
    made = Client(f"ipc://{tmp_path}/engine")
    from engine.replica.output_reader import read_directly

    read_directly(made, made.deliver)
    yield made
    made.resources()
    await asyncio.sleep(0)
    made.engines.destroy(0)
    made.resources.ctx.destroy(0)


def outputs(*tokens, request="a"):
    from vllm.v1.engine import EngineCoreOutput

    return [EngineCoreOutput(request, [token]) for token in tokens]


async def test_messages_that_come_before_and_while_it_reads_come_in_order(client):
    client.send(outputs=outputs(1))
    client._ensure_output_queue_task()
    assert (await client.next()).outputs[0].new_token_ids == [1]
    for token in range(2, 40):
        client.send(outputs=outputs(token))
    for token in range(2, 40):
        assert (await client.next()).outputs[0].new_token_ids == [token]
    client.send(outputs=outputs(40))  # after a rest
    assert (await client.next()).outputs[0].new_token_ids == [40]


async def test_our_requests_outputs_are_delivered_and_do_not_reach_vllms_queue(client):
    client._ensure_output_queue_task()
    client.send(outputs=outputs(1, 2, request="ours"))
    client.send(outputs=outputs(3, request="ours") + outputs(4))
    assert [output.new_token_ids for output in (await client.next()).outputs] == [[4]]
    assert [output.new_token_ids for output in client.delivered] == [[1], [2], [3]]


async def test_the_answer_to_a_call_reaches_its_caller_and_an_empty_message_nobody(client):
    from vllm.v1.engine import UtilityOutput
    from vllm.v1.serial_utils import UtilityResult

    client._ensure_output_queue_task()
    caller = client.utility_results[7] = asyncio.get_running_loop().create_future()
    client.send()
    client.send(utility_output=UtilityOutput(7, result=UtilityResult("done")))
    async with asyncio.timeout(10):
        assert await caller == "done"
    assert client.outputs_queue.empty()


async def test_an_engine_that_says_it_is_dead_is_an_error_in_the_queue(client):
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.exceptions import EngineDeadError

    client._ensure_output_queue_task()
    client.engine.send(EngineCoreProc.ENGINE_CORE_DEAD)
    assert isinstance(await client.next(), EngineDeadError)
    assert client.resources.engine_dead


async def test_a_client_that_is_shut_down_tells_those_who_wait(client):
    from vllm.v1.engine.exceptions import EngineDeadError

    client.resources.engine_manager = SimpleNamespace(shutdown=lambda **_: None)
    client._ensure_output_queue_task()
    await asyncio.sleep(0)
    client.resources()
    assert isinstance(await client.next(), EngineDeadError)
    assert client.resources.output_queue_task.cancelled()
