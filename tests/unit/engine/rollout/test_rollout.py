"""Rollouts: calls leave while the turn goes on, every budget ends, nothing of ours becomes the model's error."""

import asyncio
import json
import re

import numpy as np
import pytest

from engine.fleet.fleet import Superseded
from engine.ports import ToolReply
from engine.rollout.rollout import RolloutConfig, Tally, derive_seed
from engine.run.journal import Journal
from engine.tools.python_tool import PythonSessions, PythonTool
from engine.types import Boundary, StopReason
from engine.user_parts import WrongPart
from sandbox.wire import ToolResult
from tests.support.fakes import Die, Gate, ScriptedRunner, ScriptedSessions, a_prompt, settle
from tests.support.node import ANSWER, CHAT, END, Setup, call, check


def whole(trajectory):
    return CHAT.decode(trajectory.token_ids_T)


async def test_a_conversation_is_what_the_template_renders():
    first, second = f"<reason>I use python.</reason>\n{call('print(6*7)')}", "<answer>42</answer>"
    async with Setup([first + END], [second + END]) as node:
        trajectory = await node.run()
    messages = [
        {"role": "user", "content": "What is 6 * 7?"},
        {"role": "assistant", "content": first},
        {"role": "tool", "content": "print(6*7)"},
        {"role": "assistant", "content": second},
    ]
    assert whole(trajectory) + "\n" == CHAT._tokenizer.apply_chat_template(messages, tokenize=False)
    assert trajectory.stop is StopReason.ANSWER
    assert trajectory.error is None
    assert [(use.name, use.outcome, use.response) for use in trajectory.tool_uses] == [("python", "ok", "print(6*7)")]
    assert all((use.executed, use.jailed) == (True, True) for use in trajectory.tool_uses)


@pytest.mark.parametrize(("end", "said"), [("<|pad|>", "<|pad|>"), ("</tool_call>", "")])
async def test_a_turn_that_ends_at_another_end_token_of_the_model_is_ended_by_ours(end, said):
    """generation_config.json may name several. What follows is what the template renders."""
    first, ends = call("print(6*7)") + said, CHAT._encode(end)
    async with Setup([first], [ANSWER], prepare=lambda replica: setattr(replica, "ends", ends)) as node:
        trajectory = await node.run()
    messages = [
        {"role": "user", "content": "What is 6 * 7?"},
        {"role": "assistant", "content": first},
        {"role": "tool", "content": "print(6*7)"},
        {"role": "assistant", "content": ANSWER.removesuffix(END)},
    ]
    assert whole(trajectory) + "\n" == CHAT._tokenizer.apply_chat_template(messages, tokenize=False)
    assert trajectory.text == first + ANSWER


async def test_a_call_has_started_before_its_turn_is_over():
    rest = Gate()
    async with Setup([call("print(1)"), rest, f" so{END}"], [ANSWER], runner=ScriptedRunner(hold=True)) as node:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(node.run())
            await rest.started.wait()
            await node.runner.started.wait()  # the replica still holds the rest of the turn
            node.runner.release()
            await settle()
            assert node.runner.running == 0
            assert not running.done()
            rest.release()
        trajectory = running.result()
    [use], _ = (turn.tool_uses for turn in trajectory.turns)
    assert use.closed_at < use.dispatched_at < use.finished_at < trajectory.turns[0].finished_at
    assert use.overlap_s == pytest.approx(use.finished_at - use.dispatched_at)


async def test_the_next_turn_waits_for_the_tool():
    rest = Gate()
    async with Setup([call("print(1)"), rest, END], [ANSWER], runner=ScriptedRunner(hold=True)) as node:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(node.run())
            await node.runner.started.wait()
            rest.release()
            await settle(60)
            assert len(node.replicas.made[0].requests) == 1
            assert len(node.fleet._tool_waiting) == 1
            node.runner.release()
        use = running.result().tool_uses[0]
    assert use.finished_at > running.result().turns[0].finished_at > use.dispatched_at
    assert use.overlap_s == pytest.approx(running.result().turns[0].finished_at - use.dispatched_at)


