"""Entropies of a run's rollouts: what is measured, how tokens are told apart, and bad input."""

import json
import zlib

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.diagnosis.token_kinds import mark
from engine.rollout.chat_template import ChatTemplate
from engine.stages.write_rollouts import Call, Rollout
from recipes.rstar2.analyze import choose, main
from recipes.rstar2.parts.analysis import report_curves
from recipes.rstar2.parts.analysis.scoring import EntropyScorer, packs
from recipes.rstar2.parts.analysis.token_entropy import Scored, shares, threshold
from recipes.tiny.task import SHIPPED

CHAT = ChatTemplate.load(SHIPPED)
CALL = '<tool_call>{"name": "python", "arguments": {"code": "print(1)"}}</tool_call>'
TURNS = (f"<reason>But wait, I use python.</reason>\n{CALL}", "<reason>Let me check it.</reason>\n<answer>1</answer>")


def a_row(sample=0, turns=TURNS, *, reply="1", outcome="ok", question="What is 1?", **fields):
    """A rollout as the engine records one."""
    ids = CHAT.prompt_ids([{"role": "user", "content": question}])
    spans, texts = [], []
    for number, said in enumerate(turns):
        sampled = [*CHAT._encode(said), CHAT.end_of_turn]
        spans.append((len(ids), len(ids) + len(sampled)))
        texts.append(said + CHAT.end_of_turn_text)
        ids = [*ids, *sampled, *(CHAT.tool_ids([reply]) if number < len(turns) - 1 else [])]
    row = Rollout(
        step=2,
        prompt_id="p",
        sample=sample,
        question=question,
        answer="1",
        text="".join(texts),
        calls=(Call(name="python", arguments="{}", outcome=outcome, reply=reply, turn=0),),
        reward=1.0,
        kept=True,
        advantage=0.5,
        drop=None,
        stop="answer",
        tokens=sum(end - start for start, end in spans),
        token_ids=zlib.compress(np.asarray(ids, "<i4").tobytes()),
        turns=tuple(spans),
    )
    return msgspec.structs.replace(row, **fields)


def a_run(folder, rows, step=2):
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    path = folder / f"rollouts/step-{step:06d}.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
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
    rows = [a_row(0), a_row(1, TURNS[1:], question="And what is two?"), a_row(2, (*TURNS, TURNS[1]), reply="none")]
    model = AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32)
    for batch_tokens in (1, 100_000):
        found = {at: (entropy_T, logprob_T) for at, entropy_T, logprob_T in scorer.entropies(rows, batch_tokens)}
        for at, row in enumerate(rows):
            ids = torch.from_numpy(row.ids.astype(np.int64))
            with torch.no_grad():
                logprobs_TV = model(ids[None]).logits[0].log_softmax(-1)
            expected_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1).numpy()
            sampled = [place for start, end in row.turns for place in range(start, end)]
            before = [place - 1 for place in sampled]
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
    row = a_row(turns=("naïve 中 😀 done",))
    texts = scorer.texts(row)
    assert len(texts) == len(row.ids)
    [(start, end)] = row.turns
    assert "".join(texts[start:end]) == row.text


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
    run = a_run(tmp_path / "run", [a_row(0), a_row(1, reply="NameError: x", outcome="error"), a_row(2, TURNS[1:])])
    a_run(run, [a_row(0, TURNS[1:], step=4)], step=4)
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
    run = a_run(tmp_path, [a_row(0, (noise,))])
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
    ids_T = ids[0].numpy()
    row = a_row(
        token_ids=zlib.compress(ids_T.astype("<i4").tobytes()),
        text=CHAT.decode(ids_T[len(prompt) :].tolist()),
    )
    row = msgspec.structs.replace(row, turns=((len(prompt), len(ids_T)),))
    run = a_run(tmp_path, [row])
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
    assert str(empty / "rollouts") in refused([f"run={empty}", f"model={SHIPPED}"], capsys)
    run = a_run(tmp_path / "run", [a_row(0)])
    assert "model=DIR" in refused([f"run={run}"], capsys), "it has no checkpoint"
    assert "step 9" in refused([f"run={run}", f"model={SHIPPED}", "steps=9"], capsys)
    assert "config.json" in refused([f"run={run}", f"model={empty}"], capsys)
    assert "high_share" in refused([f"run={run}", f"model={SHIPPED}", "high_share=1"], capsys)
    old = a_run(tmp_path / "old", [msgspec.structs.replace(a_row(0), token_ids=b"", turns=())])
    assert "step 2" in refused([f"run={old}", f"model={SHIPPED}"], capsys)
    other = a_run(tmp_path / "other", [a_row(0, text="something else")])
    assert "p #0" in refused([f"run={other}", f"model={SHIPPED}"], capsys)
    large = a_row(0, token_ids=zlib.compress(np.full(99, 10_000, "<i4").tobytes()))
    assert "10000" in refused([f"run={a_run(tmp_path / 'large', [large])}", f"model={SHIPPED}"], capsys)
    path = run / "rollouts/step-000002.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path}, line 1" in refused([f"run={run}", f"model={SHIPPED}"], capsys)


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
    rows = [a_row(at) for at in range(10)]
    assert [row.sample for row in choose(rows, 4)] == [0, 2, 5, 7]
    assert [row.sample for row in choose([*rows, a_row(99, tokens=0)], 20)] == list(range(10))


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
