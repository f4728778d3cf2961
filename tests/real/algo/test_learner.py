"""The learner as the node sees it: real ranks under PyTorch's launcher, real ZeroMQ, real FSDP over gloo."""

import dataclasses
import itertools
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from algo.learner.config import LearnerConfig
from algo.learner.learner import Fatal, check_first
from engine.learner import messages
from engine.learner.process import LearnerDied, LearnerProcess, LearnerProcessConfig
from engine.types import Batch
from tests.support.algo_fakes import CANARY, batch, write_checkpoint
from tests.support.algo_node import launch
from tests.support.paths import ROOT

CONFIG = {"threads": 1, "micro_batch_tokens": 256, "lr": 1e-3}
ANSWER_S = 60
NOTED = (1, 3, 8)  # of each batch


class Node:
    """The node's end, synchronous."""

    def __init__(self, socket, process):
        self.socket, self.process = socket, process

    def ask(self, message, arrays=None):
        self.socket.send_multipart(messages.pack(message, arrays))
        return self.receive()

    def receive(self):
        assert self.socket.poll(ANSWER_S * 1000), "no answer"
        return messages.unpack_reply(self.socket.recv_multipart())

    def train(self, step, trajectories=12):
        whole = batch(trajectories, step=step)
        return self.ask(messages.Train(step=step, version=step + 1, rows=NOTED), whole.arrays())


@contextmanager
def node(folder, ranks=1):
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.linger = 0
        address = f"ipc://{folder}/{time.monotonic_ns()}"
        socket.bind(address)
        process = launch(address, ranks)
        try:
            yield Node(socket, process)
        finally:
            try:
                with suppress(zmq.Again):  # it has left already
                    socket.send_multipart(messages.pack(messages.Stop()), zmq.NOBLOCK)
                process.wait(20)
            finally:
                process.kill()
                process.wait()


def configure(checkpoint, weights, **fields):
    return messages.Configure(
        checkpoint=str(checkpoint), learner=CONFIG | fields, canary=CANARY, weights_dir=str(weights), seed=3
    )


def hf_logprobs(model, sequences):
    with torch.no_grad():
        parts = []
        for ids in sequences:
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            parts.append(logprobs.gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1))
    return torch.cat(parts).numpy()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny")


@dataclasses.dataclass
class Run:
    """Replies, canaries and published weights of a run of two steps, and what came after."""

    ready: messages.Ready
    replies: list
    canaries: list
    weights: list
    files: list
    saved: object = None
    refused: object = None
    empty: object = None
    failed: object = None
    scores: object = None
    noted: list = dataclasses.field(default_factory=list)
    exit_code: int = 0


