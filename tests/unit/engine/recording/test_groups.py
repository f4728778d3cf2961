"""From groups to records, and which rows of a batch are whose sequences."""

from dataclasses import replace

import numpy as np

from engine.recording.groups import LearnerNumbers, Place, StepRecords, rows_of, whole_groups
from engine.types import Batch, Boundary, Group, Placement, RolloutError, Segment
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
    fields = {"step": 4, "groups": groups, "whole": [0], "epoch": 1000.0, "nodes": {}} | changes
    return StepRecords(**fields)


def test_rows_are_found_by_their_content_in_whatever_order_the_batch_has_them():
    groups = [a_group(0), a_group(1), a_group(2)]
    rows = rows_of(a_batch(groups[::-1]), groups, [0, 2])
    assert rows == {0: Place(2, 0, 0), 1: Place(2, 2, 0), 4: Place(0, 0, 0), 5: Place(0, 2, 0)}


def test_two_trajectories_with_equal_tokens_get_a_row_each():
    twin = a_group(0, samples=1, kept=(0,)).trajectories[0]
    group = a_group(0, samples=2, kept=(0, 1), trajectories=(twin, twin))
    assert rows_of(a_batch([group]), [group], [0]) == {0: Place(0, 0, 0), 1: Place(0, 1, 0)}


def test_segments_of_an_agent_have_rows_of_their_own():
    main = a_trajectory(0, reward=1.0)
    segment = Segment(
        token_ids_T=np.arange(9, dtype=np.int32),
        sampled_T=np.arange(9) > 3,
        logprobs_T=np.zeros(9, np.float32),
        versions_T=np.zeros(9, np.int32),
    )
    group = a_group(0, trajectories=(replace(main, segments=(segment,)),), kept=(0,), advantages_K=np.ones(1))
    assert rows_of(a_batch([group]), [group], [0]) == {0: Place(0, 0, 0), 1: Place(0, 0, 1)}
    [record] = records_of([group]).records()
    assert [len(turns) for turns in record.trajectories[0].sequences] == [1, 0]
    assert record.trajectories[0].total_tokens == 7 + 9


def test_a_batch_that_leaves_trajectories_out_has_no_rows_for_them():
    groups = [a_group(0), a_group(1)]
    assert rows_of(a_batch(groups[:1]), groups, [0, 1]) == {0: Place(0, 0, 0), 1: Place(0, 2, 0)}


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
    assert (record.step, record.lease, record.node, record.whole) == (4, 0, "left", True)
    assert (record.waste, record.refills) == ({"surplus": 5}, 1)
    assert [member.kept for member in record.trajectories] == [True, False, True]
    assert [member.advantage for member in record.trajectories] == [-1.0, None, 1.0]
    assert record.trajectories[1].reasons == {"p_err": 0.5, "probability": 0.25}
    assert record.trajectories[0].prompt_tokens == 3


def test_times_are_those_of_the_day_and_placements_come_with_their_turn():
    member = a_trajectory(0, reward=1.0)
    placed = Placement(at=0.5, replica=1, rule="headroom", headroom_blocks=3.0, free_blocks={0: 1, 1: 9})
    turn = replace(member.turns[0], placed=(placed,))
    group = a_group(0, trajectories=(replace(member, turns=(turn,)),), kept=())
    records = records_of([group])
    [[found]] = records.records()[0].trajectories[0].sequences
    assert (found.finished_at, found.placed[0].at, found.placed[0].free_blocks) == (1001.0, 1000.5, {0: 1, 1: 9})
    row = records.row(2.0)
    assert (row.started_at, row.finished_at) == (1000.0, 1002.0)


def test_what_failed_has_its_error_and_no_reward():
    error = RolloutError(boundary=Boundary.REPLICA, message="gone")
    group = a_group(0, trajectories=(replace(a_trajectory(0), error=error),), kept=(), drop="error")
    [record] = records_of([group]).records()
    assert record.trajectories[0].error == ("replica", "gone")
    assert records_of([group]).row(1.0).groups[0].rewards == (None,)


def test_numbers_of_the_learner_are_those_of_their_sequence_and_only_of_whole_groups():
    groups = [a_group(0), a_group(1)]
    numbers = LearnerNumbers(*(np.full(7, value, np.float32) for value in (-2.0, 0.5, 1.0)))
    first, second = records_of(groups).tokens({Place(0, 0, 0): numbers})
    assert first.trajectories[0][0].learner_logprobs.tolist() == [-2.0] * 7
    assert first.trajectories[1][0].learner_logprobs is None
    assert first.trajectories[1][0].logprobs is not None
    assert second.trajectories[0][0].logprobs is None
    assert len(second.trajectories[0][0].token_ids) == 7
