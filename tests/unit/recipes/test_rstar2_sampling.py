"""Graded samples of many problems: a durable row for each, bounded in number, and nothing of ours counted as wrong."""

import asyncio
import json
from dataclasses import replace

import pytest

from engine.errors import BadInput
from engine.ports import GraderUnavailable
from engine.replica.port import ReplicaDied
from engine.run.identity import Identity
from engine.telemetry.timeline import Timeline
from engine.types import Boundary, RolloutError, StopReason
from recipes.rstar2.parts.sampling.output import fingerprint, open_output, sha256
from recipes.rstar2.parts.sampling.problems import TRIES, sample_problems
from recipes.rstar2.parts.sampling.rows import Row, RowFile
from tests.support.fakes import a_prompt, a_trajectory, a_use


class Scripted:
    """Stands for Rollouts. errors: boundary by (prompt id, sample), of the first so many attempts."""

    def __init__(self, errors=None):
        self.errors = dict(errors or {})
        self.attempts = []
        self.running = self.most = 0

    async def run(self, prompt, sample, group):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        key = (prompt.id, sample)
        boundary, times = self.errors.get(key, (None, 0))
        failed = self.attempts.count(key) < times
        self.attempts.append(key)
        error = RolloutError(boundary=boundary, message="lost") if failed else None
        said = f"<answer>\\boxed{{{40 + sample}}}</answer>"
        return replace(a_trajectory(sample, prompt=prompt, error=error), text=said)


async def right(trajectory):
    """Samples 2 and up are."""
    return float(trajectory.sample >= 2)


async def sampled(path, prompts, *, rollouts=None, samples=4, in_flight=100, reward=right):
    """The failures and the rows by id."""
    with RowFile(path) as file:
        failed = await sample_problems(
            prompts,
            file,
            samples=samples,
            rollouts=rollouts or Scripted(),
            reward=reward,
            timeline=Timeline(),
            in_flight=in_flight,
        )
        return failed, {row.id: row for row in file.rows()}


PROMPTS = [a_prompt(number) for number in range(6)]


async def test_each_problem_has_a_row(tmp_path):
    failed, rows = await sampled(tmp_path / "rows.jsonl", PROMPTS)
    assert failed == {}
    assert sorted(rows) == [prompt.id for prompt in PROMPTS]
    row = rows["p0"]
    assert (row.solved, row.samples, row.rewards) == (2, 4, (0.0, 0.0, 1.0, 1.0))
    assert row.answers == ("40", "41", "42", "43")
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0]).keys() >= {"id", "solved", "samples"}


def test_a_row_says_how_tools_were_used_and_how_a_rollout_ended():
    members = [
        a_trajectory(0, reward=1.0, sampled=7, uses=[a_use("error"), a_use()]),
        a_trajectory(1, reward=0.0, sampled=9, stop=StopReason.LENGTH),
    ]
    row = Row.of(members)
    assert (row.tokens, row.turns, row.calls, row.failed_calls) == ((7, 9), (1, 1), (2, 0), (1, 0))
    assert (row.stops, row.answers) == (("answer", "length"), (None, None))


@pytest.mark.parametrize(("in_flight", "most"), [(8, 8), (4, 4), (1, 4), (1000, 24)])
async def test_no_more_rollouts_than_allowed_are_under_way(tmp_path, in_flight, most):
    rollouts = Scripted()
    await sampled(tmp_path / "rows.jsonl", PROMPTS, rollouts=rollouts, in_flight=in_flight)
    assert rollouts.most == min(most, 24)


async def test_problems_are_drawn_as_they_are_needed(tmp_path):
    drawn = []

    def stream():
        for prompt in PROMPTS:
            drawn.append(prompt.id)
            yield prompt

    async def first(trajectory):
        assert len(drawn) <= int(trajectory.prompt.id[1:]) + 2
        return 1.0

    await sampled(tmp_path / "rows.jsonl", stream(), in_flight=8, reward=first)