async def test_calls_of_one_turn_run_at_once_and_are_answered_in_their_order():
    runner = ScriptedRunner(lambda code: ToolResult(outcome="ok", stdout=f"result of {code}"), hold=True)
    text = call("print(1)") + call("print(2)") + call("print(3)") + END
    async with Setup([text], [ANSWER], runner=runner) as node:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(node.run())
            await settle(80)
            assert runner.most_running == 3
            runner.release()
        trajectory = running.result()
    responses = [f"result of print({n})" for n in (1, 2, 3)]
    assert [use.response for use in trajectory.tool_uses] == responses
    text = whole(trajectory)
    assert sorted(responses, key=text.index) == responses


async def test_a_malformed_call_is_answered_with_the_reason_and_the_good_one_runs():
    async with Setup(["<tool_call>{bad}</tool_call>" + call("print(2)") + END], [ANSWER]) as node:
        trajectory = await node.run()
    bad, good = trajectory.tool_uses
    assert bad.outcome == "malformed"
    assert bad.response.startswith("FormatError: Expecting property name")
    assert (bad.executed, bad.failed, good.executed, good.failed) == (False, True, True, False)
    assert [code for code, _, _ in node.runner.calls] == ["print(2)"]
    assert bad.response in whole(trajectory)
    assert trajectory.stop is StopReason.ANSWER


async def test_a_call_that_is_never_closed_is_answered_and_not_run():
    async with Setup([call("print(2)").removesuffix("</tool_call>") + END], [ANSWER]) as node:
        trajectory = await node.run()
    # The end-of-turn token is part of the text after the opening tag.
    assert [(use.outcome, use.response) for use in trajectory.tool_uses] == [
        ("malformed", "FormatError: tool call not closed")
    ]
    assert node.runner.calls == []


async def test_an_unknown_tool_and_wrong_arguments_are_errors_that_the_model_reads():
    wrong = '<tool_call>{"name": "python", "arguments": {"code": 3}}</tool_call>'
    async with Setup([call("x", name="bash") + wrong + END], [ANSWER]) as node:
        trajectory = await node.run()
    assert [(use.outcome, use.response, use.executed) for use in trajectory.tool_uses] == [
        ("error", "NameError: no tool 'bash' (there is: python)", False),
        ("error", "TypeError: 'code' and 'input' must be strings", False),
    ]
    assert node.runner.calls == []


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"different names, got \['python', 'python'\]"):
        Setup(tools=[PythonTool(ScriptedRunner()), PythonSessions(ScriptedSessions())])


async def test_calls_beyond_the_limit_of_a_turn_are_refused():
    async with Setup([call("1") + call("2") + call("3") + END], [ANSWER], max_calls_per_turn=2) as node:
        trajectory = await node.run()
    assert [use.response for use in trajectory.tool_uses] == ["1", "2", "LimitError: at most 2 calls"]
    assert len(node.runner.calls) == 2


async def test_calls_beyond_the_limit_of_a_turn_are_dropped_where_that_is_asked_for():
    """A malformed call takes up the limit as another does, and is dropped as another is."""
    malformed = "<tool_call>{bad}</tool_call>"
    first, second = malformed + call("1") + malformed + END, call("2") + call("3") + malformed + END
    budget = {"max_calls_per_turn": 1, "surplus_calls": "drop"}
    async with Setup([first], [second], [ANSWER], **budget) as node:
        trajectory = await node.run()
    assert [use.outcome for use in trajectory.tool_uses] == ["malformed", "ok"]
    assert [code for code, _, _ in node.runner.calls] == ["2"]
    assert whole(trajectory).count("<tool_response>") == 2
    assert trajectory.stop is StopReason.ANSWER


async def test_a_turn_may_have_any_number_of_calls_where_there_is_no_limit():
    async with Setup([call("1") * 12 + END], [ANSWER], max_calls_per_turn=None, max_tokens=2000) as node:
        trajectory = await node.run()
    assert [use.outcome for use in trajectory.tool_uses] == ["ok"] * 12


# Budgets


async def test_a_turn_that_reaches_the_token_budget_is_truncated():
    async with Setup([call("print(1)") + " and so on" * 100 + END], max_tokens=200) as node:
        trajectory = await node.run()
    assert trajectory.stop is StopReason.LENGTH
    assert len(trajectory.token_ids_T) == 200
    assert trajectory.turns[0].truncated
    assert trajectory.tool_uses[0].outcome == "ok"