def copied(path):
    """load_file maps, and the version after the next is written into the same memory."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def two_steps(folder, checkpoint, ranks, after=None):
    with node(folder, ranks) as peer:
        ready, arrays = peer.ask(configure(checkpoint, folder))
        assert isinstance(ready, messages.Ready), ready
        run = Run(ready, [], [arrays["canary"]], [copied(ready.weights)], [])
        for step in range(2):
            reply, arrays = peer.train(step)
            assert isinstance(reply, messages.Trained), reply
            run.replies.append(reply)
            run.canaries.append(arrays["canary"])
            run.noted.append({name: arrays[name] for name in ("logprobs", "entropy", "logprob_gradient")})
            run.weights.append(copied(reply.weights))
        run.files = sorted(path.name for path in folder.glob("*.safetensors"))
        reply, arrays = peer.ask(messages.Score(), batch(6, step=2).arrays())
        assert isinstance(reply, messages.Scored), reply
        run.scores = arrays["logprobs"]
        if after:
            after(peer, run)
    return run


@pytest.fixture(scope="module")
def one(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("one")

    def after(peer, run):
        full = "/dev/full/checkpoint"  # a path that can never be written
        run.refused, _ = peer.ask(messages.Save(path=full))
        run.saved, _ = peer.ask(messages.Save(path=str(folder / "saved"), chat_template="the run's", end_of_turn=7))
        empty = batch(0, step=2)
        run.empty, arrays = peer.ask(messages.Train(step=2, version=3), empty.arrays())
        run.canaries.append(arrays["canary"])
        broken = batch(6, step=3)
        logprobs = broken.logprobs_N.copy()
        logprobs[np.flatnonzero(broken.sampled_N)[3]] = np.nan
        broken = Batch(step=3, **(broken.arrays() | {"logprobs_N": logprobs}))
        run.failed, _ = peer.ask(messages.Train(step=3, version=4), broken.arrays())
        run.exit_code = peer.process.wait(20)

    return two_steps(folder, checkpoint, 1, after)


def test_first_weights_are_the_checkpoint_in_fp32(one, checkpoint):
    assert one.ready.world_size == 1
    source = load_file(checkpoint / "model.safetensors")
    assert one.weights[0].keys() == source.keys()
    for name, tensor in one.weights[0].items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, source[name].float())


def test_canary_is_the_forward_pass_of_the_published_weights(one, checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for weights, canary in zip(one.weights, one.canaries, strict=False):
        model.load_state_dict(weights, strict=False)
        assert canary.dtype == np.float32
        np.testing.assert_allclose(canary, hf_logprobs(model, CANARY), atol=2e-6)
    assert abs(one.canaries[0] - one.canaries[1]).max() > 1e-4


def test_metrics_are_complete_and_finite(one):
    for reply in one.replies:
        metrics = reply.metrics
        assert np.isfinite(list(metrics.values())).all()
        assert metrics["trajectories"] == 12
        assert metrics["tokens"] == batch(12, step=reply.step).sampled_N.sum()
        assert 0 <= metrics["padding_waste"] < 0.5
        assert metrics["grad_norm"] > 0
        assert metrics["peak_bytes"] > 1 << 20
        assert metrics.keys() >= {
            *("loss", "entropy", "clip_low", "clip_high", "ratio_mean", "ratio_max", "kl"),
            *("mismatch_max", "train_s", "publish_s", "canary_s"),
        }
    assert [reply.metrics["lr"] for reply in one.replies] == pytest.approx([1e-3 / 3, 2e-3 / 3])


@pytest.mark.smoke
def test_two_ranks_train_like_one_and_name_what_they_refuse(one, tmp_path, checkpoint):
    def after(peer, run):
        made_up = batch(6, step=2)
        arrays = made_up.arrays() | {"versions_N": np.where(made_up.sampled_N, 2, -1).astype(np.int32)}
        run.failed, _ = peer.ask(messages.Train(step=2, version=3), arrays)
        run.exit_code = peer.process.wait(20)

    two = two_steps(tmp_path, checkpoint, 2, after)
    np.testing.assert_allclose(two.scores, one.scores, atol=1e-4)
    assert isinstance(two.failed, messages.Failed)
    assert re.search(r"step 2: .*tokens of version 2 .*_tolerance.*trajectory \d of the batch", two.failed.reason)
    assert two.exit_code != 0
    assert two.ready.world_size == 2
    for first, second in zip(one.replies, two.replies, strict=True):
        for name in ("loss", "grad_norm", "entropy", "kl", "tokens", "mismatch_max"):
            assert second.metrics[name] == pytest.approx(first.metrics[name], rel=1e-4, abs=1e-6)
    for first, second in zip(one.noted, two.noted, strict=True):
        for name in first:
            np.testing.assert_allclose(first[name], second[name], rtol=1e-3, atol=1e-5)
    for first, second in zip(one.weights, two.weights, strict=True):
        assert first.keys() == second.keys()
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=0, atol=1e-5)


def test_what_is_noted_of_tokens_follows_the_canary(one):
    for step, noted in enumerate(one.noted):
        whole = batch(12, step=step)
        ends_B = np.cumsum(whole.lengths_B)
        sampled_N = np.concatenate([whole.sampled_N[ends_B[row] - whole.lengths_B[row] : ends_B[row]] for row in NOTED])
        for values_N in noted.values():
            assert (np.isfinite(values_N) == sampled_N).all()
        assert (noted["entropy"][sampled_N] > 0).all()
        assert (noted["logprobs"][sampled_N] < 0).all()


def test_scores_are_the_forward_pass_of_the_current_weights(one, checkpoint):
    whole = batch(6, step=2)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.load_state_dict(one.weights[-1], strict=False)
    sequences = np.split(whole.token_ids_N, np.cumsum(whole.lengths_B)[:-1])
    expected_N = np.concatenate([[0.0, *hf_logprobs(model, [ids.tolist()])] for ids in sequences])
    np.testing.assert_allclose(one.scores, np.where(whole.sampled_N, expected_N, 0), atol=1e-5)


def test_published_files_do_not_pile_up(one):
    assert one.files == ["weights-1.safetensors", "weights-2.safetensors"]
    assert [os.path.basename(reply.weights) for reply in one.replies] == one.files


def test_saved_checkpoint_loads_and_is_the_trained_one_in_bf16(one, checkpoint):
    assert isinstance(one.saved, messages.Saved)
    model = AutoModelForCausalLM.from_pretrained(one.saved.path)
    state, written = model.state_dict(), load_file(os.path.join(one.saved.path, "model.safetensors"))
    assert written.keys() == one.weights[-1].keys()
    for name, tensor in one.weights[-1].items():
        assert written[name].dtype == torch.bfloat16
        assert torch.equal(written[name], tensor.bfloat16())
        assert torch.equal(state[name], written[name])
    names = {path.name for path in checkpoint.iterdir()}
    files = {path.name: path.stat().st_mode for path in type(checkpoint)(one.saved.path).iterdir()}
    assert files.keys() == names | {"generation_config.json"}
    assert files["model.safetensors"] == files["config.json"], "who may read the one may read the other"


def test_a_saved_checkpoint_has_the_template_and_the_end_token_of_the_run(one):
    described = json.loads(Path(one.saved.path, "tokenizer_config.json").read_text())
    assert described["chat_template"] == "the run's"
    assert json.loads(Path(one.saved.path, "generation_config.json").read_text())["eos_token_id"] == 7


def test_a_save_that_cannot_be_written_names_the_path_and_leaves_the_learner_serving(one):
    assert isinstance(one.refused, messages.Failed)
    assert "/dev/full/checkpoint" in one.refused.reason
    assert isinstance(one.saved, messages.Saved)


def test_empty_batch_updates_nothing_but_gets_its_version(one):
    assert isinstance(one.empty, messages.Trained)
    assert one.empty.metrics["tokens"] == 0
    assert one.empty.weights.endswith("weights-3.safetensors")
    assert np.array_equal(one.canaries[-1], one.canaries[-2])


def test_non_finite_loss_fails_with_numbers_and_ends_the_learner(one):
    assert isinstance(one.failed, messages.Failed)
    assert "step 3" in one.failed.reason
    assert "nan" in one.failed.reason
    assert "trajectory 0 of the batch, position 7 (turn 1)" in one.failed.reason
    assert one.exit_code != 0


WRONG = {  # files of the checkpoint, fields of the learner, and what is named
    "missing": ({}, {}, "model: config.json"),
    "model": ({"config.json": "{}"}, {}, "config.json names no model_type"),
    "weights": ({"config.json": '{"model_type": "qwen3"}'}, {}, "safetensors"),
    "vocabulary": (
        {"config.json": '{"model_type": "qwen3", "vocab_size": 9}', "model.safetensors": ""},
        {},
        "beyond the model's vocabulary of 9",
    ),
    "field": (
        {"config.json": '{"model_type": "qwen3"}', "model.safetensors": ""},
        {"learning_rate": 1.0},
        "learning_",
    ),
    "schedule": (
        {"config.json": '{"model_type": "qwen3"}', "model.safetensors": ""},
        {"schedule": "cosine"},
        "LearnerConfig.steps",
    ),
}


def wrong(folder, trouble):
    """The first message, and what must be named."""
    files, fields, named = WRONG[trouble]
    (folder / "model").mkdir()
    for name, text in files.items():
        (folder / "model" / name).write_text(text)
    return configure(folder / "model", folder, **fields), named


@pytest.mark.parametrize("trouble", WRONG)
def test_a_wrong_configuration_is_named_before_anything_is_loaded(tmp_path, trouble):
    message, named = wrong(tmp_path, trouble)
    with pytest.raises((Fatal, ValueError, TypeError), match=re.escape(named)):
        check_first(messages.pack(message))


@pytest.mark.parametrize("trouble", ["vocabulary", "field"])
def test_a_wrong_configuration_ends_the_learner_at_once_with_one_line(tmp_path, trouble):
    message, named = wrong(tmp_path, trouble)
    with node(tmp_path) as peer:
        reply, _ = peer.ask(message)
        assert isinstance(reply, messages.Failed)
        assert named in reply.reason
        assert "\n" not in reply.reason
        assert peer.process.wait(20) != 0


BROKEN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Broken:
    def __call__(self, tokens, totals):
        return tokens.logprobs_M["mine"].sum(), {}
"""


