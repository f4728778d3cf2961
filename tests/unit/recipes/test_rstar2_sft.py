"""Supervised fine-tuning without engine or learner: options, what a run goes on from, the format check, the report."""

import json

import pytest

from engine.console.options import parse
from engine.run.identity import Identity
from engine.run.run_folder import RunFolder
from recipes.rstar2 import sft
from recipes.rstar2.parts.tuning.format_check import Question, Reply, ask, shares
from recipes.rstar2.parts.tuning.sft_report import LossCurve, changes, model_card, plot
from recipes.rstar2.sft import Config, resume
from tests.support.conversations import sum_row, write_rows
from tests.support.fakes import ScriptedReplica
from tests.support.node import CHAT, END
from tests.support.paths import TINY


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", [sum_row(1, 2)])


def test_the_values_of_the_report_are_the_defaults(data):
    config = Config(model=TINY, data=(data,))
    assert (sft.CONVERSATIONS, config.epochs, config.batch_size) == (222_000, 3, 128)
    steps = round(config.epochs * sft.CONVERSATIONS / config.batch_size)
    learner = config.learner_of(steps)
    assert (learner.lr, learner.schedule, learner.steps, learner.minibatches) == (5e-6, "cosine", steps, 1)
    assert learner.warmup_steps == round(0.04 * steps)
    assert learner.lr_at(learner.warmup_steps) == pytest.approx(5e-6)
    assert learner.lr_at(steps) < 1e-11


def test_the_learners_fields_are_options(data):
    words = [f"model={TINY}", f"data={data},{data}", "learner.lr=1e-3", "lora_rank=4", "learner.dtype=bfloat16"]
    config = parse(Config, words)
    learner = config.learner_of(10)
    assert config.data == (data, data)
    assert (learner.lr, learner.lora_rank, learner.dtype, learner.steps) == (1e-3, 4, "bfloat16", 10)
    constant = parse(Config, [*words, "learner.schedule=constant", "learner.warmup_steps=7"])
    learner = constant.learner_of(100)
    assert (learner.steps, learner.warmup_steps, learner.lr_at(100)) == (None, 7, 1e-3)


def test_a_model_whose_description_cannot_be_read_is_named_by_its_option(data, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=f"^model: cannot read '{tmp_path}/config.json'"):
        Config(model=tmp_path, data=(data,))


def test_on_gpus_each_is_a_rank_of_the_learner(data):
    config = Config(model=TINY, data=(data,), devices=(0, 1))
    assert config.plan.learner_devices == (0, 1)
    learner = config.learner_of(10)
    assert (learner.device, learner.dtype, learner.offload_optimizer) == ("cuda", "bfloat16", False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data", ""),
        ("data", "nowhere.jsonl"),
        ("held_out", "nowhere.jsonl"),
        ("model", "nowhere"),
        ("batch_size", "0"),
        ("max_tokens", "0"),
        ("steps", "0"),
        ("epochs", "0"),
        ("warmup", "1"),
        ("held_out_rows", "-1"),
        ("format_temperature", "-1"),
        ("learner.lr", "0"),
        ("learner.steps", "7"),
        ("learner.replay_routing", "true"),  # of a mixture too, since examples have no routes
        ("learner.replay_routing", "measure"),
    ],
)
@pytest.mark.parametrize("checkpoint", ["agent", "agent_moe"])
def test_a_wrong_option_names_the_field_before_anything_starts(data, checkpoint, field, value, capsys):
    given = {"model": TINY.with_name(checkpoint), "data": data, field: value}
    with pytest.raises(SystemExit) as ended:
        parse(Config, [f"{name}={text}" for name, text in given.items()])
    assert ended.value.code == 2
    assert field.rpartition(".")[2] in capsys.readouterr().err


# What a run goes on from


def checkpoint(run, step):
    """One that is whole: the manifest lists no file."""
    folder = run.path / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    return folder


@pytest.fixture
def killed(tmp_path):
    """Opens a run again that was killed after five steps, with checkpoints after the second and the fourth."""
    with RunFolder.open(tmp_path / "runs", "sft", Identity({"a": 1})) as run:
        run.json("config.json", {"a": 1})
        for step in range(6):
            run.step(step, {"loss": 1.0 - step / 10})
        folders = [checkpoint(run, step) for step in (2, 4)]

    def opened():
        return RunFolder.open(tmp_path / "runs", "sft", Identity({"a": 1}))

    return opened, folders


def test_a_new_run_begins_at_the_start(tmp_path):
    with RunFolder.open(tmp_path, "sft", Identity({"a": 1})) as run:
        found = resume(run)
    assert (found.step, found.rows, found.checkpoint) == (0, [], None)


