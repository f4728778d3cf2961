"""Entropies of a run's rollouts: what is measured, how tokens are told apart, and bad input."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.diagnosis.token_kinds import mark
from engine.recording import files
from engine.recording.folder import RecordFolder
from engine.recording.groups import StepRecords
from engine.recording.policy import RecordConfig
from engine.replica.port import Delta
from engine.rollout.chat_template import ChatTemplate
from engine.rollout.token_buffer import TokenBuffer
from engine.types import Group, Prompt
from recipes.rstar2.analyze import main, spread
from recipes.rstar2.parts.analysis import report_curves
from recipes.rstar2.parts.analysis.scoring import EntropyScorer, packs
from recipes.rstar2.parts.analysis.token_entropy import Scored, shares, threshold
from recipes.tiny.task import SHIPPED
from tests.support import fakes
from tests.support.algo_fakes import tool_use

CHAT = ChatTemplate.load(SHIPPED)
A_TURN = fakes.a_trajectory().turns[0]
CALL = '<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>'
TURNS = (f"<reason>But wait, I use python.</reason>\n{CALL}", "<reason>Let me check it.</reason>\n<answer>1</answer>")


def a_trajectory(sample=0, turns=TURNS, *, reply="1", outcome="ok", question="What is 1?", ids=None):
    """A trajectory as the engine samples one. ids: in place of those that were sampled in its only turn."""
    prompt = Prompt(id="p", messages=({"role": "user", "content": question},), answer="1")
    buffer = TokenBuffer(CHAT.prompt_ids(prompt.messages))
    spans = []
    for number, said in enumerate(turns):
        sampled = [*CHAT._encode(said), CHAT.end_of_turn] if ids is None else ids
        use = replace(tool_use(outcome), response=reply)
        start, uses = len(buffer), (use,) if number < len(turns) - 1 else ()
        buffer.append_sampled(Delta(sampled, [-1.0] * len(sampled), "stop", version=0))
        spans.append(replace(A_TURN, start=start, end=len(buffer), tool_uses=uses))
        buffer.append_given(CHAT.tool_ids([reply]) if uses else [])
    trajectory = fakes.a_trajectory(sample, prompt=prompt, reward=1.0)
    text = "".join(CHAT.decode(buffer.ids[turn.start : turn.end]) for turn in spans)
    return replace(trajectory, turns=tuple(spans), text=text, **buffer.arrays())


def a_run(folder, trajectories, step=2):
    """Each trajectory is a group of its own in the record of the step."""
    groups = [
        Group(prompt=each.prompt, trajectories=(each,), lease=number, drop="flat")
        for number, each in enumerate(trajectories)
    ]
    records = StepRecords(step=step, groups=groups, whole=[])
    record = RecordFolder(folder, RecordConfig())
    record.open((SHIPPED / "tokenizer.json").read_text())
    packed = [files.packed(each) for each in (*records.records(), *records.tokens({}))]
    record.write_step(records.row(1.0), packed)
    return folder


def scored_of(texts, entropies, turns, failed=()):
    values_T = np.asarray(entropies, np.float32)
    return Scored(
        texts_T=texts, marks=mark(texts, turns), entropy_T=values_T, logprob_T=-values_T, failed_turns=frozenset(failed)
    )


@pytest.fixture(scope="module")
def scorer():
    return EntropyScorer(SHIPPED)


def test_entropies_are_those_of_the_model_over_the_whole_vocabulary_packed_or_alone(scorer):
    trajectories = [
        a_trajectory(0),
        a_trajectory(1, TURNS[1:], question="And what is two?"),
        a_trajectory(2, (*TURNS, TURNS[1]), reply="none"),
    ]
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    for batch_tokens in (1, 100_000):
        found = {at: values for at, *values in scorer.entropies(trajectories, batch_tokens)}
        for at, trajectory in enumerate(trajectories):
            ids = torch.from_numpy(trajectory.token_ids_T.astype(np.int64))
            with torch.no_grad():
                logprobs_TV = model(ids[None]).logits[0].log_softmax(-1)
            expected_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1).numpy()
            sampled = np.flatnonzero(trajectory.sampled_T)
            before = sampled - 1
            np.testing.assert_allclose(found[at][0][sampled], expected_T[before], atol=1e-5)
            np.testing.assert_allclose(found[at][1][sampled], logprobs_TV[before, ids[sampled]].numpy(), atol=1e-5)
            assert found[at][0].sum() == pytest.approx(found[at][0][sampled].sum()), "nothing where none was sampled"


def test_each_sequence_is_in_one_pass_which_is_bounded_unless_one_is_longer():
    lengths = [5, 90, 20, 7, 31, 30, 8]
    found = list(packs(lengths, 40))
    assert sorted(at for pack in found for at in pack) == list(range(len(lengths)))
    assert [sum(lengths[at] for at in pack) <= 40 for pack in found] == [False, *[True] * (len(found) - 1)]
    assert len(found) == 4


def test_token_texts_make_the_text_also_where_a_character_has_several_tokens(scorer):
    trajectory = a_trajectory(turns=("naïve 中 😀 done",))
    texts = scorer.texts(trajectory)
    assert len(texts) == len(trajectory.token_ids_T)
    [turn] = trajectory.turns
    assert "".join(texts[turn.start : turn.end]) == trajectory.text


def test_shares_by_kind_and_place():
    texts = ["Q", "a", " but", " c", "<tool_call>x</tool_call>", "R", "wait", " e", "f", "g", "h"]
    entropies = [9, 1.0, 5.0, 0.1, 0.2, 9, 6.0, 3.0, 0.3, 0.4, 0.5]
    scored = scored_of(texts, entropies, [(1, 5), (6, 11)], failed={0})
    assert threshold([scored], 3 / 8) == 1.0, "of what was sampled only"
    found = shares([scored], high_share=3 / 8, after_reply=2)
    assert found["tokens_by_kind"] == {"all": 9, "forking": 2, "reflection": 2, "both": 1, "other": 6, "tool call": 1}
    assert found["of_high"] == pytest.approx({"forking": 2 / 3, "reflection": 2 / 3, "both": 1 / 3, "other": 0.0})
    among = {"all": 1 / 3, "forking": 1.0, "reflection": 1.0, "both": 1.0, "other": 0.0, "tool call": 0.0}
    assert found["high_among"] == pytest.approx(among)
    assert sum(part["tokens"] for part in found["by_position"]) == 9
    assert [(row["phrase"], row["count"], row["high"]) for row in found["phrases"]] == [
        ("but", 1, 1.0),
        ("wait", 1, 1.0),
    ]
    assert found["nll"] == pytest.approx(found["entropy"])
    assert [(row["token"], row["high"], row["count"]) for row in found["words"]] == [
        (" but", 1, 1),
        (" e", 1, 1),
        ("wait", 1, 1),
    ]
    nothing = scored_of(["a", "", "é"], [0.0, 3.0, 1.0], [(0, 3)])
    assert [row["token"] for row in shares([nothing], high_share=0.9)["words"]] == ["é"], "half a character is no word"


def test_replies_of_failed_calls_are_apart():
    fine = [scored_of(["a", "R", "b"], [0, 0, 0.1], [(0, 1), (2, 3)])] * 30
    failed = [scored_of(["a", "R", "b"], [0, 0, 3.0], [(0, 1), (2, 3)], failed={0})] * 30
    first = shares([*fine, *failed], high_share=0.4)["after_reply"][0]
    assert (first["high_after_success"], first["high_after_failure"], first["tokens"]) == (0.0, 1.0, 60)
    assert shares(fine[:2])["after_reply"][0]["high"] is None, "two tokens are no share"


def test_a_run_is_analysed_and_what_is_computed_is_kept(tmp_path):
    first = [a_trajectory(0), a_trajectory(1, reply="NameError: x", outcome="error"), a_trajectory(2, TURNS[1:])]
    run = a_run(tmp_path / "run", first)
    a_run(run, [a_trajectory(0, TURNS[1:])], step=4)
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "learner/entropy": 0.7}\n{"st')
    words = [f"run={run}", f"model={SHIPPED}"]
    assert main(words) == 0
    found = json.loads((run / "analysis/analysis.json").read_text())
    assert [(row["step"], row["trajectories"]) for row in found["steps"]] == [(2, 3), (4, 1)]
    assert found["steps"][0]["tokens_by_kind"]["tool call"] > 0
    assert {path.name for path in (run / "analysis").iterdir()} >= {"entropy.png", "curves.png"}
    kept = run / "analysis/entropies/step-000002.npz"
    before = kept.stat().st_mtime_ns
    assert main(words) == 0
    assert kept.stat().st_mtime_ns == before, "nothing is computed twice"
    assert json.loads((run / "analysis/analysis.json").read_text()) == found
    kept.write_bytes(kept.read_bytes()[:-40])
    assert main(words) == 0
    assert kept.stat().st_mtime_ns != before, "what is damaged is computed again"
    assert json.loads((run / "analysis/analysis.json").read_text()) == found


def test_rollouts_that_another_model_has_sampled_are_warned_of(tmp_path, capsys):
    noise = CHAT.decode(np.random.default_rng(0).integers(10, 300, 60).tolist())
    run = a_run(tmp_path, [a_trajectory(0, (noise,))])
    assert main([f"run={run}", f"model={SHIPPED}"]) == 0
    [warning] = json.loads((run / "analysis/analysis.json").read_text())["warnings"]
    assert "step 2" in warning
    assert "warning: step 2" in capsys.readouterr().out


def test_what_the_model_would_say_itself_is_not_warned_of(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    prompt = CHAT.prompt_ids([{"role": "user", "content": "Lea has 63 books. Lea gets 43. How many books now?"}])
    ids = torch.tensor([prompt])
    for _ in range(30):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    question = "Lea has 63 books. Lea gets 43. How many books now?"
    run = a_run(tmp_path, [a_trajectory(question=question, turns=("",), ids=ids[0, len(prompt) :].tolist())])
    assert main([f"run={run}", f"model={SHIPPED}"]) == 0
    assert json.loads((run / "analysis/analysis.json").read_text())["warnings"] == []


def refused(words, capsys):
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    assert code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_bad_input_is_one_line_with_the_fix(tmp_path, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in refused([f"run={empty}", f"model={SHIPPED}"], capsys)
    run = a_run(tmp_path / "run", [a_trajectory(0)])
    assert "model=DIR" in refused([f"run={run}"], capsys), "it has no checkpoint"
    assert "step 9" in refused([f"run={run}", f"model={SHIPPED}", "steps=9"], capsys)
    assert "config.json" in refused([f"run={run}", f"model={empty}"], capsys)
    assert "high_share" in refused([f"run={run}", f"model={SHIPPED}", "high_share=1"], capsys)
    other = a_run(tmp_path / "other", [a_trajectory(0)])
    tokenizer = files.tokenizer_path(files.folder_of(other))
    tokenizer.write_text(tokenizer.read_text().replace('"wait"', '"tiaw"').replace("Ġ", "_"))
    assert "p #0" in refused([f"run={other}", f"model={SHIPPED}"], capsys)
    large = a_run(tmp_path / "large", [a_trajectory(0, turns=("",), ids=[10_000] * 9)])
    assert "10000" in refused([f"run={large}", f"model={SHIPPED}"], capsys)
    [path] = files.folder_of(run).glob("steps/*")
    path.write_bytes(path.read_bytes()[:-20])
    assert "step 2" in refused([f"run={run}", f"model={SHIPPED}"], capsys)


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    for file in SHIPPED.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        EntropyScorer(tmp_path)


def test_rollouts_are_chosen_over_all_groups():
    assert spread(range(10), 4) == [1, 4, 6, 9]
    assert spread(range(3), 4) == [0, 1, 2]
    assert spread([], 4) == []


def test_the_reports_curves_are_drawn_where_they_can_be_compared_and_else_said(tmp_path):
    def rows(tokens, errors, truncated, steps=60, **more):
        row = {"rollout/trajectories": 100, "stop/length": truncated, "tools/error_share_correct": errors, **more}
        return [{**row, "step": step, "rollout/response_tokens": tokens} for step in range(1, steps)]

    tiny = report_curves.plot_curves(tmp_path / "tiny.png", rows(30, 0.01, 0))
    assert len(tiny) == 4, "nothing of it is on this scale"
    large = rows(2000, 0.12, 12, **{"eval/accuracy/rstar_aime_2024": 0.3, "eval/accuracy/AIME25": 0.2})
    assert report_curves.plot_curves(tmp_path / "large.png", large) == []
    short = report_curves.plot_curves(tmp_path / "short.png", rows(2000, 0.12, 12, steps=4))
    assert len(short) == 2, "three steps are no curve to compare length and accuracy with"
    assert (tmp_path / "large.png").read_bytes()[:4] == b"\x89PNG"