async def test_a_response_that_does_not_fit_ends_the_trajectory_before_it():
    runner = ScriptedRunner(lambda code: ToolResult(outcome="ok", stdout="7 " * 300))
    async with Setup([call("print(1)") + END], runner=runner, max_tokens=120) as node:
        trajectory = await node.run()
    assert trajectory.stop is StopReason.LENGTH
    assert not trajectory.turns[0].truncated
    assert trajectory.sampled_T[-1]


async def test_a_prompt_that_fills_the_budget_ends_at_once():
    async with Setup([ANSWER], max_tokens=10) as node:
        trajectory = await node.run()
    assert (trajectory.stop, trajectory.turns) == (StopReason.LENGTH, ())
    assert node.replicas.made[0].requests == []


@pytest.mark.parametrize("question", ["What is 6 * 7?", "What is 6 * 7? " * 4])
async def test_a_response_has_its_tokens_whatever_the_length_of_the_prompt(question):
    async with Setup([call("print(1)") + " and so on" * 100 + END], max_response_tokens=60) as node:
        trajectory = await node.run(question)
    prompt_tokens = int(trajectory.sampled_T.argmax())
    assert len(trajectory.token_ids_T) - prompt_tokens == 60
    assert trajectory.stop is StopReason.LENGTH


async def test_what_a_tool_answers_is_part_of_the_response():
    runner = ScriptedRunner(lambda code: ToolResult(outcome="ok", stdout="1 " * 60, jailed=True))
    async with Setup([call("print(1)") + END], runner=runner, max_response_tokens=100) as node:
        trajectory = await node.run()
    assert trajectory.stop is StopReason.LENGTH
    assert len(trajectory.turns) == 1


async def test_the_last_turn_is_the_last():
    async with Setup([call("1") + END], [call("2") + END], max_turns=2) as node:
        trajectory = await node.run()
    assert trajectory.stop is StopReason.TURNS
    assert [use.response for use in trajectory.tool_uses] == ["1", "2"]


async def test_the_deadline_ends_a_turn_and_what_was_sampled_is_kept():
    never = Gate()
    async with Setup([f"<reason>I think{call('print(1)')}", never, END], deadline_s=0.05) as node:
        trajectory = await node.run()
        assert len(node.replicas.made[0].aborted) == 1
    assert trajectory.stop is StopReason.DEADLINE
    [turn] = trajectory.turns
    assert turn.truncated
    assert [use.outcome for use in turn.tool_uses] == ["ok"]


async def test_a_turn_that_takes_long_is_seen_to_move():
    gates = [Gate(), Gate()]
    async with Setup(["I ", gates[0], "think ", gates[1], ANSWER]) as node, asyncio.TaskGroup() as group:
        running, seen = group.create_task(node.run()), [0]
        for gate in gates:
            await gate.started.wait()
            seen.append(node.rollouts.tokens_sampled)
            gate.release()
    assert seen == sorted({*seen})
    assert node.rollouts.tokens_sampled == running.result().sampled_tokens


async def test_the_deadline_kills_a_call_that_is_still_running():
    async with Setup([call("while 1: 0") + END], runner=ScriptedRunner(hold=True), deadline_s=0.05) as node:
        trajectory = await node.run()
    assert node.runner.cancelled == 1
    assert trajectory.stop is StopReason.DEADLINE
    assert [(use.outcome, use.failed, use.executed) for use in trajectory.tool_uses] == [("killed", True, True)]
    assert not trajectory.turns[0].truncated


def shut(node):
    """No place for longer than the deadline."""
    supervisor = node.fleet._supervisor
    supervisor.weights_current.clear()
    loop = asyncio.get_running_loop()
    loop.call_later(2 * node.config.deadline_s, supervisor.weights_current.set)
    loop.call_later(2 * node.config.deadline_s, node.fleet._schedule)
    return ToolResult(outcome="ok", stdout="1")


@pytest.mark.parametrize("place", ["first turn", "second turn"])
async def test_a_wait_for_a_place_is_not_the_models_time(place):
    runner = ScriptedRunner(None if place == "first turn" else lambda code: shut(node))
    async with Setup([call("1") + END], [ANSWER], runner=runner, deadline_s=0.3) as node:
        if place == "first turn":
            shut(node)
        trajectory = await node.run()
    assert (trajectory.stop, len(trajectory.turns)) == (StopReason.ANSWER, 2)