def test_a_killed_run_goes_on_from_its_newest_checkpoint(killed):
    opened, folders = killed
    with opened() as run:
        found = resume(run)
        assert (found.step, found.checkpoint) == (4, folders[1])
        assert [row["step"] for row in found.rows] == [0, 1, 2, 3, 4]
        assert [json.loads(line)["step"] for line in (run.path / "metrics.jsonl").read_text().splitlines()] == [
            *range(5)
        ]
        assert str(run.path) in found.message


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(killed):
    opened, folders = killed
    (folders[1] / "manifest.json").write_text('{"weights": [3, 0]}')
    with opened() as run:
        found = resume(run)
    assert (found.step, found.checkpoint) == (2, folders[0])
    assert str(folders[1]) in found.message
    assert not folders[1].exists()


def test_without_a_whole_checkpoint_a_run_begins_again(killed):
    opened, folders = killed
    for folder in folders:
        (folder / "manifest.json").unlink()
    with opened() as run:
        found = resume(run)
    assert (found.step, found.checkpoint, [row["step"] for row in found.rows]) == (0, None, [0])


# The format check


def call(name="sum"):
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls", "malformed", "unknown"),
    [
        ("I know it.", 0, 0, 0),
        (call() + call(), 2, 0, 0),
        (call() + call("other"), 1, 0, 1),
        ('<tool_call>{"name": "sum"}</tool_call>', 0, 1, 0),
        ('<tool_call>{"name": "sum", ', 0, 1, 0),
    ],
)
async def test_a_reply_is_read_as_a_rollout_reads_it(text, calls, malformed, unknown):
    replica = ScriptedReplica(chat=CHAT, script=lambda ids, sampling: [text + END])
    question = Question(
        id="q", prompt_ids=CHAT.prompt_ids([{"role": "user", "content": "?"}]), tools=frozenset({"sum"})
    )
    reply = await ask(replica, question, CHAT, max_tokens=100, temperature=1.0, seed=3)
    found = Reply(id="q", text=text + END, calls=calls, malformed=malformed, unknown_tools=unknown, finished=True)
    assert reply == found


async def test_a_reply_that_is_cut_off_is_not_finished():
    replica = ScriptedReplica(chat=CHAT, script=lambda ids, sampling: ["and so on" * 50 + END])
    question = Question(id="q", prompt_ids=[1, 2], tools=frozenset())
    reply = await ask(replica, question, CHAT, max_tokens=8, temperature=1.0, seed=3)
    assert not reply.finished
    assert shares([reply])["format/unfinished"] == 1.0


def test_shares_are_of_replies():
    base = {"id": "q", "text": "", "malformed": 0, "unknown_tools": 0, "finished": True}
    found = shares(
        [
            Reply(**{**base, "calls": 2}),
            Reply(**{**base, "calls": 1, "malformed": 3}),
            Reply(**{**base, "calls": 0, "unknown_tools": 1}),
            Reply(**{**base, "calls": 0, "finished": False}),
        ]
    )
    assert found == {
        "format/replies": 4.0,
        "format/calls": 0.5,
        "format/malformed": 0.25,
        "format/unknown_tool": 0.25,
        "format/unfinished": 0.25,
    }


# The report


def rows(*, before=True, after=True):
    yield {"step": 0, **({"held_out/loss": 2.0, "format/calls": 0.0} if before else {})}
    for step in (1, 2):
        seconds = {"time/train_total_s": 2.0 * step}
        learner = {"learner/lr": 1e-3, "learner/peak_bytes": 1e9 * step}
        yield {"step": step, "loss": 3.0 - step, "tokens": 100, "tokens_learnt": 10, **seconds, **learner}
    if after:
        yield {"step": 2, "held_out/loss": 1.0, "format/calls": 0.75}


def test_a_summary_says_what_training_changed():
    found = LossCurve(list(rows())).summary()
    assert (found["steps"], found["loss_first"], found["loss_last"]) == (2, 2.0, 1.0)
    assert found["held_out_loss"] == {"before": 2.0, "after": 1.0}
    assert found["tool_calls"] == {"before": 0.0, "after": 0.75}
    assert found["malformed"] == {"before": None, "after": None}
    assert (found["tokens"], found["tokens_learnt"], found["train_s"], found["tokens_per_s"]) == (200, 20, 4.0, 50.0)
    assert found["peak_bytes"] == 2e9
    assert len(changes(found)) == 2


def test_a_summary_of_what_was_not_measured_says_so():
    assert LossCurve(list(rows(before=False))).summary()["held_out_loss"] == {"before": None, "after": 1.0}
    found = LossCurve(list(rows(before=False, after=False))).summary()
    assert found["held_out_loss"] == {"before": None, "after": None}
    assert changes(found) == []
    card = model_card(TINY, ["python", "sft.py"], {**found, "conversations": 7, "versions": {"torch": "2"}})
    assert "7 conversations" in card


@pytest.mark.parametrize("measured", [False, True])
def test_the_curve_is_drawn(measured, tmp_path):
    plot(tmp_path / "loss.png", LossCurve(list(rows(before=measured, after=measured))))
    assert (tmp_path / "loss.png").stat().st_size > 5000