async def test_a_bug_in_a_loss_of_yours_shows_its_line_in_the_log(tmp_path, checkpoint, monkeypatch):
    (tmp_path / "your_loss.py").write_text(BROKEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    process, log = LearnerProcessConfig(module="algo.learner"), tmp_path / "learner.log"
    async with LearnerProcess(process, tmp_path, log) as learner:
        await learner.configure(configure(checkpoint, tmp_path, loss={"type": "your_loss:Broken"}))
        with pytest.raises(LearnerDied, match="step 0: IndexError"):
            await learner.train(batch(4), version=1)
    assert f'File "{tmp_path}/your_loss.py", line 7, in __call__' in log.read_text()


NODE = """
import os, sys, zmq
from tests.support.algo_node import launch
socket = zmq.Context().socket(zmq.PAIR)
monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
socket.bind(sys.argv[1])
launcher = launch(sys.argv[1], ranks=2, stdout=2)
monitor.recv_multipart()
ranks = open(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read().split()
print(launcher.pid, *ranks, flush=True)
sys.stdin.read()
"""


def wait_for_exit(pidfd, seconds):
    watch = select.poll()
    watch.register(pidfd, select.POLLIN)
    return bool(watch.poll(seconds * 1000))


@pytest.mark.parametrize("victim", ["node", "launcher"])
def test_no_process_outlives_the_node_or_the_launcher(tmp_path, victim):
    command = [sys.executable, "-c", NODE, f"ipc://{tmp_path}/learner"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        launcher, *ranks = map(int, parent.stdout.readline().split())
        assert len(ranks) == 2
        watched = [os.pidfd_open(pid) for pid in (launcher, *ranks)]
        os.kill(parent.pid if victim == "node" else launcher, signal.SIGKILL)
        try:
            if victim == "launcher":
                watched.pop(0)  # dead, but its parent has yet to notice
            assert all(wait_for_exit(pidfd, 60) for pidfd in watched)
        finally:
            parent.kill()
            for pid in (launcher, *ranks):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("grad_clip", -1.0),
        ("warmup_steps", -1),
        ("minibatches", 0),
        ("micro_batch_tokens", 0),
        ("threads", 0),
        ("betas", (0.9, 1.0)),
        ("weight_decay", -0.1),
        ("weight_transfer", "files"),
        ("weights_dtype", "float16"),
        ("grad_clip", None),
        ("lr", "3e-4"),
        ("steps", "100"),
        ("minibatches", 1.5),
        ("lora_rank", 8.0),
        ("warmup_steps", None),
        ("betas", 0.9),
        ("lora_targets", "all-linear"),
        ("lr", math.inf),
        ("weight_decay", math.inf),
        ("adam_eps", 0.0),
        ("schedule", "step"),
        ("fp32_head", "yes"),
        ("activation_checkpointing", "False"),
    ],
)
def test_config_names_the_wrong_field_and_its_value(field, value):
    with pytest.raises(ValueError, match=rf"LearnerConfig\.{field} .*" + re.escape(repr(value))):
        LearnerConfig(**{field: value})


