"""What a node with a key sends of a group: records of any shape, which the lead takes or answers with a fence."""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import encoding
from engine.nodes.config import LeadConfig
from engine.nodes.lead import Lead
from engine.nodes.messages import Build, Grant, Hello, Job, NodeBeat, Numbered, Record, decode_order, encode
from engine.run.journal import Journal
from engine.run.journal_records import Began, Decided, Ended, Grown, Piece, parts
from engine.telemetry.timeline import Timeline
from engine.types import Segment, StopReason, TokenScores, Trajectory, Turn
from tests.support.examples import examples
from tests.support.fakes import a_prompt
from tests.support.paths import ROOT

SESSION = b"session"
BUILD = Build(protocol=2, code="code", versions={})
PROMPT = a_prompt()


def piece(tokens=1, **fields):
    return Piece(
        **{
            "token_ids_T": np.ones(tokens, np.int32),
            "sampled_T": np.ones(tokens, np.bool_),
            "logprobs_T": np.zeros(tokens, np.float32),
            "versions_T": np.zeros(tokens, np.int32),
            "turns": (),
            "text": "",
            **fields,
        }
    )


def trajectory(sample=0, **fields):
    whole = piece()
    return Trajectory(
        prompt=PROMPT,
        sample=sample,
        seed=1,
        temperature=1.0,
        stop=StopReason.ANSWER,
        started_at=0.0,
        finished_at=1.0,
        **{**parts(whole), "reward": 1.0, **fields},
    )


def turn(start, end):
    return Turn(
        start=start, end=end, tool_uses=(), replica=0, cached_tokens=0, queued_at=0.0, started_at=0.0, finished_at=0.0
    )


def grown(sample=0, **fields):
    return Grown(lease=0, attempt=0, sample=sample, piece=piece(**fields), tokens=1)


def ended(sample=0, of=None, **fields):
    of = sample if of is None else of
    return Ended(lease=0, attempt=0, sample=sample, trajectory=trajectory(of, **fields), tokens=1)


def decided(*members):
    return Decided(lease=0, attempt=0, members=members, drop=None, waste={})


class Door:
    """Keeps what is sent."""

    job = Job(build=BUILD, recipe="", options=[], files=[])
    files = SimpleNamespace()
    sent: list

    def __init__(self):
        self.sent = []

    def attach(self, receiver, failed, taken):
        self.receiver = receiver

    def post(self, address, message):
        self.sent.append(message)


async def made_of(folder, records):
    """The group that a lead makes of what a node sends, or None; the notes; and what a resumed run reads."""
    notes = []
    config = LeadConfig(
        listen="tcp://127.0.0.1:5700", keys=None, recipe=ROOT / "recipes/quickstart.py", options=(), nodes_only=True
    )
    door, journal = Door(), Journal(folder)
    lead = Lead(
        config,
        door,
        folder=folder,
        journal=journal,
        group_tokens=100,
        min_version=lambda lease: -1,
        kv_tokens=lambda: (0, 0),
        version=lambda: 0,
        rolling=False,
        timeline=Timeline(),
        note=notes.append,
    )
    async with lead, asyncio.TaskGroup() as tasks:
        group = tasks.create_task(lead.make_group(PROMPT, 0, 0))
        await asyncio.sleep(0)
        door.receiver(b"0", Hello(session=SESSION, name="one", build=BUILD, capacity_tokens=1000, replicas=1))
        door.receiver(b"0", NodeBeat(session=SESSION, ack=0, version=0, pulled=0, free_tokens=1000, tokens=0))
        [grant] = [
            order
            for message in door.sent
            if isinstance(message, Numbered) and isinstance(order := decode_order(message.body), Grant)
        ]
        for seq, record in enumerate(records, 1):
            data = record if isinstance(record, bytes) else encoding.encode(record)
            body = encode(Record(lease=0, attempt=0, epoch=grant.epoch, record=data))
            door.receiver(b"0", Numbered(session=SESSION, seq=seq, ack=0, body=body))
        for _ in range(3):
            await asyncio.sleep(0)
        found = group.result() if group.done() else None
        group.cancel()
    journal.close()
    return found, notes, Journal(folder).decided(0, 0) if found is None else None


