"""The journal: what it holds survives a cut at any byte, and no prompt is drawn twice."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.atomic_files import CannotWrite
from engine.pipeline.pipeline import Pipeline, Stage
from engine.run.checkpoints import Unresumable
from engine.run.journal import Journal
from engine.run.journal_files import Fault
from engine.run.journal_records import Piece, join_pieces, parts
from engine.stages.admit import AdmittedPrompt
from engine.stages.group import GroupConfig, groups
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, Group, RolloutError, Segment, StopReason, TokenScores
from tests.support.examples import examples
from tests.support.fakes import Clock, Echo, Prompts, a_prompt, a_trajectory, a_use
from tests.support.node import ANSWER, CHAT, END, Setup, call


def same(left, right):
    """Equal to the last bit, arrays included."""
    mine, theirs = parts(left), parts(right)
    return all(
        (np.array_equal(mine[name], theirs[name]) and mine[name].dtype == theirs[name].dtype)
        if isinstance(mine[name], np.ndarray)
        else mine[name] == theirs[name]
        for name in mine
    )


async def test_what_is_read_back_is_what_was_written(tmp_path):
    async with Setup([call("1") + END], [call("2") + END], [ANSWER]) as node:
        whole = replace(await node.run(), reward=1.0)
    end = whole.turns[0].end
    arrays = {name: getattr(whole, name)[:end] for name in ("token_ids_T", "sampled_T", "logprobs_T", "versions_T")}
    half = Piece(**arrays, turns=whole.turns[:1], text=CHAT.decode(whole.token_ids_T[whole.turns[0].start : end]))
    journal = Journal(tmp_path, groups_per_step=2)
    prompt = journal.draw(3, 0, iter([whole.prompt]))
    log = journal.log(3, 0, 5)
    log.grow(half, tokens=7)
    again = Journal(tmp_path, groups_per_step=2).log(3, 0, 5)
    assert same(join_pieces(again.pieces), half)
    assert (again.tokens, again.finished) == (7, None)
    again.end(whole, tokens=9)
    group = Group(prompt=prompt, trajectories=(replace(whole, sample=5),), lease=3, waste={"surplus": 4})
    journal.decide(group, 0)
    last = Journal(tmp_path, groups_per_step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert last.log(3, 0, 5).tokens == 9
    found = last.decided(3, 0)
    assert same(found.trajectories[0], whole)
    assert found.trajectories[0].reward == 1.0
    assert found.trajectories[0].prompt == found.prompt == whole.prompt
    assert found.waste == {"surplus": 4}
    assert last.ended(3, 0) == [5]
    assert last.held == (1, 0)


async def test_what_was_read_of_an_attempt_can_be_told_to_somebody_else(tmp_path):
    """Records as they were written, in order: who takes them goes on where the journal does."""
    async with Setup([call("1") + END], [ANSWER]) as node:
        journal = Journal(tmp_path)
        log = journal.log(3, 1, 0)
        whole = await node.rollouts.run(a_prompt(), 0, 0, log=log)
        log.end(replace(whole, reward=1.0), 9)
    assert journal.records(3, 1) == [], "of what was written since there is none"
    read = Journal(tmp_path)
    assert [type(record).__name__ for record in read.records(3, 1)] == ["Grown", "Grown", "Ended"]
    assert read.records(3, 0) == []
    other = Journal()
    for record in read.records(3, 1):
        other.take(record)
    assert same(other.log(3, 1, 0).finished, read.log(3, 1, 0).finished)
    read.forget(4)
    assert read.records(3, 1) == []


words = st.text(max_size=6) | st.sampled_from(["\ud83d", "a\ude00", "\ud83d\ude00"])  # halves of surrogate pairs
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-(10**40), 10**40) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@examples(60)
@given(st.lists(st.tuples(st.just("echo") | words, st.dictionaries(words, values, max_size=3) | values), max_size=3))
async def test_whatever_the_model_calls_is_answered_and_read_back(called):
    text = "".join(f"<tool_call>{json.dumps({'name': name, 'arguments': given})}</tool_call>" for name, given in called)
    with tempfile.TemporaryDirectory() as folder:
        log = Journal(Path(folder)).log(0, 0, 0)
        async with Setup([text + END], [ANSWER], tools=[Echo()], max_tokens=100_000) as node:
            whole = await node.rollouts.run(a_prompt(), 0, 0, log=log)
        assert (whole.stop, whole.error, len(whole.tool_uses)) == (StopReason.ANSWER, None, len(called))
        assert join_pieces(Journal(Path(folder)).log(0, 0, 0).pieces).turns == whole.turns
        log.end(whole, 0)
        assert same(Journal(Path(folder)).log(0, 0, 0).finished, whole)


@pytest.mark.parametrize(
    "fields", [{"id": 5}, {"answer": 5}, {"id": "\ud83d"}, *({"messages": ({"name": x},)} for x in (None, 5, "\ud83d"))]
)
def test_a_prompt_that_could_not_be_written_or_read_back_is_refused_at_once(fields):
    with pytest.raises(ValueError, match=r"id, answer and all in messages must be text, got "):
        replace(a_prompt(), **fields)


def test_a_journal_of_another_version_is_refused(tmp_path):
    other = replace(a_use(), arguments={"code": "1"})
    journal = Journal(tmp_path)
    journal.log(0, 0, 0).grow(Piece(**parts(a_trajectory(uses=[other]))), 3)
    journal.keep("evaluation", [a_trajectory(uses=[other])])
    assert journal.kept("evaluation") is None
    with pytest.raises(Unresumable, match=r"step-000000 is of another version"):
        Journal(tmp_path)


def play(journal, seed):
    """Some records of leases 0 to 5, and what each wrote: [(lease, attempt, sample) of an end, or prompt id]."""
    rng, said = np.random.default_rng(seed), []
    prompts = journal.after(Prompts())
    for lease in range(6):
        said.append(journal.draw(lease, 0, prompts).id)
        for sample in range(2):
            journal.log(lease, 0, sample).end(a_trajectory(sample, sampled=int(rng.integers(1, 9))), 3)
            said.append((lease, 0, sample))
    return said


@examples(60)
@given(seed=st.integers(0, 3), cut=st.floats(0, 1), flip=st.booleans(), data=st.data())
def test_a_tail_that_is_torn_is_cut_and_the_rest_goes_on(seed, cut, flip, data):
    with tempfile.TemporaryDirectory() as folder:
        first = Journal(Path(folder), groups_per_step=6)
        said = play(first, seed)
        first.close()
        path = Path(folder, "step-000000")
        content = bytearray(path.read_bytes())
        at = int(cut * (len(content) - 1))
        if flip:
            content[at] ^= data.draw(st.integers(1, 255))
        else:
            del content[at:]
        path.write_bytes(content)
        second = Journal(Path(folder), groups_per_step=6)
        ends = [(lease, 0, sample) for lease in range(6) for sample in second.ended(lease, 0)]
        wanted = [entry for entry in said if isinstance(entry, tuple)]
        assert ends == wanted[: len(ends)], "a prefix of what was written"
        assert path.stat().st_size <= at, "what is not whole is gone"
        lost = sum(fault.lost_bytes for fault in second.faults)
        assert lost == (len(content) if flip else at) - path.stat().st_size
        assert flip or all(fault.torn for fault in second.faults)
        prompts = second.after(Prompts())
        assert [second.draw(lease, 0, prompts).id for lease in range(8)] == [f"p{n}" for n in range(8)]
        second.close()
        third = Journal(Path(folder), groups_per_step=6)
        assert third.faults == []
        assert third.position == 8
        assert [(lease, 0, sample) for lease in range(6) for sample in third.ended(lease, 0)] == ends


def test_no_position_is_drawn_twice_or_left_out(tmp_path):
    first = Journal(tmp_path, groups_per_step=1)
    prompts = Prompts()
    assert [first.draw(lease, 0, prompts).id for lease in (0, 1, 2)] == ["p0", "p1", "p2"]
    assert first.draw(1, 1, prompts).id == "p3"  # a refill
    first.sync(first.floor(2))
    first.forget(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["drawn-000002", "step-000002"]
    second = Journal(tmp_path, groups_per_step=1, first_step=2)
    prompts = second.after(Prompts())
    assert [second.draw(lease, 0, prompts).id for lease in (2, 3)] == ["p2", "p4"]
    path = tmp_path / "step-000003"
    path.write_bytes(bytes(40))  # the machine died: zeros in place of what was written
    second.draw(4, 0, prompts)
    third = Journal(tmp_path, groups_per_step=1, first_step=2)
    assert third.faults == [Fault(path=path, at=0, lost_bytes=40, torn=True)]
    prompts = third.after(Prompts())
    assert [third.draw(lease, 0, prompts).id for lease in (2, 3, 4, 5)] == ["p2", "p4", "p5", "p6"]


class PowerCut(Journal):
    """Its machine loses power at the end: of each segment that was not deleted is left what was synced."""

    synced: dict[Path, bytes] = {}  # noqa: RUF012

    def sync(self, floor):
        super().sync(floor)
        self.synced = {path: path.read_bytes() for path in self.folder.iterdir()}

    def close(self):
        super().close()
        for path in self.folder.iterdir():
            path.write_bytes(self.synced.get(path, b""))


@pytest.mark.parametrize("covered", [2, 4])
def test_no_position_is_drawn_twice_after_a_loss_of_power(tmp_path, covered):
    first, prompts = PowerCut(tmp_path, groups_per_step=2), Prompts()
    for lease in range(8):
        first.draw(lease, 0, prompts)
    first.sync(first.floor(covered))
    first.forget(covered)
    for lease in range(8, 10):
        first.draw(lease, 0, prompts)
    first.close()
    second = Journal(tmp_path, groups_per_step=2, first_step=covered)
    prompts = second.after(Prompts())
    leases = range(2 * covered, 10)
    assert [second.draw(lease, 0, prompts).id for lease in leases] == [f"p{lease}" for lease in leases]


# Damage


def damages(content, every):
    """A bit of each byte flipped, and the content cut off at each byte; of the bytes, one of so many."""
    for at in range(0, len(content), every):
        yield content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        yield content[:at]


COVERED = {"p0", "p1", "p2", "p3", "p6"}  # what the first two steps drew; p6 is a refill


def lived(folder):
    """A journal of two groups a step: a checkpoint covers two steps, one before it covers the first. What it holds."""
    journal, prompts = Journal(folder, groups_per_step=2), Prompts()
    drawn = {}
    for lease, attempt in ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (3, 1)):
        drawn[lease, attempt] = journal.draw(lease, attempt, prompts).id
    journal.sync(journal.floor(1))
    journal.log(4, 0, 0).end(a_trajectory(sampled=2), 2)
    journal.sync(journal.floor(2))
    journal.forget(1)
    for lease, attempt in ((6, 0), (7, 0), (8, 0), (5, 1)):
        drawn[lease, attempt] = journal.draw(lease, attempt, prompts).id
    journal.log(6, 0, 0).end(a_trajectory(sampled=3), 3)
    journal.close()
    return drawn


def files(folder):
    return {path: path.read_bytes() for path in sorted(folder.iterdir())}


def damaged(path, every):
    """Each damage of a file in turn, its deletion last: what is there now. It is whole again afterwards."""
    content = path.read_bytes()
    for left in [*damages(content, every), bytes(len(content))]:
        path.write_bytes(left)
        yield left
    path.unlink()
    yield None
    path.write_bytes(content)


def go_on(folder, keys):
    """What these attempts have or draw when the run goes on from the second checkpoint, and the journal."""
    journal = Journal(folder, groups_per_step=2, first_step=2)
    prompts = journal.after(Prompts())
    found = {key: journal.draw(*key, prompts).id for key in keys}
    journal.close()
    return found, journal


def test_what_a_damaged_journal_goes_on_with_was_not_drawn_before_a_checkpoint_and_nothing_is_left_out(tmp_path, every):
    drawn = lived(tmp_path)
    assert {drawn[key] for key in drawn if key[0] < 4} == COVERED
    later = {key: name for key, name in drawn.items() if key[0] >= 4}
    contents = files(tmp_path)
    assert [path.name for path in contents] == [
        *("drawn-000001", "drawn-000002"),
        *("step-000001", "step-000002", "step-000003", "step-000004"),
    ]
    found, journal = go_on(tmp_path, later)
    assert (found, journal.faults) == (later, [])
    for path in contents:
        for left in damaged(path, every):
            if path.name == "drawn-000002":
                with pytest.raises(Unresumable, match=path.name):
                    go_on(tmp_path, later)
                continue
            found, journal = go_on(tmp_path, later)
            assert sorted(found.values()) == sorted(later.values()), "each is drawn once, none is left out"
            if path.name == "step-000001":
                assert found == later
                assert left is None or path.read_bytes() == left, "what is not needed is left alone"
            assert {fault.path for fault in journal.faults} <= {path}


def test_without_refills_a_damaged_journal_goes_on_as_if_nothing_had_happened(tmp_path, every):
    first, prompts = Journal(tmp_path, groups_per_step=2), Prompts()
    for lease in range(6):
        first.draw(lease, 0, prompts)
    first.sync(first.floor(2))
    for lease in (6, 7):
        first.draw(lease, 0, prompts)
        first.log(lease, 0, 0).end(a_trajectory(sampled=lease), lease)
    first.forget(2)
    first.close()
    keys = [(lease, 0) for lease in range(4, 10)]
    for path in sorted(tmp_path.glob("step-*")):
        for _ in damaged(path, every):
            found, journal = go_on(tmp_path, keys)
            assert found == {(lease, 0): f"p{lease}" for lease, _ in keys}
            for lease in (6, 7):
                held = journal.log(lease, 0, 0).finished
                assert held is None or same(held, a_trajectory(sampled=lease))


def test_damage_is_told_from_a_tail_that_was_torn(tmp_path):
    """A segment that was synced whole before a checkpoint cannot have been torn, nor one that goes on afterwards."""
    lived(tmp_path)
    contents = files(tmp_path)

    def fault_of(name, change):
        for other, content in contents.items():
            other.write_bytes(content)
        path = tmp_path / name
        path.unlink() if change is None else path.write_bytes(change(contents[path]))
        [fault] = Journal(tmp_path, groups_per_step=2, first_step=2).faults
        assert fault.path == path
        assert str(path) in str(fault)
        return fault

    def cut(content):
        return content[:-3]

    def flipped(content):
        return content[:12] + bytes([content[12] ^ 1]) + content[13:]

    assert fault_of("step-000003", cut).torn
    assert fault_of("step-000003", lambda content: content + bytes(9)).torn
    assert fault_of("step-000003", flipped) == Fault(
        path=tmp_path / "step-000003", at=0, lost_bytes=len(contents[tmp_path / "step-000003"])
    )
    unneeded = fault_of("step-000001", cut)
    assert (unneeded.torn, unneeded.needed) == (False, False)
    missing = fault_of("step-000003", None)
    assert (missing.at, missing.needed) == (None, True)


def test_a_copy_beside_a_file_is_not_read(tmp_path):
    lived(tmp_path)
    for name in ("step-000003.bak", "drawn-000002.draft", "step-"):
        (tmp_path / name).write_bytes(b"x")
    assert Journal(tmp_path, groups_per_step=2, first_step=2).faults == []


def test_a_floor_of_another_step_is_refused(tmp_path):
    lived(tmp_path)
    (tmp_path / "drawn-000001").rename(tmp_path / "drawn-000002")
    with pytest.raises(Unresumable, match="drawn-000002"):
        Journal(tmp_path, groups_per_step=2, first_step=2)


def test_prompts_that_run_out_are_none(tmp_path):
    journal = Journal(tmp_path)
    assert journal.draw(0, 0, iter(())) is None
    assert Journal(tmp_path).position == 0


def test_one_that_failed_by_our_fault_is_not_an_end(tmp_path):
    failed = a_trajectory(error=RolloutError(boundary=Boundary.SANDBOX, message="lost"))
    journal = Journal(tmp_path)
    journal.draw(0, 0, iter([a_prompt()]))
    journal.log(0, 0, 0).end(failed, 2)
    assert Journal(tmp_path).ended(0, 0) == []
    journal.decide(Group(prompt=a_prompt(), trajectories=(failed,), lease=0), 0)
    assert Journal(tmp_path).decided(0, 0).trajectories[0].error == failed.error


def test_one_that_begins_again_is_forgotten(tmp_path):
    journal = Journal(tmp_path)
    log = journal.log(0, 0, 0)
    log.grow(Piece(**parts(a_trajectory())), 3)
    log.begin(3, 3)
    found = Journal(tmp_path).log(0, 0, 0)
    assert (found.pieces, found.discarded, found.tokens) == ([], 3, 3)


def test_without_a_folder_it_remembers_nothing():
    journal = Journal()
    prompts = Prompts()
    assert [journal.draw(0, 0, prompts).id for _ in range(2)] == ["p0", "p1"]
    journal.log(0, 0, 0).end(a_trajectory(), 1)
    journal.sync(journal.floor(5))
    journal.forget(5)
    assert journal.log(0, 0, 0).finished is None
    assert journal.kept("evaluation") is None


def test_an_evaluation_of_which_a_byte_is_damaged_is_none(tmp_path):
    journal, path = Journal(tmp_path), tmp_path / "evaluation-last"
    journal.keep("evaluation-last", [a_trajectory()])
    content = path.read_bytes()
    for left in damages(content, every=1):
        path.write_bytes(left)
        assert journal.kept("evaluation-last") is None, left
    path.write_bytes(content)
    assert journal.kept("evaluation-last") is not None


def test_trajectories_are_kept_by_name(tmp_path):
    journal = Journal(tmp_path)
    for number in range(3):
        journal.keep("evaluation", [replace(a_trajectory(), reward=float(number))])
    [found] = Journal(tmp_path).kept("evaluation")
    assert found.reward == 2.0
    assert same(found, a_trajectory())
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation"]


def test_a_full_disk_is_named(tmp_path):
    journal = Journal(tmp_path)
    (tmp_path / "step-000000").symlink_to("/dev/full")
    with pytest.raises(CannotWrite, match=r"cannot write .*/step-000000: No space left"):
        journal.draw(0, 0, iter([a_prompt()]))


class Counted:
    """Stands for `Rollouts`; started: the samples that were rolled out."""

    def __init__(self):
        self.started = []

    async def run(self, prompt, sample, group, *, tally, log):
        self.started.append(sample)
        return a_trajectory(sample, prompt=prompt)


async def group_of(journal):
    """(the group of lease 0, the samples that were rolled out for it)."""
    rollouts, out = Counted(), []

    async def reward(trajectory):
        return 1.0

    async def source(inbox, outbox):
        await outbox.put(AdmittedPrompt(prompt=journal.draw(0, 0, iter([a_prompt()])), lease=0))

    async def sink(inbox, outbox):
        out.extend([group async for group in inbox])

    config, timeline = GroupConfig(samples=2), Timeline(Clock())
    made = groups(rollouts, reward, lambda group: group, iter(()), config, timeline, journal)
    stages = [Stage(name=run.__name__, run=run) for run in (source, sink)]
    await Pipeline([stages[0], Stage(name="groups", run=made), stages[1]]).run()
    return out[0], rollouts.started


async def test_a_group_that_was_decided_is_taken_as_it_was(tmp_path):
    first, started = await group_of(Journal(tmp_path))
    assert started == [0, 1]
    journal = Journal(tmp_path)
    journal.decide(replace(first, waste={"surplus": 9}), 0)
    again, started = await group_of(Journal(tmp_path))
    assert started == []
    assert again.waste == {"surplus": 9}
    assert [member.reward for member in again.trajectories] == [1.0, 1.0]


async def test_one_that_failed_by_our_fault_has_another_chance(tmp_path):
    journal = Journal(tmp_path)
    journal.draw(0, 0, iter([a_prompt()]))
    journal.log(0, 0, 0).end(replace(a_trajectory(0), reward=0.5), 4)
    journal.log(0, 0, 1).end(a_trajectory(1, error=RolloutError(boundary=Boundary.SANDBOX, message="lost")), 4)
    group, started = await group_of(Journal(tmp_path))
    assert started == [1]
    assert group.rewards_G.tolist() == [0.5, 1.0]


async def test_a_teachers_scores_are_read_back_to_the_last_bit(tmp_path):
    """Also where a turn's tokens are in a record before the one that has the scores: nodes send the same records."""
    async with Setup([call("1") + END], [ANSWER]) as node:
        journal = Journal(tmp_path)
        prompt = journal.draw(0, 0, iter([a_prompt()]))
        log = journal.log(0, 0, 0)
        whole = await node.rollouts.run(prompt, 0, 0, log=log)
    tokens = len(whole.token_ids_T)
    rng = np.random.default_rng(0)
    teacher = TokenScores(
        logprobs_T=np.where(whole.sampled_T, rng.normal(size=tokens), np.nan).astype(np.float32),
        top=3,
        top_ids=rng.integers(0, 500, 3 * tokens).astype(np.int32),
        top_logprobs=rng.normal(size=3 * tokens).astype(np.float32),
    )
    segment = Segment(
        **{name: getattr(whole, name) for name in ("token_ids_T", "sampled_T", "logprobs_T", "versions_T")}
    )
    log.end(replace(whole, reward=1.0, teacher=teacher, segments=(replace(segment, teacher=teacher),)), tokens=9)
    found = Journal(tmp_path).log(0, 0, 0).finished
    assert same(found, whole)
    for part in found.parts:
        for name in ("logprobs_T", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(part.teacher, name), getattr(teacher, name))
        assert [array.shape for array in part.teacher.top_TK] == [(tokens, 3), (tokens, 3)]
