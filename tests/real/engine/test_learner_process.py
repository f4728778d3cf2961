"""The wire between node and learner, and every way in which a learner can fail to answer."""

import asyncio
import contextlib
import os
import select
import subprocess
import sys
import time
from dataclasses import replace

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from engine.learner.messages import (
    Configure,
    Failed,
    Ready,
    Save,
    Saved,
    Score,
    Scored,
    Stop,
    Train,
    Trained,
    pack,
    unpack_reply,
    unpack_request,
)
from engine.learner.process import LAUNCHER, LearnerDied, LearnerProcess, LearnerProcessConfig, visible
from engine.types import Batch
from tests.support.examples import examples
from tests.support.fakes import a_trajectory
from tests.support.paths import ROOT

STUB = (sys.executable, str(ROOT / "tests/support/stub_learner.py"))
CONFIGURE = Configure(checkpoint="c", learner={"lr": 1e-3}, canary=[[1, 2, 3]], weights_dir="/w", seed=7)

text = st.text(max_size=8)
numbers = st.integers(0, 2**31)
requests = st.one_of(
    st.builds(
        Configure,
        checkpoint=text,
        learner=st.dictionaries(text, st.one_of(numbers, st.floats(allow_nan=False), text), max_size=3),
        canary=st.lists(st.lists(numbers, max_size=4), max_size=3),
        weights_dir=text,
        seed=numbers,
    ),
    st.builds(Train, step=numbers, version=numbers),
    st.builds(Save, path=text),
    st.builds(Score),
    st.builds(Stop),
)
replies = st.one_of(
    st.builds(Ready, weights=text, parameters=numbers, world_size=numbers, versions=st.dictionaries(text, text)),
    st.builds(
        Trained,
        step=numbers,
        version=numbers,
        weights=text,
        metrics=st.dictionaries(text, st.floats(allow_nan=False), max_size=3),
    ),
    st.builds(Saved, path=text),
    st.builds(Scored),
    st.builds(Failed, reason=text),
)
frames = st.dictionaries(
    text,
    st.sampled_from([np.int32, np.float32, np.float64, np.bool_]).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4))
    ),
    max_size=3,
)


@examples(100)
@given(st.one_of(requests.map(lambda m: (m, unpack_request)), replies.map(lambda m: (m, unpack_reply))), frames)
def test_what_was_packed_comes_back(pair, sent):
    message, unpack = pair
    found, received = unpack([bytes(frame) for frame in pack(message, sent)])
    assert found == message
    assert list(received) == list(sent)
    for name, array in sent.items():
        assert received[name].dtype == array.dtype
        np.testing.assert_array_equal(received[name], array)


def test_arrays_that_are_not_contiguous_are_sent_whole():
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, ::-3]
    _, received = unpack_request([bytes(frame) for frame in pack(Stop(), {"a": array})])
    np.testing.assert_array_equal(received["a"], array)


@pytest.mark.parametrize(
    "broken",
    [
        [b"\xc1", b"\xc1"],
        pack(Stop())[:1],
        pack(Stop(), {"a": np.zeros(3)})[:2],
        [*pack(Stop()), b"one too many"],
        pack(Failed(reason="x")),
        [*pack(Stop(), {"a": np.zeros(3)})[:2], b"too short"],
    ],
    ids=["no msgpack", "no specs", "frame missing", "frame too many", "a reply", "short frame"],
)
def test_what_is_not_a_request_is_refused(broken):
    with pytest.raises((ValueError, msgspec.DecodeError)):
        unpack_request(broken)


def test_a_batch_crosses_the_wire_as_it_is():
    batch = Batch.of(3, [a_trajectory(n, sampled=n + 1, version=n) for n in range(3)], np.asarray([1, 0, -1]))
    message, received = unpack_request([bytes(frame) for frame in pack(Train(step=3, version=3), batch.arrays())])
    assert message == Train(step=3, version=3)
    rebuilt = Batch(step=3, **received)
    for name, array in batch.arrays().items():
        np.testing.assert_array_equal(getattr(rebuilt, name), array)


def learner(tmp_path, behaviour, **options):
    config = LearnerProcessConfig(module=behaviour, launcher=STUB, **options)
    return LearnerProcess(config, tmp_path, tmp_path / "learner.log")


def a_batch():
    return Batch.of(1, [a_trajectory(0)], np.asarray([0.5]))