def sent(folder, *records):
    return asyncio.run(made_of(folder, records))


def test_a_group_is_made_of_members_that_have_ended(tmp_path):
    group, notes, _ = sent(tmp_path, grown(), ended(), ended(1), decided(0, 1))
    assert [len(member.token_ids_T) for member in group.trajectories] == [2, 1]
    assert len(notes) == 1


ODD = [
    [decided(0)],
    [ended(), decided(0, 7)],
    [ended(), decided(0, 0)],
    [grown(), decided(0)],
    [ended(), Began(lease=0, attempt=0, sample=0, discarded=0, tokens=0), decided(0)],
    [grown(sampled_T=np.ones(3, np.bool_))],
    [grown(token_ids_T=np.full(1, -1, np.int32))],
    [grown(logprobs_T=np.full(1, np.nan, np.float32))],
    [ended(logprobs_T=np.full(1, 0.5, np.float32))],
    [grown(-1)],
    [grown(2**63)],
    [grown(turns=(turn(0, 2**63),))],
    [ended(of=1)],
    [ended(logprobs_T=np.zeros(5, np.float32))],
    [ended(reward=float("nan"))],
    [
        ended(
            segments=(
                Segment(
                    **{name: getattr(piece(), name) for name in ("token_ids_T", "logprobs_T", "versions_T")},
                    sampled_T=np.ones(2, np.bool_),
                ),
            )
        )
    ],
    [grown(), ended(teacher=TokenScores.none(1, 0))],  # the teacher's scores are those of all tokens
    [ended(teacher=TokenScores.none(2, 3))],
    [b"\xff"],
    [msgspec.msgpack.encode(["Decided"])],
]


def test_a_groups_scores_of_a_teacher_come_with_its_tokens(tmp_path):
    scores = TokenScores(logprobs_T=np.float32([np.nan, -0.5]))
    group, _, _ = sent(tmp_path, grown(), ended(teacher=scores), ended(1), decided(0, 1))
    np.testing.assert_array_equal(group.trajectories[0].teacher.logprobs_T, scores.logprobs_T)
    assert group.trajectories[1].teacher is None


@pytest.mark.parametrize("records", ODD)
def test_a_record_that_cannot_be_of_the_group_ends_the_session_of_its_node_and_nothing_else(tmp_path, records):
    group, notes, decided_again = sent(tmp_path, *records)
    assert group is None
    assert "one" in notes[-1]
    assert "1 groups" in notes[-1]
    assert decided_again is None, "a run that is resumed meets it again"


numbers = st.integers(-1, 3) | st.sampled_from([-(2**63), 2**31, 2**63, 2**64 - 1])
pieces = st.builds(
    piece, tokens=st.integers(0, 3), turns=st.lists(st.builds(turn, numbers, numbers), max_size=2).map(tuple)
)
any_records = st.one_of(
    st.builds(Grown, lease=st.just(0), attempt=st.just(0), sample=numbers, piece=pieces, tokens=numbers),
    st.builds(Began, lease=st.just(0), attempt=st.just(0), sample=numbers, discarded=numbers, tokens=numbers),
    st.builds(ended, numbers, numbers | st.none(), reward=st.floats() | st.none()),
    st.builds(
        Decided,
        lease=st.just(0),
        attempt=st.just(0),
        members=st.lists(numbers, max_size=3).map(tuple),
        drop=st.none() | st.text(max_size=3),
        waste=st.dictionaries(st.text(max_size=3), numbers, max_size=2),
    ),
)


@examples(60, search=600)
@given(st.lists(any_records, max_size=6))
def test_whatever_records_a_node_sends_the_lead_goes_on(tmp_path_factory, records):
    """What raises in the lead ends it, and this test."""
    sent(tmp_path_factory.mktemp("run"), *records)
