"""An agent that answers as a whole, on a real engine with a real jail: tests/support/served_agent.py, in a process."""

import json
import subprocess
import sys

import pytest

from engine.rollout.chat_template import ChatTemplate
from tests.support.paths import ROOT, TINY
from tests.support.served_agent import QUESTIONS, SAMPLES

pytestmark = pytest.mark.timeout(240)  # mostly to start the engine


@pytest.fixture(scope="module")
def twice():
    command = [sys.executable, "-m", "tests.support.served_agent"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_calls_are_run_in_the_jail_and_the_last_message_answers(twice):
    answers = [answer for answers in twice[0] for answer in answers]
    assert len(answers) == len(QUESTIONS) * SAMPLES
    calls = [call for answer in answers for turn in answer["trace"]["turns"] for call in turn["calls"]]
    assert [call["reply"] for call in calls if call["outcome"] == "ok" and call["reply"].isdecimal()]
    assert [answer for answer in answers if "<answer>" in answer["finished"]["message"]["content"]]
    for answer in answers:
        finished, trace = answer["finished"], answer["trace"]
        assert finished["message"]["content"] == trace["turns"][-1]["text"]
        assert finished["reason"] == ("stop" if trace["stop"] == "answer" else "length")


def test_what_was_sampled_last_is_what_the_tokens_say(twice):
    chat = ChatTemplate.load(TINY)
    for answer in (answer for answers in twice[0] for answer in answers):
        finished = answer["finished"]
        assert chat.decode(finished["token_ids"]).removesuffix(chat.end_of_turn_text) == finished["message"]["content"]
        assert len(finished["logprobs"]) == len(finished["token_ids"])
        length = len(finished["prompt_ids"]) + len(finished["token_ids"])
        assert answer["prompt_tokens"] + answer["sampled_tokens"] == length


def test_a_seed_gives_the_same_answers_again(twice):
    first, again = ([[answer["finished"]["message"] for answer in answers] for answers in once] for once in twice)
    assert first == again
    assert len({message["content"] for message in first[0]}) > 1, "samples differ"
