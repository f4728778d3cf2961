"""Two ranks, one of them killed: a learner that starts from the checkpoint trains what would have been trained."""

import os
import signal

import numpy as np
import psutil
from safetensors.torch import load_file

from engine.learner import process as link
from engine.run.checkpoints import CheckpointFolder, damage
from tests.real.algo.test_learner import configure, node
from tests.support.algo_fakes import write_checkpoint


def numbers(reply):
    return {name: reply.metrics[name] for name in ("loss", "grad_norm", "entropy", "ratio_max", "tokens", "lr")}


def test_it_goes_on_from_its_checkpoint_and_a_failed_one_is_heard_of(tmp_path):
    source, folder = write_checkpoint(tmp_path / "tiny"), CheckpointFolder(tmp_path / "checkpoints")
    with node(tmp_path, ranks=2) as peer:
        ready, _ = peer.ask(configure(source, tmp_path / "first"))
        assert (type(ready), getattr(ready, "version", None)) == (link.Ready, 0), ready
        peer.train(0)
        peer.train(1)
        answer, _ = peer.ask(link.Checkpoint(path=str(folder.of(2)), version=2))
        assert isinstance(answer, link.Saved)
        wanted, canary = peer.train(2)
        answer, _ = peer.ask(link.Checkpoint(path=str(folder.of(3)), version=3))
        assert folder.steps()[0] == 2, "one is complete before the next is begun"
        rank = next(child for child in psutil.Process(peer.process.pid).children() if child.is_running())
        os.kill(rank.pid, signal.SIGKILL)
        assert peer.process.wait(30) != 0
    assert damage(folder.of(2)) is None
    with node(tmp_path, ranks=2) as peer:
        message = configure(source, tmp_path / "second")
        ready, _ = peer.ask(link.Configure(**{**fields(message), "resume": str(folder.of(2))}))
        assert (type(ready), ready.version) == (link.Ready, 2), ready
        found, again = peer.train(2)
        assert numbers(found) == numbers(wanted)
        np.testing.assert_array_equal(again["canary"], canary["canary"])
        weights, others = load_file(found.weights), load_file(wanted.weights)
        assert all((weights[name] == others[name]).all() for name in others)
        peer.ask(link.Checkpoint(path="/dev/full/step-000003", version=3))
        failed, _ = peer.ask(link.Checkpoint(path=str(folder.of(4)), version=4))
        assert isinstance(failed, link.Failed)
        assert "cannot write checkpoint /dev/full/step-000003: NotADirectoryError" in failed.reason
        assert peer.process.wait(30) == 1


def test_another_run_begins_with_its_state_as_version_0(tmp_path):
    source, folder = write_checkpoint(tmp_path / "tiny"), CheckpointFolder(tmp_path / "checkpoints")
    with node(tmp_path, ranks=1) as peer:
        peer.ask(configure(source, tmp_path / "first"))
        peer.train(0)
        peer.train(1)
        peer.ask(link.Checkpoint(path=str(folder.of(2)), version=2))
        wanted, canary = peer.train(2)
    with node(tmp_path, ranks=1) as peer:
        message = configure(source, tmp_path / "second")
        ready, _ = peer.ask(link.Configure(**{**fields(message), "begin_from": str(folder.of(2))}))
        assert (type(ready), ready.version) == (link.Ready, 0), ready
        found, again = peer.train(2)
        assert numbers(found) == numbers(wanted), "moments and the warm-up go on"
        np.testing.assert_array_equal(again["canary"], canary["canary"])


def fields(message):
    return {name: getattr(message, name) for name in message.__struct_fields__}
