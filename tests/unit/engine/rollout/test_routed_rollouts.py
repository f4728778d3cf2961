"""Routes stay with the tokens that were sampled under them: through turns, moves, a journal, nodes and batches."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.encoding import decoder, encode
from engine.replica.port import Delta
from engine.rollout.token_buffer import TokenBuffer
from engine.routes import Routes, absent
from engine.run.journal import Journal
from engine.run.journal_records import NO_MARK, Piece, after, join_pieces, parts, size
from engine.types import Batch, Segment, Trajectory
from tests.support.fakes import Gate, a_prompt, route_of
from tests.support.node import ANSWER, END, Setup, call
from tests.unit.engine.fleet.test_fleet_moves import WHOLE, Moving, settle
from tests.unit.engine.nodes.test_odd_records import decided, ended, grown, sent

TURNS = ([call("x = 1") + END], [call("x += 1") + END], [ANSWER])


def rows(*tags):
    return Routes.of(np.array([[[tag, tag]] for tag in tags], np.uint8).reshape(-1, 1, 2))


def tags(routes):
    return routes.ids_PXE[:, 0, 0].tolist()


def reporting(replica):
    replica.returns_routes = True


def check_routes(part, replica=0):
    """Each position but the last, which is no input, has the route of its token."""
    assert len(part.routes) == len(part.token_ids_T) - 1
    assert part.routes.ids_PXE[:, 0].tolist() == [route_of(token, replica) for token in part.token_ids_T[:-1].tolist()]


@given(st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 200), max_size=6)), max_size=8))
def test_a_position_keeps_the_first_route_that_came_for_it(pieces):
    buffer, expected = TokenBuffer(range(20)), {}
    for start, piece in pieces:
        buffer.append_routes(rows(*piece), start)
        if piece and start + len(piece) > max(expected, default=-1) + 1:
            for at in range(max(expected, default=-1) + 1, start):
                expected[at] = 255
        for at, tag in enumerate(piece, start):
            if at not in expected:
                expected[at] = tag
    assert (tags(buffer.routes) if buffer.routes else []) == [expected[at] for at in range(len(expected))]
    assert buffer.routed == len(expected)


def test_a_delta_that_is_cut_off_has_the_routes_of_what_is_left():
    delta = Delta([7, 8, 9], [-1.0] * 3, routes=rows(1, 2, 3, 4), routes_from=10)
    assert tags(delta.up_to(1).routes) == [1, 2]
    assert tags(delta.up_to(3).routes) == [1, 2, 3, 4]


async def test_a_trajectory_of_several_turns_has_the_routes_of_all_its_inputs():
    async with Setup(*TURNS, prepare=reporting) as node:
        trajectory = await node.run()
        starts = [sampling.routes_from for _, sampling, _ in node.replicas.made[0].requests]
    check_routes(trajectory)
    assert starts == [0, *(turn.end - 1 for turn in trajectory.turns[:2])], "no turn asks for routes that are there"


async def test_replicas_that_report_none_make_trajectories_without():
    async with Setup(*TURNS) as node:
        assert (await node.run()).routes is None


async def test_a_turn_that_moves_keeps_the_routes_of_the_replica_that_sampled_its_tokens():
    async with Moving(prepare=reporting) as run:
        buffer, counts = TokenBuffer([2, 3]), []
        take = run.take

        def taking(delta):
            buffer.append_sampled(delta[1])
            counts.append((delta[0], len(buffer)))
            take(delta)

        run.take = taking
        await run.until(3)
        run.move(1)
        await settle()
        await run.rest()
    ids = [2, 3, *WHOLE]
    assert list(buffer.ids) == ids
    moved = max(size for replica, size in counts if replica == 0)  # tokens when the first replica's last delta came
    expected = [route_of(token, 0 if at < moved - 1 else 1) for at, token in enumerate(ids[:-1])]
    assert buffer.routes.ids_PXE[:, 0].tolist() == expected


async def test_a_run_that_was_killed_goes_on_with_the_routes_that_it_had(tmp_path):
    gate = Gate()
    node = Setup(*TURNS[:2], ["<answer>", gate, f"42</answer>{END}"], prepare=reporting)
    async with node, asyncio.TaskGroup() as group:
        log = Journal(tmp_path).log(0, 0, 0)
        running = group.create_task(node.rollouts.run(a_prompt(), 0, 0, log=log))
        await gate.started.wait()
        running.cancel()

    def another(replica):
        replica.returns_routes, replica.index = True, 5

    async with Setup(*TURNS, prepare=another) as node:
        log = Journal(tmp_path).log(0, 0, 0)
        resumed = await node.rollouts.run(a_prompt(), 0, 0, log=log)
        log.end(replace(resumed, reward=1.0), 9)
        [(_, sampling, _)] = node.replicas.made[0].requests
    known = resumed.turns[1].end - 1
    assert sampling.routes_from == known
    expected = [route_of(token, 0 if at < known else 5) for at, token in enumerate(resumed.token_ids_T[:-1].tolist())]
    assert resumed.routes.ids_PXE[:, 0].tolist() == expected
    read = Journal(tmp_path).log(0, 0, 0).finished
    np.testing.assert_array_equal(read.routes.octets, resumed.routes.octets)


async def test_the_routes_of_a_trajectory_come_apart_and_together_turn_by_turn():
    async with Setup(*TURNS, prepare=reporting) as node:
        whole = await node.run()
    mark, pieces = NO_MARK, []
    for end in [turn.end for turn in whole.turns]:
        so_far = replace(
            whole,
            **{name: getattr(whole, name)[:end] for name in ("token_ids_T", "sampled_T", "logprobs_T", "versions_T")},
            routes=whole.routes.up_to(end - 1),
        )
        pieces.append(Piece(**parts(after(so_far, mark))))
        mark = size(so_far)
    np.testing.assert_array_equal(join_pieces(pieces).routes.octets, whole.routes.octets)
    again = decoder(Trajectory).decode(encode(whole))
    check_routes(again)


def test_a_step_that_is_forgotten_takes_its_routes_with_it(tmp_path):
    async def run():
        journal = Journal(tmp_path)
        async with Setup(*TURNS, prepare=reporting) as node:
            for lease in range(2):
                journal.draw(lease, 0, iter([a_prompt()]))
                log = journal.log(lease, 0, 0)
                log.end(await node.rollouts.run(a_prompt(), 0, lease, log=log), 1)
        return journal

    journal = asyncio.run(run())
    journal.sync(journal.floor(1))
    journal.forget(1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drawn-000001", "step-000001"]
    assert Journal(tmp_path, first_step=1).log(1, 0, 0).finished.routes is not None


def test_a_nodes_group_reaches_the_lead_with_its_routes(tmp_path):
    routes = rows(4, 5)
    turns = grown(routes=routes.up_to(1)), ended(routes=routes.from_position(1))
    group, _, _ = sent(tmp_path, *turns, ended(1), decided(0, 1))
    assert tags(group.trajectories[0].routes) == [4, 5]
    assert group.trajectories[1].routes is None


@pytest.mark.parametrize(
    "records",
    [
        [ended(routes=rows(1, 2))],
        [grown(routes=rows(1)), ended(routes=rows(2, 3))],
        [grown(routes=rows(1)), ended(routes=Routes.of(np.zeros((1, 2, 2), np.uint8)))],
        [grown(routes=rows(1)), grown(routes=Routes.of(np.zeros((1, 1, 2), np.uint16)))],
    ],
)
def test_routes_that_cannot_be_of_their_tokens_end_the_session_of_their_node(tmp_path, records):
    group, notes, _ = sent(tmp_path, *records)
    assert group is None
    assert "route" in notes[-1]


async def test_a_batch_has_the_routes_of_its_tokens_and_marks_those_without():
    async with Setup(*TURNS, prepare=reporting) as node:
        routed = await node.run()
    other = replace(routed, routes=None, segments=(_segment(routed),))
    batch = Batch.of(0, [routed, other], np.ones(2, np.float32))
    tokens, none = len(routed.token_ids_T), absent(np.dtype(np.uint8))
    assert batch.routes_NXE.shape == (3 * tokens, 1, 2)
    np.testing.assert_array_equal(batch.routes_NXE[: tokens - 1], routed.routes.ids_PXE)
    assert (batch.routes_NXE[tokens - 1 : 2 * tokens] == none).all()
    np.testing.assert_array_equal(batch.routes_NXE[2 * tokens : 2 * tokens + 5], routed.routes.ids_PXE[:5])
    assert (batch.routes_NXE[2 * tokens + 5 :] == none).all()
    assert batch.arrays()["routes_NXE"].dtype == np.uint8
    assert Batch.of(0, [other.without_routes()], np.ones(1, np.float32)).routes_NXE is None
    wide = replace(routed, routes=Routes.of(routed.routes.ids_PXE.astype(np.uint16)))
    with pytest.raises(ValueError, match="several shapes"):
        Batch.of(0, [routed, wide], np.ones(2, np.float32))


def _segment(trajectory):
    names = ("token_ids_T", "sampled_T", "logprobs_T", "versions_T")
    arrays = {name: getattr(trajectory, name) for name in names}
    return Segment(**arrays, routes=trajectory.routes.up_to(5))
