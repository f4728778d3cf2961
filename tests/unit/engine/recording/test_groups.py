"""From groups to records, and which rows of a batch are whose sequences."""

from dataclasses import replace

import numpy as np

from engine.encoding import encode
from engine.recording.groups import Place, StepRecords, places_of, whole_groups
from engine.recording.records import decode
from engine.recording.rollouts import with_tokens
from engine.routes import Routes
from engine.types import (
    Batch,
    Boundary,
    Group,
    LearnerNumbers,
    Placement,
    PromptLimits,
    RolloutError,
    Segment,
    TokenScores,
)
from tests.support.algo_fakes import tool_use
from tests.support.fakes import a_prompt, a_trajectory


def a_group(lease, samples=3, kept=(0, 2), **changes):
    members = tuple(
        replace(
            a_trajectory(sample, prompt=a_prompt(lease), reward=float(sample % 2), sampled=4 + sample),
            token_ids_T=np.arange(7 + sample, dtype=np.int32) + 100 * lease,
        )
        for sample in range(samples)
    )
    advantages = np.linspace(-1, 1, len(kept))
    return replace(
        Group(prompt=a_prompt(lease), trajectories=members, lease=lease, kept=kept, advantages_K=advantages), **changes
    )


def a_batch(groups):
    kept = [group.trajectories[index] for group in groups for index in group.kept]
    return Batch.of(1, kept, np.ones(len(kept), np.float32))


def records_of(groups, **changes):
    return StepRecords(**({"step": 4, "groups": groups, "whole": [0]} | changes))


def test_rows_are_placed_by_their_names_in_whatever_order_the_batch_has_them():
    groups = [a_group(0), a_group(1), a_group(2)]
    places = places_of(a_batch(groups[::-1]), groups, [0, 2])
    assert places == {0: Place(2, 0, 0), 1: Place(2, 2, 0), 4: Place(0, 0, 0), 5: Place(0, 2, 0)}


def test_segments_of_an_agent_have_rows_of_their_own():
    main = a_trajectory(0, prompt=a_prompt(0), reward=1.0)
    segment = Segment(
        token_ids_T=np.arange(9, dtype=np.int32),
        sampled_T=np.arange(9) > 3,
        logprobs_T=np.zeros(9, np.float32),
        versions_T=np.zeros(9, np.int32),
    )
    group = a_group(0, trajectories=(replace(main, segments=(segment,)),), kept=(0,), advantages_K=np.ones(1))
    assert places_of(a_batch([group]), [group], [0]) == {0: Place(0, 0, 0), 1: Place(0, 0, 1)}
    [record] = records_of([group]).records()
    assert [len(part.turns) for part in record.group.trajectories[0].parts] == [1, 0]


def test_a_batch_that_leaves_trajectories_out_has_no_rows_for_them():
    groups = [a_group(0), a_group(1)]
    assert places_of(a_batch(groups[:1]), groups, [0, 1]) == {0: Place(0, 0, 0), 1: Place(0, 2, 0)}


def test_rows_of_which_the_recipe_has_trained_something_else_have_no_place():
    """A trajectory that was cut, one of no group, and one with a segment that was not sampled."""
    group = a_group(0, kept=(0, 1, 2))
    first, second, third = group.trajectories
    shorter = {name: getattr(first, name)[:-1] for name in ("token_ids_T", "sampled_T", "logprobs_T", "versions_T")}
    added = Segment(**shorter)
    foreign = replace(second, prompt=a_prompt(9))
    batch = Batch.of(1, [replace(first, **shorter), foreign, replace(third, segments=(added,))], np.ones(3, np.float32))
    assert places_of(batch, [group], [0]) == {2: Place(0, 2, 0)}


def test_a_batch_whose_rows_have_no_names_has_no_places():
    groups = [a_group(0)]
    unnamed = Batch.of_arrays(1, a_batch(groups).arrays())
    assert places_of(unnamed, groups, [0]) == {}


def test_groups_that_are_trained_are_whole_before_others():
    groups = [a_group(0, kept=(), drop="flat"), a_group(1), a_group(2), a_group(3)]
    assert whole_groups(groups, 2) == [1, 2]
    assert whole_groups(groups, 4) == [0, 1, 2, 3]
    assert whole_groups(groups, 0) == []


