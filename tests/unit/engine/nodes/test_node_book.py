"""Which node made what: metrics by name, and spans on the timeline."""

from engine.nodes.ledger import Key, Member
from engine.nodes.node_book import NODES, NodeBook
from engine.telemetry.timeline import Timeline
from tests.support.fakes import Clock


def a_member(name, **fields):
    return Member(session=name.encode(), name=name, capacity_tokens=100, **fields)


def spans(timeline):
    return list(timeline.drain().spans)


def test_groups_count_for_the_node_that_made_them_once():
    timeline = Timeline(Clock(tick=1.0))
    book = NodeBook(timeline)
    book.granted(Key(0, 0), "one")
    book.granted(Key(1, 0), "two")
    book.granted(Key(0, 0), "two")
    book.made(Key(0, 0))
    book.made(Key(1, 0))
    book.made(Key(2, 0))  # by the lead's own replicas
    book.given_up(Key(0, 0))
    nodes = [a_member("one", version=2, free_tokens=25), a_member("two", version=3, free_tokens=100)]
    assert book.metrics(nodes, version=3) == {
        "nodes/live": 2,
        "nodes/one/groups": 0,
        "nodes/one/lag": 1,
        "nodes/one/kv_free": 0.25,
        "nodes/two/groups": 2,
        "nodes/two/lag": 0,
        "nodes/two/kv_free": 1.0,
    }
    assert book.metrics(nodes, version=3)["nodes/two/groups"] == 0
    assert [(span.name, span.args["end"]) for span in spans(timeline)] == [
        ("one", "granted to another"),
        ("two", "made"),
        ("two", "made"),
    ]
    assert len(timeline.lanes["nodes"]._free) == timeline.lanes["nodes"]._next


def test_of_a_thousand_nodes_only_so_many_have_metrics_of_their_own():
    found = NodeBook(Timeline(Clock())).metrics([a_member(f"node{number}") for number in range(1000)], version=0)
    assert found["nodes/live"] == 1000
    assert sum(name.endswith("/lag") for name in found) == NODES
