"""Tells what a metric means, by its name in a row of metrics.jsonl. The texts are those of `engine.metric_names`."""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from engine import metric_names as metric

_ENTRY = re.compile(r'^# (?P<title>.+)$|^[A-Z0-9_]+ = "(?P<name>.+)"\n"""(?P<text>[^"]+)"""$', re.MULTILINE)
_OPEN = (metric.LEARNER, metric.GROUPS_DROPPED)  # families in which any name may be


class Entry(NamedTuple):
    """A documented name. section: the title above it. text: its unit and meaning."""

    section: str
    name: str
    text: str


class Meaning(NamedTuple):
    """The meaning of a metric. family: its documented name. part: the part that is put in for `*`, or the data set;
    None if there is none.
    """

    family: str
    part: str | None
    text: str


@cache
def documented() -> tuple[Entry, ...]:
    """Returns all documented names, in the order of `engine.metric_names`."""
    section, entries = "", []
    for match in _ENTRY.finditer(Path(metric.__file__).read_text(encoding="utf-8")):
        if match["title"]:
            section = match["title"]
        else:
            entries.append(Entry(section, match["name"], " ".join(match["text"].split())))
    return tuple(entries)


@lru_cache(4096)
def meaning_of(name: str) -> Meaning | None:
    """Returns the meaning of a metric, None for one that is the user's own.

    >>> meaning_of("idle/tool_wait_s").family, meaning_of("reward/gsm8k").part, meaning_of("mine")
    ('idle/*_s', 'gsm8k', None)
    """
    texts = {entry.name: entry.text.replace(" (see below)", "") for entry in documented()}
    if name in texts and "*" not in name:
        return Meaning(name, None, texts[name])
    for family in sorted(texts, key=lambda each: (each in _OPEN, -len(each))):
        if family in _OPEN:
            for measured in metric.BY_SOURCE:
                if source := metric.part_of(metric.of_source(measured, "*"), name):
                    return Meaning(metric.of_source(measured, "*"), source, f"{texts[measured]}; of one data set")
        if "*" in family and (part := metric.part_of(family, name)) is not None:
            return Meaning(family, part, texts[family])
    return None