class Watched:
    """A process of the learner's, watched by a descriptor that becomes readable when it has ended."""

    def __init__(self, ready):
        self.fd = os.pidfd_open(ready.parameters)

    def ended(self, within_s=10.0):
        watch = select.poll()  # unlike select it takes any number of a descriptor
        watch.register(self.fd, select.POLLIN)
        ended = bool(watch.poll(within_s * 1000))
        if ended:
            os.close(self.fd)
        return ended


async def test_a_learner_finds_our_modules_from_any_folder(tmp_path):
    with contextlib.chdir(tmp_path):
        async with learner(tmp_path, "works") as process:
            await process.configure(CONFIGURE)


async def test_a_learner_is_configured_trains_saves_and_ends_with_all_its_processes(tmp_path):
    async with learner(tmp_path, "works", ranks=2) as process:
        ready, canary = await process.configure(CONFIGURE)
        assert (ready.weights, ready.world_size) == ("/w/0", 2)
        np.testing.assert_array_equal(canary, np.asarray([-0.5, -1.5], np.float32))
        batch = a_batch()
        trained, canary = await process.train(batch, 1)
        assert (trained.step, trained.version) == (1, 1)
        assert trained.metrics["lengths_B"] == 7
        np.testing.assert_array_equal(canary, batch.logprobs_N)
        await process.save(tmp_path / "checkpoint")
        child = Watched(ready)
        assert not child.ended(0)
    assert process._process.returncode == 0, "asked, not killed"
    assert child.ended()


@pytest.mark.parametrize(
    ("behaviour", "deadline_s", "messages"),
    [
        ("dies", 60.0, ["ended with exit code 3", "learner.log", "RuntimeError: out of memory"]),
        ("loses a rank", 60.0, ["Connection reset by peer", "rank 1 was ended by SIGKILL"]),
        ("follows a rank", 60.0, ["learner: RuntimeError: a bug of rank 1\n", "Connection reset by peer"]),
        ("silent", 0.05, ["did not answer Train within 0.05 s", "waiting for a rank that never comes"]),
        ("fails", 60.0, ["loss is nan at step 1: grad_norm 1e9"]),
        ("confused", 60.0, ["answered Saved to Train"]),
    ],
)
async def test_a_learner_that_does_not_answer_a_step_is_an_error_with_its_last_words(
    tmp_path, behaviour, deadline_s, messages
):
    async with learner(tmp_path, behaviour) as process:
        child = Watched((await process.configure(CONFIGURE))[0])
        process.config = replace(process.config, step_deadline_s=deadline_s)
        with pytest.raises(LearnerDied) as failure:
            await process.train(a_batch(), 1)
    assert all(message in str(failure.value) for message in messages), failure.value
    assert child.ended(), "also the processes of a launcher that died are ended"


@pytest.mark.parametrize(
    ("behaviour", "deadline_s", "messages"),
    [("never", 60.0, ["exit code 1", "no such model"]), ("deaf", 0.05, ["did not answer Configure within 0.05 s"])],
)
async def test_a_learner_that_does_not_start_is_an_error(tmp_path, behaviour, deadline_s, messages):
    async with learner(tmp_path, behaviour, start_deadline_s=deadline_s) as process:
        with pytest.raises(LearnerDied) as failure:
            await process.configure(CONFIGURE)
    assert all(message in str(failure.value) for message in messages), failure.value


async def test_cancelling_the_owner_kills_the_learner_and_stays_a_cancellation(tmp_path):
    ready = asyncio.get_running_loop().create_future()

    async def owner():
        async with learner(tmp_path, "silent") as process:
            ready.set_result(Watched((await process.configure(CONFIGURE))[0]))
            await process.train(a_batch(), 1)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(owner())
        child = await ready
        task.cancel()
    assert task.cancelled()
    assert child.ended()


async def test_cancelling_the_wait_for_the_end_kills_and_stays_a_cancellation(tmp_path):
    """Ctrl-C while a learner that does not want to end is asked to."""
    process = learner(tmp_path, "stays")

    async def owner():
        async with process:
            children.append(Watched((await process.configure(CONFIGURE))[0]))
            leaving.set()

    children, leaving = [], asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(owner())
        await leaving.wait()
        task.cancel()
    assert task.cancelled()
    assert children[0].ended()
    assert process._process.returncode == -9