async def test_after_a_wait_the_time_counts_again():
    never = Gate()
    async with Setup([call("1"), never, END], deadline_s=0.1) as node:
        shut(node)
        trajectory = await node.run()
    assert (trajectory.stop, never.started.is_set()) == (StopReason.DEADLINE, True)


# Failures


async def test_a_lost_call_is_our_error_and_never_an_answer():
    runner = ScriptedRunner(lambda code: ToolResult(outcome="lost", stderr="the host died"))
    rest = Gate()
    async with Setup([call("print(1)"), rest, END], runner=runner) as node:
        trajectory = await node.run()
        assert len(node.replicas.made[0].aborted) == 1, "the turn is not generated to its end"
    assert trajectory.stop is StopReason.ERROR
    assert trajectory.error.boundary is Boundary.SANDBOX
    assert trajectory.error.message == "the host died"
    assert "host" not in whole(trajectory)


async def test_a_lost_call_cancels_the_others_of_its_turn():
    class Lost:
        name = "lost"

        async def __call__(self, arguments):
            await other.started.wait()
            return ToolReply(outcome="lost", text="gone")

    other = ScriptedRunner(hold=True)
    tools = [Lost(), PythonTool(other)]
    async with Setup([call("x", "lost") + call("y") + END], runner=other, tools=tools) as node:
        trajectory = await node.run()
    assert trajectory.error.boundary is Boundary.SANDBOX
    assert other.cancelled == 1


class Returns:
    """A tool that answers with what its argument says, read once more."""

    name = "echo"

    async def __call__(self, arguments):
        return ToolReply(outcome="ok", text=json.loads(arguments["code"]))


async def test_half_a_surrogate_pair_in_an_answer_is_a_question_mark(tmp_path):
    log = Journal(tmp_path).log(0, 0, 0)
    async with Setup([call('"<\\ud83d>"', "echo") + END], [ANSWER], tools=[Returns()]) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0, log=log)
    assert [use.response for use in trajectory.tool_uses] == ["<?>"]
    assert "<?>" in whole(trajectory)
    assert len(Journal(tmp_path).log(0, 0, 0).pieces) == 2


@pytest.mark.parametrize("error", [LookupError("a bug"), TimeoutError("not our deadline")])
async def test_a_tool_that_raises_is_a_bug_and_stops_the_run(error):
    class Broken:
        name = "python"

        async def __call__(self, arguments):
            raise error

    with pytest.raises(type(error), match=str(error)):
        async with Setup([call("x") + END], tools=[Broken()]) as node:
            await node.run()


async def test_a_tool_that_awaits_what_was_cancelled_is_a_bug_and_no_killed_call():
    class Shared:
        name = "python"

        async def __call__(self, arguments):
            look_up = asyncio.get_running_loop().create_future()
            look_up.cancel()  # it was begun for another trajectory, which has ended
            return await look_up

    with pytest.raises(RuntimeError, match="tool 'python': something that it awaits was cancelled"):
        async with Setup([call("x") + END], [ANSWER], tools=[Shared()]) as node:
            await node.run()


@pytest.mark.parametrize("answer", ["42", None, {"outcome": "ok", "text": "42"}])
async def test_a_tool_that_answers_with_something_else_is_named(answer):
    class Wrong:
        name = "search"

        async def __call__(self, arguments):
            return answer

    with pytest.raises(
        WrongPart, match=r"tool search, Wrong .test_rollout.py:\d+., answered " + re.escape(repr(answer))
    ):
        async with Setup([call("x", "search") + END], tools=[Wrong()]) as node:
            await node.run()


async def test_an_answer_that_numpy_made_is_one_after_a_resume(tmp_path):
    class Column:
        name = "search"

        async def __call__(self, arguments):
            return ToolReply(outcome="ok", text=np.asarray(["42"])[0])

    log = Journal(tmp_path).log(0, 0, 0)
    async with Setup([call("x", "search") + END], [ANSWER], tools=[Column()]) as node:
        trajectory = await node.rollouts.run(a_prompt(), 0, 0, log=log)
    assert [use.response for use in trajectory.tool_uses] == ["42"]
    assert len(Journal(tmp_path).log(0, 0, 0).pieces) == 2