def test_a_record_says_what_became_of_each_trajectory():
    [record] = records_of(
        [a_group(0, waste={"surplus": 5}, refills=1)],
        explain=lambda group: [{"p_err": 0.5, "probability": 0.25}] * 3,
        nodes={0: "left"},
    ).records()
    assert (record.step, record.number, record.node, record.whole) == (4, 0, "left", True)
    assert (record.group.waste, record.group.refills, record.group.kept) == ({"surplus": 5}, 1, (0, 2))
    assert [record.group.advantage(index) for index in range(3)] == [-1.0, None, 1.0]
    assert record.reasons[1] == {"p_err": 0.5, "probability": 0.25}


def test_a_group_comes_back_as_it_was_put_out_but_for_what_lies_with_its_tokens():
    error = RolloutError(boundary=Boundary.REPLICA, message="gone")
    placed = Placement(at=0.5, replica=1, rule="headroom", headroom_blocks=3.0, free_blocks={0: 1, 1: 9})
    prompt = replace(a_prompt(0), tools=("python",), reward="maths", metadata={"level": 3}, limits=PromptLimits())
    member = a_trajectory(0, prompt=prompt, reward=1.0, uses=[tool_use("error")])
    member = replace(member, turns=(replace(member.turns[0], placed=(placed,)),), text="what it wrote", answer="42")
    failed = replace(a_trajectory(1, prompt=prompt), error=error, scores={"style": None})
    group = a_group(0, prompt=prompt, trajectories=(member, failed), kept=(0,), advantages_K=[0.5])
    [record] = records_of([group]).records()
    again = decode(encode(record))
    assert again.group.prompt == prompt
    assert again.group.advantages_K.tolist() == [0.5]
    assert [part.turns for part in again.group.trajectories] == [member.turns, failed.turns]
    assert (again.group.trajectories[1].error, again.group.trajectories[1].scores) == (error, {"style": None})
    assert records_of([group]).row(1.0).groups[0].rewards == (1.0, None)


def test_states_of_worlds_are_not_recorded():
    group = a_group(0)
    members = tuple(replace(member, states={"files": b"x" * 1000}) for member in group.trajectories)
    [recorded] = records_of([replace(group, trajectories=members)]).records()
    assert [member.states for member in recorded.group.trajectories] == [{}, {}, {}]


def test_a_step_begins_with_its_first_trajectory():
    groups = [a_group(0)]
    assert (records_of(groups).row(2.0).started_at, records_of([]).row(2.0).started_at) == (0.0, 2.0)


def test_numbers_of_the_learner_are_those_of_their_sequence_and_only_of_whole_groups():
    groups = [a_group(0), a_group(1)]
    columns = {"logprobs_T": -2.0, "entropy_T": 0.5, "logprob_gradient_T": 1.0}
    numbers = LearnerNumbers(**{name: np.full(7, value, np.float32) for name, value in columns.items()})
    first, second = records_of(groups).tokens({Place(0, 0, 0): numbers})
    assert first.trajectories[0][0].learner_logprobs_T.tolist() == [-2.0] * 7
    assert first.trajectories[1][0].learner_logprobs_T is None
    assert first.trajectories[1][0].logprobs_T is not None
    assert second.trajectories[0][0].logprobs_T is None
    assert len(second.trajectories[0][0].token_ids_T) == 7


def test_what_a_teacher_said_of_a_whole_group_is_recorded():
    main = a_trajectory(0, prompt=a_prompt(0), reward=1.0, sampled=4)
    values_T = np.where(main.sampled_T, -0.5, np.nan).astype(np.float32)
    taught = replace(main, teacher=TokenScores(logprobs_T=values_T))
    group = a_group(0, trajectories=(taught,), kept=(0,), advantages_K=np.ones(1))
    other = a_group(1, trajectories=(taught,), kept=(0,), advantages_K=np.ones(1))
    step = records_of([group, other])
    recorded, tokens = step.records(), [decode(encode(each)) for each in step.tokens({})]
    assert recorded[0].group.trajectories[0].teacher is None, "the numbers of tokens are with the tokens"
    found, thinned = (with_tokens(decode(encode(it)), of, None) for it, of in zip(recorded, tokens, strict=True))
    np.testing.assert_array_equal(found.trajectories[0].teacher.logprobs_T, values_T)
    assert thinned.trajectories[0].teacher is None


def test_a_record_has_no_routes():
    main = a_trajectory(0, prompt=a_prompt(0), reward=1.0, sampled=4)
    routes = Routes.of(np.full((len(main.token_ids_T), 3, 2), 77, np.uint8))
    routed = replace(main, routes=routes)
    step = records_of([a_group(0, trajectories=(routed,), kept=(0,), advantages_K=np.ones(1))])
    for record in (*step.records(), *step.tokens({})):
        assert b"M" * 6 not in encode(record)
    assert step.records()[0].group.trajectories[0].routes is None