KILLED = """
import asyncio, os, sys
from pathlib import Path
from engine.learner.process import LearnerProcess, LearnerProcessConfig

async def main():
    config = LearnerProcessConfig(module="works", launcher=(sys.argv[2], "-S", "-c", sys.argv[3]))
    folder = Path(sys.argv[1])
    async with LearnerProcess(config, folder, folder / "log") as process:
        print(process._process.pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_learner_that_starts_is_killed_with_the_node(tmp_path):
    """Its ranks would stay until they had imported torch and missed the node."""
    os.mkfifo(tmp_path / "running")
    launcher = f"open({str(tmp_path / 'running')!r}, 'w'); import time; time.sleep(600)"
    command = [sys.executable, "-c", KILLED, str(tmp_path), sys.executable, launcher]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        launched = psutil.Process(int(node.stdout.readline()))
        (tmp_path / "running").open().close()
        node.kill()
        _, left = psutil.wait_procs([launched], timeout=10)
        for process in left:
            process.kill()
        assert not left


def test_a_learner_that_starts_after_the_end_of_the_node_ends_at_once():
    command = [sys.executable, "-m", "engine.process.tied", str(os.getppid()), "echo", "alive"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")


async def test_a_launcher_that_is_not_there_is_named(tmp_path):
    config = LearnerProcessConfig(module="works", launcher=("/nowhere/launcher",))
    async with LearnerProcess(config, tmp_path, tmp_path / "learner.log") as process:
        with pytest.raises(LearnerDied, match="/nowhere/launcher"):
            await process.configure(CONFIGURE)


STARTING = "import os; open('running', 'w').write(f'{os.getpid()} '); import time; time.sleep(600)"


def test_ranks_that_start_are_killed_with_their_launcher(tmp_path):
    (tmp_path / "starting.py").write_text(STARTING)
    os.mkfifo(tmp_path / "running")
    command = [*LAUNCHER, "--ranks=2", f"--folder={tmp_path}", "starting"]
    with subprocess.Popen(command, cwd=tmp_path, env={"PYTHONPATH": f".{os.pathsep}{ROOT}"}) as launcher:
        with (tmp_path / "running").open() as running:
            pids = running.read().split()
        ranks = [psutil.Process(int(pid)) for pid in pids]
        launcher.kill()
        _, left = psutil.wait_procs(ranks, timeout=10)
        for process in left:
            process.kill()
        assert ranks
        assert not left


ENDS = """
import os, signal, sys, time

rank = int(os.environ["RANK"])
assert (os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("3", str(rank)), os.environ
if sys.argv[1] == "well":
    sys.exit(0)
if rank == 1:
    sys.exit(7) if sys.argv[1] == "fails" else os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("well", 0, ""), ("fails", 1, "rank 1 ended with exit code 7"), ("killed", 1, "rank 1 was ended by SIGKILL")],
)
def test_the_first_rank_that_fails_ends_the_others_and_is_named(tmp_path, how, code, said):
    (tmp_path / "ends.py").write_text(ENDS)
    command = [*LAUNCHER, "--ranks=3", f"--folder={tmp_path}", "ends", how]
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == bool(said)


def test_a_learner_without_ranks_is_refused():
    with pytest.raises(ValueError, match="ranks must be at least 1, got 0"):
        LearnerProcessConfig(module="m", ranks=0)


@pytest.mark.parametrize(
    ("seen", "devices", "names"),
    [(None, (1, 0), "1,0"), ("", (1,), "1"), ("4,6,7", (2, 0), "7,4"), ("GPU-a,GPU-b", (1,), "GPU-b")],
)
async def test_a_learners_gpus_are_counted_among_those_that_the_node_sees(tmp_path, monkeypatch, seen, devices, names):
    """As vLLM counts a replica's."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    async with learner(tmp_path, "works", ranks=len(devices), devices=devices) as process:
        started, deadline = psutil.Process(process._process.pid), time.monotonic() + 10
        while not (environment := started.environ()):  # its program has just begun: the kernel has yet to lay it out
            assert time.monotonic() < deadline
        assert environment["CUDA_VISIBLE_DEVICES"] == names


def test_a_gpu_that_the_node_does_not_see_is_refused():
    with pytest.raises(ValueError, match=r"devices must be below 2 where CUDA_VISIBLE_DEVICES is '4,6', got \(0, 2\)"):
        visible((0, 2), {"CUDA_VISIBLE_DEVICES": "4,6"})
