"""Checkpoints of the learner: what goes on from one is what would have been, and a write that fails is heard of."""

import dataclasses
import json
import os
import pickle

import pytest
import torch
import torch.distributed as dist

from algo.learner.config import LearnerConfig
from algo.learner.state.checkpoint import KEPT, CheckpointFailed, Checkpoints
from algo.learner.state.publish import full_state
from algo.learner.trainer import Trainer
from engine.run.checkpoints import CheckpointFolder, damage
from tests.support.algo_fakes import CANARY, batch, write_checkpoint

CONFIG = LearnerConfig(threads=1, lr=1e-3)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('store')}/s", rank=0, world_size=1)
    yield write_checkpoint(tmp_path_factory.mktemp("source") / "tiny")
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def trainer(source, tmp_path):
    return lambda: Trainer(CONFIG, source, CANARY, tmp_path / "weights", seed=5)


def weights(trainer):
    return torch.cat([tensor.flatten() for tensor in full_state(trainer.scorer).values()])


def test_what_goes_on_from_a_checkpoint_is_what_would_have_been(trainer, tmp_path):
    first, second = trainer(), trainer()
    for step in range(2):
        first.train(batch(16, step=step))
    first.checkpoint(tmp_path / "step-000002", 2)
    wanted = [first.train(batch(16, step=step))["loss"] for step in (2, 3)]  # while it is written
    first.checkpoints.wait()
    assert damage(tmp_path / "step-000002") is None
    torch.manual_seed(99)
    assert second.restore(tmp_path / "step-000002") == 2
    assert second.trained_batches == 2
    assert torch.initial_seed() != 99
    second.score_canary()  # gathers the weights, as it does before the first step
    assert [second.train(batch(16, step=step))["loss"] for step in (2, 3)] == wanted
    assert torch.equal(weights(first), weights(second))


def test_a_checkpoint_before_the_first_update_changes_nothing_of_it(trainer, tmp_path):
    """The batches before it may all have been empty."""
    first, second, resumed = trainer(), trainer(), trainer()
    first.checkpoint(tmp_path / "step-000001", 1)
    first.checkpoints.wait()
    resumed.restore(tmp_path / "step-000001")
    for subject in (first, second, resumed):
        subject.train(batch(16))
    assert torch.equal(weights(first), weights(second))
    assert torch.equal(weights(resumed), weights(second))


def test_what_goes_on_with_other_options_has_them(trainer, source, tmp_path):
    first = trainer()
    first.train(batch(16))
    first.checkpoint(tmp_path / "step-000001", 1)
    first.checkpoints.wait()
    config = dataclasses.replace(CONFIG, lr=2e-3, weight_decay=0.5, betas=(0.8, 0.9), adam_eps=1e-6)
    second = Trainer(config, source, CANARY, tmp_path / "weights", seed=5)
    second.restore(tmp_path / "step-000001")
    second.train(batch(16, step=1))
    for options, decay in zip(second.optimizer.param_groups, (0.5, 0.0), strict=True):
        assert (options["lr"], options["weight_decay"]) == (config.lr_at(2), decay)
        assert (options["betas"], options["eps"]) == ((0.8, 0.9), 1e-6)


def test_what_goes_on_stands_where_the_schedule_stood(source, tmp_path):
    config = dataclasses.replace(CONFIG, warmup_steps=2, schedule="cosine", steps=8, decay_to=0.1)
    first, second = (Trainer(config, source, CANARY, tmp_path / "weights", seed=5) for _ in range(2))
    rates = [first.train(batch(16, step=step))["lr"] for step in range(4)]
    first.checkpoint(tmp_path / "step-000004", 4)
    first.checkpoints.wait()
    second.restore(tmp_path / "step-000004")
    rates += [second.train(batch(16, step=step))["lr"] for step in range(4, 8)]
    assert rates == [config.lr_at(number) for number in range(1, 9)]
    assert rates[0] < rates[1] == rates[2] > rates[3] > rates[7] > 0.1 * config.lr


class OfOtherRanks(Checkpoints):
    """Of ranks that had no rank 0."""

    _random = {}  # noqa: RUF012


def test_a_rank_that_was_not_there_goes_on_with_random_numbers_of_its_own_seed(trainer, tmp_path):
    first = trainer()
    first.train(batch(16))
    first.checkpoints = OfOtherRanks(first.scorer, first.optimizer)
    first.checkpoint(tmp_path / "step-000001", 1)
    first.checkpoints.wait()
    second = trainer()
    assert second.restore(tmp_path / "step-000001") == 1
    assert torch.equal(weights(first), weights(second))


def test_the_two_newest_are_kept_and_damage_is_named(trainer, tmp_path):
    subject, folder = trainer(), CheckpointFolder(tmp_path / "checkpoints")
    (folder.path / ".step-000003").mkdir(parents=True)  # of a learner that was killed
    (copied := folder.path / "step-000002.bak").mkdir()  # by the user
    for step in (1, 2, 3):
        subject.checkpoint(folder.of(step), step)
    subject.checkpoints.wait()
    assert folder.steps() == [2, 3]
    assert len(folder.steps()) == KEPT
    assert [damage(folder.of(step)) for step in folder.steps()] == [None, None]
    assert copied.exists()
    [shard] = folder.of(3).glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert shard.name in damage(folder.of(3))
    assert damage(folder.of(2)) is None
    (folder.of(2) / "manifest.json").unlink()
    assert "manifest.json" in damage(folder.of(2))