@pytest.mark.parametrize("place", ["in the text", "in a call", "after a call"])
async def test_a_trajectory_goes_on_elsewhere_when_its_replica_dies_in_mid_turn(place):
    """The text, the calls and the buffer are those of an undisturbed run; no call is made twice."""
    text, code = "<reason>I use python.</reason>", call("print(1)")
    pieces = {
        "in the text": [text[:12], Die(), text[12:], code, END],
        "in a call": [text, code[:20], Die(), code[20:], END],
        "after a call": [text, code, Die(), END],
    }[place]
    number = iter(range(9))
    async with Setup(pieces, [ANSWER], replicas=2, prepare=lambda r: setattr(r, "version", next(number))) as node:
        trajectory = await node.run()
        assert sum(len(replica.requests) for replica in node.replicas.made) == 3
        assert node.fleet.deaths == 1
    async with Setup([text, code, END], [ANSWER]) as node:
        undisturbed = await node.run()
    assert whole(trajectory) == whole(undisturbed)
    assert [use.response for use in trajectory.tool_uses] == ["print(1)"]
    turn = trajectory.turns[0]
    versions = trajectory.versions_T[turn.start : turn.end].tolist()
    assert versions == sorted(versions), "the first part is of replica 0 (version 0), the rest of another"
    assert len(set(versions)) == 2


async def test_versions_are_exact_across_an_update_in_flight():
    update, seen = Gate(), Gate()
    text = "<reason>I use python."
    async with Setup([text, update, "</reason>", seen, END]) as node, asyncio.TaskGroup() as group:
        running = group.create_task(node.run())
        await update.started.wait()
        replica = node.replicas.made[0]
        replica.engine_version = 5  # the node hears of it later
        update.release()
        await seen.started.wait()
        replica.version = 5
        seen.release()
    turn = running.result().turns[0]
    before = len(CHAT._encode(text))
    after = turn.end - turn.start - before
    assert running.result().versions_T[turn.start : turn.end].tolist() == [0] * before + [5] * after


async def test_cancelling_a_rollout_cancels_its_call_and_its_request():
    rest = Gate()
    async with Setup([call("print(1)"), rest, END], runner=ScriptedRunner(hold=True)) as node:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(node.run())
            await rest.started.wait()
            await node.runner.started.wait()
            running.cancel()
        assert running.cancelled()
        assert node.runner.cancelled == 1
        replica = node.replicas.made[0]
        assert (replica.in_flight, len(replica.aborted)) == (0, 1)


async def test_every_lost_call_of_a_turn_is_recorded_and_the_first_types_the_trajectory():
    class Lost:
        name = "lost"

        async def __call__(self, arguments):
            await asyncio.sleep(0)
            return ToolReply(outcome="lost", text=arguments["code"])

    tools = [Lost(), PythonTool(ScriptedRunner(hold=True))]
    text = call("first", "lost") + call("second", "lost") + call("held") + END
    async with Setup([text], tools=tools) as node:
        trajectory = await node.run()
    assert [(use.outcome, use.response) for use in trajectory.tool_uses] == [
        ("lost", "first"),
        ("lost", "second"),
        ("killed", ""),
    ]
    assert (trajectory.error.boundary, trajectory.error.message) == (Boundary.SANDBOX, "first")


# New weights


class Update:
    """Supersedes each turn that reaches its place in a script, `times` times."""

    def __init__(self, times=1):
        self.times = times

    def into(self, replica):
        inner = replica._script

        def script(token_ids, sampling):
            for piece in inner(token_ids, sampling):
                yield piece
                if isinstance(piece, str) and "<here>" in piece and self.times:
                    self.times -= 1
                    raise Superseded("version 1 came")

        replica._script = script