def test_a_schedule_falls_over_steps_of_its_own_or_over_those_of_the_run():
    with pytest.raises(ValueError, match=r"LearnerConfig\.steps .* got 10"):
        LearnerConfig(steps=10)
    for schedule in ("cosine", "linear"):
        config = LearnerConfig(schedule=schedule)
        with pytest.raises(ValueError, match=rf"LearnerConfig\.steps .*{schedule}"):
            config.lr_at(1)
        assert config.for_run(40).steps == 40
        assert dataclasses.replace(config, steps=10).for_run(40).steps == 10
    assert LearnerConfig().for_run(40) == LearnerConfig()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("decay_from", [0.0, 0.1, 0.5])
def test_a_rate_rises_in_the_warm_up_falls_after_it_and_stays_at_its_floor(schedule, decay_from):
    config = LearnerConfig(lr=2.0, warmup_steps=20, schedule=schedule, steps=100, decay_from=decay_from, decay_to=0.25)
    rates = [config.lr_at(batch) for batch in range(1, 121)]
    start = max(20, int(100 * decay_from))
    assert rates[:20] == pytest.approx([2.0 * batch / 20 for batch in range(1, 21)])
    assert rates[19 : start + 1] == [2.0] * (start - 18)
    falling = rates[start:100]
    assert all(after <= before for before, after in itertools.pairwise(falling))
    assert rates[start + (100 - start) // 2] == pytest.approx(2.0 * {"linear": 0.5, "cosine": 0.625}[schedule])
    assert rates[100:] == pytest.approx([0.5] * 20)


def test_a_run_shorter_than_its_warm_up_has_a_rate():
    config = LearnerConfig(lr=1.0, warmup_steps=10, schedule="cosine", steps=3)
    assert [config.lr_at(batch) for batch in (1, 2, 3)] == pytest.approx([0.1, 0.2, 0.3])


def test_config_survives_the_wire():
    config = LearnerConfig(lr=1e-4)
    frames = messages.pack(configure("x", "y", **dataclasses.asdict(config)))
    request, _ = messages.unpack_request(frames)
    assert LearnerConfig(**request.learner) == config
