"""The parts of the bench of nodes: emulated links, groups that nobody sampled."""

import pytest

from bench.benches.nodes.network import QUEUE_BYTES, _Link
from bench.benches.nodes.parts import SHAPES, a_prompt, records_of
from bench.benches.nodes.sync import Link
from engine.encoding import encode
from engine.nodes.grant_journal import group_of
from engine.run.journal_records import Drawn, decode


def test_packets_leave_a_link_at_its_rate_one_after_the_other():
    link = _Link(rate_bits=8e6)
    assert link.leaves(1_000_000, now=0.0) == pytest.approx(1.0)
    assert link.leaves(500_000, now=0.2) == pytest.approx(1.5)
    assert link.leaves(500_000, now=9.0) == pytest.approx(9.5)


def test_what_comes_to_a_full_queue_is_lost():
    link = _Link(rate_bits=8e6)
    sent = [link.leaves(1 << 20, now=0.0) for _ in range(20)]
    assert [left is None for left in sent] == [False] * (QUEUE_BYTES // (1 << 20) + 1) + [True] * 11


def test_bytes_for_several_nodes_share_the_leads_link():
    link = Link(rate_bits=8e6, round_trip_s=0.5)
    assert link.own_s(1_000_000, nodes=1) == pytest.approx(1.5)
    assert link.own_s(1_000_000, nodes=4) == pytest.approx(4.5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
def test_the_records_of_a_scripted_group_make_a_group_of_that_shape(shape):
    drawn = Drawn(lease=3, attempt=0, position=0, prompt=a_prompt(3))
    records = [decode(encode(record)) for record in records_of(drawn, shape)]
    assert len(records) == shape.records
    group = group_of([drawn, *records])
    assert len(group.trajectories) == shape.rollouts
    assert sum(len(member.token_ids_T) for member in group.trajectories) == shape.group_tokens
    assert {len(member.turns) for member in group.trajectories} == {shape.turns}