@pytest.mark.parametrize("times", [1, 3])
async def test_a_superseded_trajectory_begins_again_from_its_prompt(times):
    turns = [call("print(1)") + END], ["<here>", f"so{END}"]
    runner = ScriptedRunner()
    async with Setup(*turns, runner=runner, prepare=Update(times).into) as node:
        tally = Tally()
        trajectory = await node.rollouts.run(a_prompt(), 0, 0, tally=tally)
        check(trajectory)
        starts = [ids for ids, _, _ in node.replicas.made[0].requests]
    async with Setup(*turns) as node:
        undisturbed = await node.run()
    assert whole(trajectory) == whole(undisturbed)
    assert trajectory.seed == undisturbed.seed
    assert starts[0] == starts[2] == list(undisturbed.token_ids_T[: undisturbed.turns[0].start])
    lost = undisturbed.turns[0].end - undisturbed.turns[0].start + len(CHAT._encode("<here>"))
    assert trajectory.discarded_tokens == times * lost
    assert undisturbed.discarded_tokens == 0
    assert tally.tokens == trajectory.sampled_tokens + trajectory.discarded_tokens
    assert len(runner.calls) == times + 1


async def test_a_superseded_turn_kills_its_calls():
    runner, passed = ScriptedRunner(hold=True), Gate()
    passed.release()
    turn = [call("print(1)"), passed, "<here>", END]
    async with Setup(turn, runner=runner, prepare=Update(2).into, deadline_s=0.05) as node:
        trajectory = await node.run()
    assert (runner.cancelled, len(runner.calls)) == (3, 3)
    assert trajectory.stop is StopReason.DEADLINE
    assert trajectory.discarded_tokens == 2 * len(CHAT._encode(call("print(1)") + "<here>"))


async def test_the_deadline_holds_for_all_attempts_together():
    async with Setup(["<here>", END], prepare=Update(5000).into, deadline_s=0.02) as node:
        trajectory = await node.run()
    assert trajectory.stop is StopReason.DEADLINE


async def test_a_superseded_trajectory_gets_a_new_session():
    sessions = ScriptedSessions()
    turns = [call("x = 1") + END], ["<here>", END]
    async with Setup(*turns, tools=[PythonSessions(sessions)], prepare=Update().into) as node:
        await node.run()
    assert [[code for code, _, _ in session.calls] for session in sessions.made] == [["x = 1"], ["x = 1"]]
    assert not any(session.open for session in sessions.made)


# Seeds and counts


async def test_the_tokens_of_a_cancelled_rollout_are_counted():
    rest, tally = Gate(), Tally()
    async with Setup([call("print(1)"), rest, END]) as node:
        async with asyncio.TaskGroup() as group:
            running = group.create_task(node.rollouts.run(a_prompt(), 0, 0, tally=tally))
            await rest.started.wait()
            await settle()
            running.cancel()
        assert tally.tokens == node.rollouts.tokens_sampled == len(CHAT._encode(call("print(1)")))


def test_seeds_differ_by_every_part_and_fit_into_63_bits():
    seeds = {derive_seed(run, f"p{p}", s, t) for run in (0, 1) for p in range(4) for s in range(4) for t in range(4)}
    assert len(seeds) == 128
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "p", 1, 2) == derive_seed(0, "p", 1, 2)


async def test_each_turn_is_sampled_with_its_own_seed_and_what_is_left_of_the_budget():
    async with Setup([call("1") + END], [ANSWER], temperature=0.7) as node:
        trajectory = await node.run()
        requests = node.replicas.made[0].requests
    assert [request.seed for _, request, _ in requests] == [derive_seed(3, "p0", 0, turn) for turn in (0, 1)]
    assert [request.max_tokens for _, request, _ in requests] == [400 - turn.start for turn in trajectory.turns]
    assert [list(ids) for ids, _, _ in requests] == [list(trajectory.token_ids_T[: t.start]) for t in trajectory.turns]
    assert {request.temperature for _, request, _ in requests} == {0.7}
    assert node.rollouts.tokens_sampled == trajectory.sampled_tokens


async def test_concurrent_rollouts_do_not_mix():
    async with Setup([call("1") + END], [ANSWER], replicas=2) as node, asyncio.TaskGroup() as group:
        tasks = [group.create_task(node.run(f"What is {n} + 1?")) for n in range(8)]
    assert [f"What is {n} + 1?" in whole(task.result()) for n, task in enumerate(tasks)] == [True] * 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_response_tokens", 0),
        ("max_turns", 0),
        ("max_turns", None),
        ("max_calls_per_turn", 0),
        ("surplus_calls", "'forget'"),
        ("deadline_s", 0.0),
        ("temperature", -1.0),
    ],
)
def test_impossible_budgets_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must .* {value}"):
        RolloutConfig(**{field: value.strip("'") if isinstance(value, str) else value})
