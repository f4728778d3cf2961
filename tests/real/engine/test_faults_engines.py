"""Real engines that are killed, stopped, updated and moved from under load: tests/support/faults.py, in a process.

One run gives all phases, since engines are slow to start; each test reads what its phase gave.
"""

import json
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.timeout(600)  # mostly to start engines


@pytest.fixture(scope="module")
def found():
    command = [sys.executable, "-m", "tests.support.faults"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


def test_a_gpu_that_is_not_there_is_no_cpu(found):
    """The engines here are vLLM's for the CPU."""
    assert re.match(r"replica \d did not start: vLLM finds no GPU here, and devices are \(0, 1\)", found["no_gpu"])


def test_an_undisturbed_run_gives_every_turn_its_length(found):
    assert found["quiet"] == [80]
    assert found["prefilled"] > 0


def test_turns_that_are_moved_give_the_same_tokens(found):
    assert found["moves"] > 5
    assert found["moved"]


def test_an_update_in_flight_loses_no_token_and_each_tells_its_version(found):
    """The weights are the same ones again: only the version differs."""
    assert found["updated"]
    assert 1 in found["versions"]


def test_engines_killed_at_random_under_load_change_no_token(found):
    assert found["deaths"] == 4, "three killed and one stopped"
    assert found["killed"]


def test_what_engines_sample_under_seeds_is_not_greedy(found):
    """So that the test before compares what seeds give."""
    assert found["sampled"]


def test_engines_killed_as_they_are_forked_are_started_again_and_the_node_is_not_told_to_end(found):
    assert found["born"] == 4, "two are killed, one by SIGTERM and one by SIGKILL"
    assert found["live_after_births"] == [0, 1]
    assert found["deaths_at_birth"] == 2
    assert found["after_births"] == 80


def test_an_engine_that_dies_as_it_is_forked_is_named_when_it_is_not_started_again(found):
    assert re.match(r"replica \d did not start: ", found["killed_cause"])


def test_replacements_take_their_share_of_what_follows(found):
    assert found["served"] == {"0": 400, "1": 400}, "of ten turns of 80 tokens each"


def test_an_engine_that_hangs_is_killed_and_its_turns_go_on(found):
    assert found["stopped"]


def test_afterwards_the_fleet_is_whole_and_nothing_is_left(found):
    assert found["recovered"]
    assert found["in_books"] == []
    assert found["left"] == []


def test_what_a_drained_engine_still_has_goes_on_elsewhere(found):
    assert found["live"] == [1]
    assert found["drained"]


def test_a_prompt_from_beyond_the_vocabulary_is_refused_and_kills_no_engine(found):
    """As from a tokenizer that knows more tokens than the model."""
    assert found["refused"] == "replica 1 refuses the request: token id 512 is beyond the model's vocabulary of 512"
    assert found["unharmed"]


def test_the_death_of_an_idle_engine_is_noticed(found):
    assert found["noticed"]


def test_when_all_engines_are_dead_fleet_and_turns_end_clearly(found):
    assert found["fleet_end"].startswith("no replica is left: each died 1 times; last cause: ")
    assert found["turns_ended"] == 10
    # A turn that both engines died under is told so.
    assert all("no replica is left" in end or "no third one gets it" in end for end in found["turn_ends"])
