"""Checks that teacher and student mean the same by every token id. Their sizes may differ, their vocabularies may not.

A model may have more rows in its embedding than its tokenizer has tokens: rows that only pad are no difference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

SHOWN = 3  # tokens that a refusal names


def check_same_vocabulary(student: Path, teacher: Path) -> None:
    """Raises ValueError unless both folders' tokenizers have the same tokens, special ones included, under the same
    ids, and the teacher has a row for each.
    """
    ours, theirs = vocabulary(student), vocabulary(teacher)
    if ours != theirs:
        pair = f"teacher {str(teacher)!r} has another vocabulary than the student {str(student)!r}"
        raise ValueError(f"{pair}: {_differ(ours, theirs)}")
    config = json.loads((teacher / "config.json").read_text())
    rows = config.get("text_config", config).get("vocab_size", 0)
    if ours and max(ours) >= rows:
        raise ValueError(
            f"teacher {str(teacher)!r} has {rows} rows (vocab_size), and its tokens go up to id {max(ours)}"
        )


def vocabulary(folder: Path) -> dict[int, str]:
    """Returns the tokens of a folder's tokenizer by id, added ones included. Raises ValueError if it cannot be read."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{str(folder)!r} has no tokenizer.json, by which teacher and student are compared. Fix: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # it raises nothing narrower for a file that is none of its own
        raise ValueError(f"{file} is no tokenizer: {error}") from error
    return {number: token for token, number in tokenizer.get_vocab(with_added_tokens=True).items()}


def _differ(ours: Mapping[int, str], theirs: Mapping[int, str]) -> str:
    """Returns how two vocabularies differ, the teacher's first, with the first ids that do."""
    numbers = sorted(number for number in {*ours, *theirs} if ours.get(number) != theirs.get(number))
    examples = ", ".join(f"{number} is {theirs.get(number)!r} and {ours.get(number)!r}" for number in numbers[:SHOWN])
    return (
        f"{len(theirs)} and {len(ours)} tokens, of which {len(numbers)} differ: {examples}. "
        "Fix: a teacher with the student's tokenizer"
    )
