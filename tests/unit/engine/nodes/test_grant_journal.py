"""A group that is made under a grant: its records go to the lead, which makes the same group of them."""

import asyncio

from engine.encoding import encode
from engine.nodes.grant_journal import GrantJournal, group_of
from engine.run.journal_records import Decided, Drawn, Ended, Grown, decode
from engine.stages.group import GroupConfig, GroupMaker
from tests.support.fakes import a_prompt
from tests.support.node import ANSWER, Setup, call

PROMPT = a_prompt(text="What is 6 * 7?")
DRAWN = Drawn(lease=3, attempt=0, position=0, prompt=PROMPT)
TURNS = ([call("6 * 7") + "<|im_end|>"], [ANSWER])


async def reward(trajectory):
    return 1.0


async def make(records, samples=2):
    """The group, and the records that it gave, as they come over a wire."""
    new = []
    async with Setup(*TURNS) as node:
        maker = GroupMaker(
            rollouts=node.rollouts, reward=reward, config=GroupConfig(samples=samples), timeline=node.timeline
        )
        journal = GrantJournal(records, lambda record: new.append(decode(encode(record))))
        group = await maker(PROMPT, 3, 0, journal=journal)
        requests = sum(len(replica.requests) for replica in node.replicas.made)
    return group, new, requests


def same(one, other):
    assert [member.sample for member in one.trajectories] == [member.sample for member in other.trajectories]
    for a, b in zip(one.trajectories, other.trajectories, strict=True):
        assert a.token_ids_T.tolist() == b.token_ids_T.tolist()
        assert a.logprobs_T.tolist() == b.logprobs_T.tolist()
        assert (a.text, a.reward, a.stop) == (b.text, b.reward, b.stop)


def test_the_lead_makes_the_group_of_its_records():
    group, new, _ = asyncio.run(make([DRAWN]))
    assert isinstance(new[-1], Decided)
    same(group_of([DRAWN, *new]), group)
    assert group_of([DRAWN, *new]).prompt == PROMPT
    assert group_of([DRAWN, *new]).lease == 3


def test_another_node_goes_on_after_the_turns_that_the_lead_has():
    group, new, requests = asyncio.run(make([DRAWN]))
    assert requests == 4
    for known in range(1, len(new)):
        again, more, left = asyncio.run(make([DRAWN, *new[:known]]))
        ended = sum(isinstance(record, Ended) for record in new[:known])
        grown = sum(isinstance(record, Grown) for record in new[:known])
        assert left == requests - grown
        assert sum(isinstance(record, Ended) for record in more) == 2 - ended
        same(again, group)
        same(group_of([DRAWN, *new[:known], *more]), group)