def test_what_cannot_be_written_or_read_says_why(trainer, source, tmp_path):
    subject = trainer()
    (tmp_path / "file").write_text("")
    subject.checkpoint(tmp_path / "file" / "step-000001", 1)
    with pytest.raises(CheckpointFailed, match=r"cannot write .*/step-000001: NotADirectoryError.*; \d+ MiB are free"):
        subject.checkpoint(tmp_path / "step-000002", 2)
    with pytest.raises(CheckpointFailed, match=f"cannot read checkpoint {tmp_path}/nowhere: FileNotFoundError"):
        subject.restore(tmp_path / "nowhere")
    (tmp_path / ".step-000002").symlink_to("/proc")  # where no file can be written
    subject.checkpoint(tmp_path / "step-000002", 2)
    with pytest.raises(CheckpointFailed, match=r"cannot write checkpoint .*/step-000002: rank 0: FileNotFoundError"):
        subject.checkpoints.wait()
    (tmp_path / ".step-000002").unlink()
    subject.checkpoint(tmp_path / "step-000002", 2)
    subject.checkpoints.wait()
    assert json.loads((tmp_path / "step-000002" / "manifest.json").read_text())
    other = Trainer(dataclasses.replace(CONFIG, lora_rank=2), source, CANARY, tmp_path / "weights", seed=5)
    with pytest.raises(CheckpointFailed, match=r"cannot read .*/step-000002: rank 0: RuntimeError: Missing key"):
        other.restore(tmp_path / "step-000002")
    [shard] = (tmp_path / "step-000002").glob("*.distcp")
    os.truncate(shard, 100)
    with pytest.raises(CheckpointFailed, match=r"cannot read .*/step-000002: rank 0: "):
        subject.restore(tmp_path / "step-000002")


def test_a_checkpoint_of_another_model_is_refused(trainer, tmp_path):
    """The folder that the run began from may hold another one by now, without a weight that was trained."""
    first, second = trainer(), trainer()
    first.scorer.model.extra = torch.nn.Parameter(torch.zeros(3))
    first.checkpoints.write(tmp_path / "step-000001", {"version": 1, "trained_batches": 1})
    first.checkpoints.wait()
    with pytest.raises(CheckpointFailed, match=r"step-000001: KeyError: 'the model has no model\.extra'"):
        second.restore(tmp_path / "step-000001")


class Runs:
    """Makes the file when it is unpickled."""

    def __init__(self, ran):
        self.ran = ran

    def __reduce__(self):
        return os.mkdir, (str(self.ran),)


@pytest.fixture
def written(trainer, tmp_path):
    first = trainer()
    first.train(batch(16))
    first.checkpoint(tmp_path / "step-000001", 1)
    first.checkpoints.wait()
    return tmp_path / "step-000001"


def described(path, change):
    """Changes the description of a checkpoint."""
    with (path / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    with (path / ".metadata").open("wb") as file:
        pickle.dump(metadata, file)


@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "version"])
def test_a_description_that_would_run_code_is_refused_by_name(trainer, written, tmp_path, place):
    described(written, lambda metadata: setattr(metadata, place, Runs(tmp_path / "ran")))
    with pytest.raises(CheckpointFailed, match=r"\.metadata names posix\.mkdir"):
        trainer().restore(written)
    assert not (tmp_path / "ran").exists()


def test_a_value_that_would_run_code_is_refused(trainer, written, tmp_path):
    def change(metadata):
        [index] = [index for index in metadata.storage_data if index.fqn == "counters.version"]
        info = metadata.storage_data[index]
        torch.save(Runs(tmp_path / "ran"), written / "mine.distcp")
        metadata.storage_data[index] = dataclasses.replace(
            info, relative_path="mine.distcp", offset=0, length=(written / "mine.distcp").stat().st_size
        )

    described(written, change)
    with pytest.raises(CheckpointFailed, match="step-000001"):
        trainer().restore(written)
    assert not (tmp_path / "ran").exists()


def test_a_description_reads_files_of_its_own_folder_only(trainer, written, tmp_path):
    def change(metadata):
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = dataclasses.replace(
                info, relative_path=f"../step-000001/{info.relative_path}"
            )

    described(written, change)
    with pytest.raises(CheckpointFailed, match="not one of its folder"):
        trainer().restore(written)


def test_a_checkpoint_of_another_python_is_read(trainer, written):
    file = written / ".metadata"
    content = pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)  # it names classes as text: module, name
    names = [b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath"]
    mine, other = names if names[0] in content else reversed(names)
    assert mine in content
    file.write_bytes(content.replace(mine, other))
    trainer().restore(written)
