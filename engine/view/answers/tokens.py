"""Gives each token its text, for the token view."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from engine.view.run_files import RunFiles

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def tokenizer_of(run: RunFiles) -> Tokenizer | None:
    """Returns the recorded tokenizer, else that of the run's checkpoint; None if neither can be read."""
    given = run.config.get("model")
    candidates = [run.recorded.tokenizer, run.path / "checkpoint" / "tokenizer.json"]
    candidates += [Path(given) / "tokenizer.json"] if isinstance(given, str) else []
    for path in candidates:
        if path is not None and path.is_file() and (tokenizer := _load(path)) is not None:
            return tokenizer
    return None


@lru_cache(maxsize=4)
def _load(path: Path) -> Tokenizer | None:
    from tokenizers import Tokenizer  # imported late: it takes a tenth of a second, and only this page needs it

    with suppress(Exception):  # it raises nothing narrower for a file that is no tokenizer
        return Tokenizer.from_file(str(path))
    return None


def pieces(tokenizer: Tokenizer | None, ids: list[int]) -> list[str] | None:
    """Returns a text for each id; joined they are the whole text. A character of several tokens belongs to the last
    of them. Bytes at the end that make no character have no text.
    """
    if tokenizer is None:
        return None
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=False)
    texts = []
    for token in ids:
        try:
            texts.append(stream.step(tokenizer, token) or "")
        except Exception:  # it raises nothing narrower for bytes that are no text
            stream = DecodeStream(skip_special_tokens=False)
            texts.append("�")
    return texts
