"""The routes of requests are read from the slots of their tokens, once, in order, and before the slots are taken."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.replica.config import ReplicaConfig
from engine.replica.replica import Replica
from engine.replica.routes.slots import RouteReader, RouteSlots
from engine.routes import absent, route_dtype

BLOCK = 4


def slots_of(blocks, positions):
    return np.array([blocks[at // BLOCK] * BLOCK + at % BLOCK for at in positions])


def slots(experts=8):
    return RouteSlots(blocks=6, block_size=BLOCK, layers=2, per_token=2, experts=experts)


def route(tag, positions):
    return np.array([[tag, at % 8] for at in positions])


def step(kept, tag, blocks, positions):
    """A forward pass: each layer tells its choice."""
    for layer in range(2):
        kept.write(layer, slots_of(blocks, positions), route(tag + layer, positions))


def test_a_cached_prefix_has_the_routes_of_the_request_that_computed_it():
    kept = slots()
    reader = RouteReader(kept)
    reader.begin("first", 0)
    step(kept, 1, [3, 1], range(6))
    reader.read("first", [3, 1], 6)
    reader.begin("second", 0)
    step(kept, 3, [3, 5], range(4, 6))  # shares block 3
    reader.read("second", [3, 5], 5)
    reader.read("second", [3, 5], 5)
    assert reader.release("first")[:, 0, 0].tolist() == [1] * 6
    assert reader.release("second")[:, :, 0].tolist() == [[1, 2]] * 4 + [[3, 4]]
    assert reader.release("second") is None


def test_what_was_read_before_a_preemption_stays_and_the_rest_follows():
    kept = slots()
    reader = RouteReader(kept)
    reader.begin("a", 2)
    step(kept, 1, [0], range(4))
    reader.read("a", [0], 3)
    step(kept, 5, [4, 2], range(6))  # computed again elsewhere, with other weights
    reader.read("a", [4], 1)  # less than before is computed again so far
    reader.read("a", [4, 2], 5)
    assert reader.release("a")[:, 0].tolist() == [[1, 2], [5, 3], [5, 4]]
    reader.forget("a")
    reader.forget("a")
    assert "a" not in reader


def test_padding_and_slots_that_nobody_wrote_have_no_route():
    kept = slots(experts=300)
    kept.write(0, np.array([0, -1, -1]), np.array([[299, 2], [7, 7], [7, 7]]))
    kept.write(1, np.array([0, -1, -1]), np.array([[298, 1], [7, 7], [7, 7]]))
    found = kept.read([0, 5], 0, 8)
    assert found.dtype == np.uint16
    assert found[0].tolist() == [[299, 2], [298, 1]]
    assert (found[1:] == absent(found.dtype)).all()


@pytest.mark.parametrize(("experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16)])
def test_no_expert_is_the_mark_of_a_position_without_a_route(experts, dtype):
    assert route_dtype(experts) == dtype
    assert absent(route_dtype(experts)) >= experts


def test_of_what_a_gpu_reports_the_rows_of_dense_layers_are_left_out():
    """vLLM's rows are those of all decoder layers, and bytes also for 256 experts. A stand-in: it was not run."""
    replica = Replica(ReplicaConfig(checkpoint="nowhere", returns_routes=True), 0, None, lambda *_: None)
    replica._route_rows, replica._route_dtype = [1, 2], route_dtype(256)
    rows = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    routes = replica._routes_of(SimpleNamespace(routed_experts=rows))
    assert routes.ids_PXE.dtype == np.uint16
    np.testing.assert_array_equal(routes.ids_PXE, rows[:, 1:])
    assert replica._routes_of(SimpleNamespace(routed_experts=None)) is None


def test_an_engine_of_several_processes_on_the_cpu_cannot_report_routes():
    with pytest.raises(ValueError, match=r"tensor_parallel must be 1 with returns_routes .* on the CPU, got 2"):
        ReplicaConfig(checkpoint="x", returns_routes=True, tensor_parallel=2)
    gpus = ReplicaConfig(checkpoint="x", returns_routes=True, tensor_parallel=2, devices=(0, 1))
    assert gpus.arguments(0)["enable_return_routed_experts"] is True
