"""What a real engine samples under grammars, against the learner's model and against xgrammar itself.

tests/support/grammar_engine.py, in a process.
"""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xgrammar
from transformers import AutoModelForCausalLM, AutoTokenizer

from algo.learner.config import LearnerConfig
from algo.learner.measure.divergence import Mismatched
from algo.learner.trainer import Trainer
from engine.replica.grammar_mass import FORCED
from engine.replica.port import Delta
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.token_buffer import TokenBuffer
from engine.rollout.tool_call_parser import ToolCall, ToolCallParser
from engine.types import Batch
from tests.support.algo_fakes import CANARY
from tests.support.grammar_engine import GRAMMARS, MOVED
from tests.support.paths import ROOT, TINY

pytestmark = pytest.mark.timeout(300)  # mostly to start the engines
CHAT = ChatTemplate.load(TINY)


def run(*arguments):
    command = [sys.executable, "-m", "tests.support.grammar_engine", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return run()


@pytest.fixture(scope="module")
def turns(found):
    return [turn for turn in found["turns"] if turn["grammar"] != "free"]


def text_of(turn):
    return CHAT.decode(turn["ids"]).removesuffix(CHAT.end_of_turn_text)


def test_each_turn_obeys_its_grammar_also_one_that_was_moved(turns):
    assert len(turns) == 3 * 3 + 2
    ended = [turn for turn in turns if turn["finish"] == "stop"]
    assert len(ended) > len(turns) // 2
    for turn in ended:
        if turn["grammar"] == "json":
            answer = json.loads(text_of(turn))
            assert answer.keys() == {"age"}
            assert 1 <= answer["age"] <= 99
            continue
        parser = ToolCallParser()
        calls = [*parser.feed(text_of(turn)), *parser.finish()]
        assert calls
        assert all(isinstance(call, ToolCall) and [*call.arguments] == ["code"] for call in calls), text_of(turn)
        assert turn["grammar"] == "calls" or len(calls) == 1
    for turn in turns[-2:]:
        assert len(turn["ids"]) > MOVED


def test_a_turn_without_a_grammar_is_what_it_is_alone(found):
    free = [turn for turn in found["turns"] if turn["grammar"] == "free"]
    assert len(free) == 3
    for turn in free:
        assert turn["forced"] == []
        np.testing.assert_allclose(turn["logprobs"], turn["scored"], atol=1e-4)


def test_the_log_probabilities_are_those_of_the_engine_and_of_the_learner_without_the_grammar(found, turns):
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for turn in turns:
        assert len(turn["logprobs"]) == len(turn["forced"]) == len(turn["ids"])
        np.testing.assert_allclose(turn["logprobs"], turn["scored"], atol=1e-4)
        np.testing.assert_allclose(turn["logprobs"], logprobs_of(model, found["prompt"], turn["ids"])[0], atol=1e-4)


def logprobs_of(model, prompt, ids):
    """(log pi of the ids, log pi of every token at each of them)."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    all_TV = logits.log_softmax(-1)
    return all_TV[torch.arange(len(ids)), torch.tensor(ids)].numpy(), all_TV


@pytest.fixture(scope="module")
def log_masses(found, turns):
    """log Z of each token of each turn, by xgrammar and the learner's model, without vLLM."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    size = model.config.vocab_size
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size))
    masses = []
    for turn in turns:
        compiled = compiler.compile_structural_tag(GRAMMARS[turn["grammar"]])
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[CHAT.end_of_turn])
        _, all_TV = logprobs_of(model, found["prompt"], turn["ids"])
        bits = xgrammar.allocate_token_bitmask(1, size)
        of_turn = []
        for token, row in zip(turn["ids"], all_TV, strict=True):
            matcher.fill_next_token_bitmask(bits)
            allowed = (bits[0][torch.arange(size) // 32] >> (torch.arange(size) % 32)) & 1
            of_turn.append(float(row[allowed.bool()].logsumexp(-1)))
            assert matcher.accept_token(token)
        masses.append(of_turn)
    return masses


def test_tokens_are_forced_exactly_where_the_grammar_rules_out_more_than_it_may(turns, log_masses):
    everywhere = 0
    for turn, of_turn in zip(turns, log_masses, strict=True):
        for forced, log_mass in zip(turn["forced"], of_turn, strict=True):
            ruled_out = -np.expm1(log_mass)
            if abs(ruled_out - FORCED) > 1e-5:
                assert forced == (ruled_out > FORCED)
            everywhere += forced
    tokens = sum(len(turn["ids"]) for turn in turns)
    assert 0.02 * tokens < everywhere < 0.98 * tokens, "both kinds are there"


def batch_of(found, turns, logprobs=None):
    """The turns as a batch that version 0 has sampled. logprobs: other ones, and then all tokens are trained."""
    arrays = []
    for at, turn in enumerate(turns):
        buffer = TokenBuffer(found["prompt"])
        forced = turn["forced"] if logprobs is None else [False] * len(turn["ids"])
        values = turn["logprobs"] if logprobs is None else logprobs[at]
        buffer.append_sampled(Delta(turn["ids"], values, "stop", version=0, forced=forced))
        arrays.append(buffer.arrays())
    joined = {f"{name[:-2]}_N": np.concatenate([each[name] for each in arrays]) for name in arrays[0]}
    lengths_B = np.array([len(each["token_ids_T"]) for each in arrays], np.int32)
    advantages_B = np.linspace(-1, 1, len(arrays)).astype(np.float32)
    return Batch(step=1, lengths_B=lengths_B, advantages_B=advantages_B, **joined)


@pytest.fixture
def trainer(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield Trainer(LearnerConfig(threads=1, minibatches=1), TINY, CANARY, tmp_path, seed=5)
    dist.destroy_process_group()


def test_the_mismatch_check_lets_grammars_pass_and_would_not_if_they_were_not_marked(found, turns, log_masses, trainer):
    assert trainer.config.mismatch_bound is not None, "it judges by default"
    whole = batch_of(found, turns)
    of_engine = [np.array(turn["logprobs"]) - of_turn for turn, of_turn in zip(turns, log_masses, strict=True)]
    with pytest.raises(Mismatched):
        trainer.train(batch_of(found, turns, of_engine), version=1)
    trainer.optimizer.zero_grad()
    metrics = trainer.train(whole, version=1)
    assert metrics["mismatch_checked"] == 1
    assert metrics["mismatch_fresh_max"] < 1e-4
    assert metrics["tokens"] == whole.sampled_N.sum() < sum(len(turn["ids"]) for turn in turns)


def test_a_grammar_that_cannot_be_compiled_is_refused_and_the_engine_goes_on(found):
    assert all(found["refusals"].values()), found["refusals"]
    assert "nowhere" in found["refusals"]["schema"]
    assert "\n" not in "".join(found["refusals"].values())
    first = found["turns"][0]
    assert found["after"]["ids"] == first["ids"], "the same seed, after the refusals"


def test_an_engine_without_a_tokenizer_refuses_grammars_and_samples_all_else(tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(TINY, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    found = run(str(bare))
    assert "no grammars for this model" in found["refusals"]["call"]
    assert found["free"]["ids"]
