"""Lists the data sets that are known: where each is, how its rows are read, and which rules it passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from recipes.rstar2.parts.preparation import chat_sets, math_sets, rules
from recipes.rstar2.parts.preparation.demonstrations import gsm8k_demonstration
from recipes.rstar2.parts.preparation.rows import Dropped, Place, Row
from recipes.rstar2.parts.preparation.sources import Hub

Convert = Callable[[Mapping[str, Any], Place], Row | Dropped]
SetName = Literal[
    # Problems to train on.
    "dapo",
    "openmath",
    "euler",
    "gsm8k",
    "mawps",
    "release",
    # Problems to evaluate on.
    "aime24",
    "aime25",
    "hmmt25",
    "math500",
    "gpqa",
    # Conversations to fine-tune on.
    "toolace",
    "apigen",
    "glaive",
    "magicoder",
    "tulu_if",
    "nemotron_chat",
    "gsm8k_demonstrations",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """convert: a row as a problem or a conversation, or why it is neither. columns: all that are read; None: any."""

    convert: Convert
    columns: Sequence[str] | None
    hub: Hub | None = None
    rules: Sequence[rules.Rule] = ()
    integers: bool = False
    """Only problems whose answer is an integer, unless asked otherwise."""
    kind: Literal["train", "evaluation", "chat"] = "train"
    """evaluation: each row is kept."""


def _training(convert: Convert, columns: Sequence[str] | None, hub: Hub | None, *first: rules.Rule) -> DataSet:
    return DataSet(convert=convert, columns=columns, hub=hub, rules=(*first, *rules.CHECKABLE), integers=True)


def _evaluation(source: str, hub: Hub, convert: Convert | None = None) -> DataSet:
    question, answer = ("problem", "question"), ("answer",)
    read = convert or partial(math_sets.plain_problem, source, question, answer)
    return DataSet(convert=read, columns=None, hub=hub, kind="evaluation")


def _chat(convert: Convert, hub: Hub | None) -> DataSet:
    return DataSet(convert=convert, columns=None, hub=hub, rules=(rules.over_long,), kind="chat")


SETS: dict[str, DataSet] = {
    "dapo": _training(
        math_sets.dapo,
        ("prompt", "solution", "answer", "reward_model"),
        Hub(id="open-r1/DAPO-Math-17k-Processed", files=("en/*.parquet",)),
        rules.not_english,
    ),
    "openmath": _training(
        math_sets.openmath,
        ("problem", "expected_answer", "problem_type", "problem_source"),
        Hub(id="nvidia/OpenMathReasoning", files=("data/cot-*.parquet",)),
    ),
    "euler": _training(
        partial(math_sets.plain_problem, "rstar_project_euler", ("problem", "question"), ("answer", "solution")),
        None,
        None,
    ),
    "gsm8k": _training(
        math_sets.gsm8k, ("question", "answer"), Hub(id="openai/gsm8k", files=("main/train-*.parquet",))
    ),
    "mawps": _training(
        partial(math_sets.plain_problem, "rstar_mawps", ("input", "question"), ("target", "answer")), None, None
    ),
    "release": DataSet(
        convert=math_sets.release,
        columns=("data_source", "prompt", "ability", "reward_model"),
        rules=(rules.no_answer,),
    ),
    "aime24": _evaluation(
        "rstar_HuggingFaceH4/aime_2024", Hub(id="HuggingFaceH4/aime_2024", files=("data/train-*.parquet",))
    ),
    "aime25": _evaluation(
        "rstar_opencompass/AIME2025",
        Hub(id="opencompass/AIME2025", files=("aime2025-I.jsonl", "aime2025-II.jsonl")),
    ),
    "hmmt25": _evaluation(
        "rstar_MathArena/hmmt_feb_2025", Hub(id="MathArena/hmmt_feb_2025", files=("data/train-*.parquet",))
    ),
    "math500": _evaluation("rstar_HuggingFaceH4/MATH-500", Hub(id="HuggingFaceH4/MATH-500", files=("test.jsonl",))),
    "gpqa": _evaluation(
        "",
        Hub(id="Idavidrein/gpqa", files=("gpqa_diamond.csv",)),
        math_sets.gpqa,
    ),
    "toolace": _chat(chat_sets.toolace, Hub(id="Team-ACE/ToolACE", files=("data.json",))),
    "apigen": _chat(
        partial(chat_sets.sharegpt, "apigen_mt"), Hub(id="Salesforce/APIGen-MT-5k", files=("apigen-mt_5k.json",))
    ),
    "glaive": _chat(
        partial(chat_sets.sharegpt, "glaive_v2"),
        Hub(id="hiyouga/glaive-function-calling-v2-sharegpt", files=("*.json",)),
    ),
    "magicoder": _chat(chat_sets.magicoder, Hub(id="ise-uiuc/Magicoder-OSS-Instruct-75K", files=("data-*.jsonl",))),
    "tulu_if": _chat(
        chat_sets.tulu_if,
        Hub(id="allenai/tulu-3-sft-personas-instruction-following", files=("data/train-*.parquet",)),
    ),
    "nemotron_chat": _chat(
        chat_sets.nemotron_chat,
        Hub(id="nvidia/Llama-Nemotron-Post-Training-Dataset", files=("SFT/chat/*.jsonl",)),
    ),
    "gsm8k_demonstrations": _chat(gsm8k_demonstration, Hub(id="openai/gsm8k", files=("main/train-*.parquet",))),
}
assert set(SETS) == set(get_args(SetName))