async def test_a_job_that_goes_on_passes_over_what_has_a_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    await sampled(path, PROMPTS[:4])
    rollouts = Scripted()
    _, rows = await sampled(path, PROMPTS, rollouts=rollouts)
    assert {prompt_id for prompt_id, _ in rollouts.attempts} == {"p4", "p5"}
    assert len(rows) == 6


async def test_a_line_that_a_kill_cut_in_half_is_sampled_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    await sampled(path, PROMPTS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    failed, rows = await sampled(path, PROMPTS)
    assert (failed, len(rows)) == ({}, 6)
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


async def test_another_damaged_line_is_refused_by_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    await sampled(path, PROMPTS)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b'{"id": 3}\n', *lines[2:]]))
    with pytest.raises(BadInput, match="line 2"):
        RowFile(path)


async def test_a_sample_that_we_failed_is_tried_again(tmp_path):
    rollouts = Scripted({("p1", 3): (Boundary.SANDBOX, 1)})
    failed, rows = await sampled(tmp_path / "rows.jsonl", PROMPTS, rollouts=rollouts)
    assert (failed, rows["p1"].samples) == ({}, 4)
    assert rollouts.attempts.count(("p1", 3)) == 2


async def test_a_problem_that_cannot_be_sampled_has_no_row_and_is_tried_by_the_next_job(tmp_path):
    path = tmp_path / "rows.jsonl"
    rollouts = Scripted({("p1", 3): (Boundary.SANDBOX, TRIES)})
    failed, rows = await sampled(path, PROMPTS, rollouts=rollouts)
    assert failed == {"p1": "sandbox: lost"}
    assert "p1" not in rows
    failed, rows = await sampled(path, PROMPTS)
    assert (failed, len(rows)) == ({}, 6)


async def test_what_cannot_be_graded_is_not_wrong(tmp_path):
    async def grader(trajectory):
        if trajectory.prompt.id == "p2":
            raise GraderUnavailable("no sandbox")
        return 1.0

    failed, rows = await sampled(tmp_path / "rows.jsonl", PROMPTS, reward=grader)
    assert failed == {"p2": "reward: no sandbox"}
    assert {row.solved for row in rows.values()} == {4}


async def test_a_job_ends_when_no_replica_is_left(tmp_path):
    rollouts = Scripted({("p3", 0): (Boundary.REPLICA, 1)})
    with pytest.raises(ReplicaDied, match="lost"):
        await sampled(tmp_path / "rows.jsonl", PROMPTS, rollouts=rollouts, in_flight=4)
    _, rows = await sampled(tmp_path / "rows.jsonl", [])
    assert sorted(rows) == ["p0", "p1", "p2"], "what was done is kept"


def test_a_folder_goes_on_with_the_same_values_only(tmp_path):
    folder = tmp_path / "made" / "out"
    open_output(folder, Identity({"temperature": 2.0, "sets": ("a", "b")}))
    open_output(folder, Identity({"temperature": 1.0, "sets": ("a", "b")}))  # the first one failed before its first row
    (folder / "a.samples.jsonl").write_text("{}\n")
    open_output(folder, Identity({"temperature": 1.0, "sets": ("a", "b")}))
    with pytest.raises(BadInput, match=r"temperature \(1.0 there, 0.5 now\)"):
        open_output(folder, Identity({"temperature": 0.5, "sets": ("a", "b")}))
    (folder / "config.json").write_text("{")
    with pytest.raises(BadInput, match=r"config\.json"):
        open_output(folder, Identity({"temperature": 1.0}))


def test_a_fingerprint_is_of_the_weights_wherever_they_are(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(3 << 20))
    before = fingerprint(tmp_path / "here")
    assert fingerprint(tmp_path / "there") == before
    for place in (0, -1):
        content = bytearray(3 << 20)
        content[place] = 1
        (tmp_path / "there" / "model.safetensors").write_bytes(content)
        assert fingerprint(tmp_path / "there") != before


def test_the_hash_of_a_folder_is_that_of_its_files(tmp_path):
    (tmp_path / "a").write_text("1")
    before = sha256(tmp_path)
    (tmp_path / "b").write_text("2")
    assert sha256(tmp_path) != before
    assert sha256(tmp_path / "a") == "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"
