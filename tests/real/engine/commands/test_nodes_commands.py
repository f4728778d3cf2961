"""What a user types on each machine, and what is printed of it."""

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from engine.commands.node import Options, _options
from engine.console.options import parse
from engine.nodes.build import build_of
from engine.nodes.config import NodeConfig, launcher, node_command
from engine.nodes.lead_protocol import difference
from engine.nodes.messages import LearnerHosts
from engine.programs import learner_host
from engine.programs.invocation import Machines
from engine.recipe import name_of
from recipes.quickstart import Config
from sandbox import keys
from tests.support.paths import ROCSTAR, ROOT

RECIPE = str(ROOT / "recipes" / "quickstart.py")


def quickstart(*words, start=(sys.executable,)):
    return subprocess.run([*start, RECIPE, *words], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("start", [(sys.executable,), (*ROCSTAR, "run")], ids=["python", "rocstar"])
def test_dry_run_prints_a_command_for_each_machine_that_it_can_run(tmp_path, start):
    keys.make(tmp_path / "keys")
    words = ["nodes=tcp://0.0.0.0:5700", f"nodes_keys={tmp_path / 'keys'}", "steps=3", f"runs={tmp_path / 'runs'}"]
    done = quickstart(*words, "dry_run=true", start=start)
    assert done.returncode == 0, done.stderr
    lead, node = (shlex.split(line.partition(":")[2]) for line in done.stdout.splitlines())
    assert lead[:2] == [sys.executable, RECIPE]
    assert set(words) <= set(lead)
    assert not any(word.startswith("dry_run") for word in lead)
    assert node[:2] == [str(Path(sys.executable).with_name("rocstar")), "node"]
    parsed = parse(Options, node[2:])
    assert parsed.lead.endswith(":5700")
    assert parsed.keys == tmp_path / "keys"
    assert not (tmp_path / "runs").exists()


def test_dry_run_says_what_the_other_hosts_of_the_learner_run(tmp_path):
    words = ["nodes=tcp://127.0.0.1:5700", "learner_hosts=3", "learner_at=127.0.0.1:29400", f"runs={tmp_path / 'runs'}"]
    done = quickstart(*words, "dry_run=true")
    assert done.returncode == 0, done.stderr
    _, _, learner = done.stdout.splitlines()
    label, _, command = learner.partition(": ")
    assert "2" in label
    assert parse(Options, shlex.split(command)[2:]).learner


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"learner_hosts": 2, "learner_at": "lead:29400"}, "nodes"),
        ({"learner_hosts": 2, "nodes": "tcp://127.0.0.1:1"}, "learner_at"),
        ({"learner_at": "lead:29400", "nodes": "tcp://127.0.0.1:1"}, "learner_at"),
        ({"learner_hosts": 2, "learner_at": "lead", "nodes": "tcp://127.0.0.1:1"}, "learner_at"),
        ({"learner_hosts": 0}, "learner_hosts"),
    ],
)
def test_hosts_of_the_learner_need_a_place_to_meet_and_a_door(fields, named):
    with pytest.raises(ValueError, match=named):
        Machines(**fields)


def test_all_hosts_of_the_learner_start_the_same_launcher_and_the_lead_is_where_they_meet():
    learner = LearnerHosts(hosts=3, ranks=4, at="lead:29400", module="algo.learner", run="quickstart-1")
    lead, other = launcher(learner), learner_host.command(learner, tmp := ROOT / "there", tmp)
    assert {"--hosts=3", "--at=lead:29400", "--run=quickstart-1"} <= set(lead)
    assert set(lead) <= set(other)
    assert not any(word.startswith("--host=") for word in lead)
    assert "--ranks=4" in other
    assert other[-5:] == ["algo.learner", "--connect", "none", "--checkpoint", str(tmp)]


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "0", "0.0", "10.0.0.0.1", "no-such-host.invalid"])
def test_the_learners_hosts_meet_at_one_address_of_the_lead_and_never_at_all_of_them(host, tmp_path):
    """Whoever reaches the place where they meet can run code in the ranks."""
    words = ["nodes=tcp://127.0.0.1:5700", "learner_hosts=2", f"learner_at={host}:29400", f"runs={tmp_path / 'runs'}"]
    done = quickstart(*words, "dry_run=true")
    assert done.returncode == 2
    assert "learner_at" in done.stderr
    assert repr(f"{host}:29400") in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_lead_without_keys_ends_with_code_2_and_the_field(tmp_path):
    done = quickstart("nodes=tcp://0.0.0.0:5700", f"runs={tmp_path / 'runs'}")
    assert done.returncode == 2
    assert "nodes_keys" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("file", ["ready", "folder"])
def test_a_node_that_begins_is_not_ready_because_one_before_it_was(tmp_path, file):
    """That one was killed, and could not remove its file."""
    (tmp_path / "ready").touch()
    (tmp_path / "folder").mkdir()
    command = [*ROCSTAR, "node", "lead=tcp://127.0.0.1:1", "patience_s=0.1", f"ready_file={tmp_path / file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if file == "ready":
        assert done.returncode == 1, done.stderr
        assert not (tmp_path / "ready").exists()
    else:
        assert done.returncode == 2
        assert "ready_file" in done.stderr


@pytest.mark.parametrize("fields", [{"nodes_only": True}, {"nodes_keys": "keys"}])
def test_options_for_nodes_need_an_address(fields):
    with pytest.raises(ValueError, match="nodes must be an address"):
        Machines(**fields)


def test_what_a_machine_gives_takes_the_place_of_what_the_lead_says():
    lead = ["steps=3", "learner.lr=0.1", "checkpoint=/there", "replicas=2"]
    assert _options(lead, ["lr=0.2", "replicas=4", "checkpoint=/here"]) == [
        "steps=3",
        "lr=0.2",
        "replicas=4",
        "checkpoint=/here",
    ]


def test_what_a_node_sets_for_itself_replaces_no_field_of_a_field():
    lead = ["model=/there", "judge.model=gpt", "tool.name=calculator"]
    own = ["model=/here", "runs=/tmp", "name=node"]
    assert _options(lead, [], own) == ["judge.model=gpt", "tool.name=calculator", *own]


def test_a_node_needs_an_address_and_patience():
    wrong = ("lead:5700", "tcp://lead", "tcp://::1:5700", "tcp://[::1:5700")
    for fields in (*({"lead": address} for address in wrong), {"lead": "tcp://lead:5700", "patience_s": 0}):
        with pytest.raises(ValueError, match="got"):
            NodeConfig(**fields)
    assert "tcp://10.0.0.1:5700" in node_command("tcp://10.0.0.1:5700", None)


def test_the_build_tells_other_sources_and_not_other_machines(tmp_path):
    recipe = tmp_path / "mine.py"
    recipe.write_text("steps = 1\n")
    one = build_of(recipe)
    assert difference(one, build_of(recipe)) is None
    recipe.write_text("steps = 2\n")
    assert "code" in difference(one, build_of(recipe))
    assert name_of(ROOT / "recipes" / "quickstart.py") == "recipes/quickstart.py"
    assert name_of(recipe) == str(recipe)


def test_a_run_is_the_same_whoever_takes_part():
    """The identity of a run has none of these options: it goes on with nodes or without them."""
    options = {field.name for field in dataclasses.fields(Machines)}
    assert {"nodes", "nodes_keys", "nodes_only", "learner_hosts", "learner_at"} <= options
    assert not options & {field.name for field in dataclasses.fields(Config)}
