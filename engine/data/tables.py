"""Rows of data files by their number.

JSON lines are read here. Parquet and Arrow files, folders saved by Hugging Face `datasets`, and data sets of the hub
are read through `datasets`, which maps them into memory.

Invariants
- Any row is reached without reading those before it, so a stream of rows can begin anywhere.
- Memory is bounded, whatever the number of rows: JSON lines take 8 bytes a row, and of a mapped file the operating
  system holds the parts that are used.
- A shuffle depends on the number of rows and on its seed alone: it is the same on every machine.

Row numbers count from 0 over all files of a table. Messages name a line (from 1, as editors do) or a row.
"""

from __future__ import annotations

import bisect
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]

JSON_LINES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
THROUGH_DATASETS = {".parquet": "parquet", ".arrow": "arrow"}  # the formats' names there
SUFFIXES = (*JSON_LINES, *THROUGH_DATASETS)
SHOWN_CHARS = 80


class WrittenFloat(float):
    """A float of a JSON file with the text that it was written as, since a float has 17 digits only."""

    written: str

    def __new__(cls, written: str) -> Self:
        value = super().__new__(cls, written)
        value.written = written
        return value


class Table(Protocol):
    """Rows by number. columns: the names of the columns; for JSON lines those of the first row."""

    columns: Sequence[str]

    def __len__(self) -> int: ...

    def row(self, number: int) -> Mapping[str, Any]:
        """Returns a row. Raises ValueError naming file and row if it cannot be read."""
        ...

    def where(self, number: int) -> str:
        """Returns file and row as part of a message."""
        ...

    def select(self, columns: Sequence[str]) -> None:
        """Allows rows to hold these columns only from now on."""
        ...


def open_table(path: str | Path) -> Table:
    """Opens a file, all files of a folder in the order of their names, a folder saved by `datasets`, or a data set of
    the Hugging Face hub (`HubSet`).

    Raises ValueError naming the path if no rows can be read there.
    """
    path = Path(path)
    hub_set = None if path.exists() else HubSet.of(str(path))
    if hub_set is not None:
        return _mapped(str(path), hub_set.rows, fix=hub_set.fix)
    if (path / "state.json").exists():
        return _mapped(path, lambda: _datasets().load_from_disk(str(path)))
    files = _files(path)
    if (kind := THROUGH_DATASETS.get(_suffix(files[0]) or "")) is None:
        lines = JsonLines(files)
        if not len(lines):
            raise ValueError(f"{path} holds no rows")
        return lines
    return _mapped(path, lambda: _datasets().load_dataset(kind, data_files=[*map(str, files)], split="train"))


def name_of(path: str | Path) -> str:
    """Returns the name that the rows of a table have in ids.

    >>> name_of("data/gsm8k.train.jsonl.gz"), name_of("openai/gsm8k/main:train")
    ('gsm8k.train', 'gsm8k')
    """
    path = Path(path)
    if not path.exists() and (hub_set := HubSet.of(str(path))) is not None:
        return hub_set.id.rpartition("/")[2]
    return path.name if path.is_dir() else path.name.removesuffix(".gz").rpartition(".")[0]


def shuffled(count: int, seed: int, epoch: int) -> Order:
    """Returns the numbers below count in the order of an epoch.

    The sort keys are raw numbers of PCG64, which NumPy promises not to change; its `permutation`, by which `datasets`
    shuffles, may change between versions.
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=16).digest()
    return np.argsort(np.random.PCG64(int.from_bytes(digest, "big")).random_raw(count), kind="stable")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubSet:
    """A split of a data set on the Hugging Face hub, written ID[@REVISION][/CONFIG]:SPLIT.

    Rows that were downloaded before are read from the cache; with HF_HUB_OFFLINE=1 from there alone. A data set on the
    hub may change: only with a revision does a run that is resumed surely read the same rows.

    >>> HubSet.of("openai/gsm8k/main:train[:100]")
    HubSet(id='openai/gsm8k', revision=None, config='main', split='train[:100]')
    >>> HubSet.of("data/train.parquet") is None
    True
    """

    id: str
    revision: str | None = None
    config: str | None = None
    split: str

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Returns the data set that a text names; None for a path."""
        parts = _HUB_SET.fullmatch(text)
        return None if parts is None else cls(**parts.groupdict())

    def rows(self) -> Any:
        """Returns the rows as a `datasets.Dataset`. Raises whatever `datasets` raises."""
        return _datasets().load_dataset(self.id, self.config, split=self.split, revision=self.revision)

    @property
    def fix(self) -> str:
        """What to do if the rows cannot be had."""
        return "check the name, and set HF_TOKEN if the set is not public; without a network, give its files"


_HUB_SET = re.compile(
    r"(?P<id>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<config>[\w.-]+))?:(?P<split>[\w.\[\]:%+-]+)", re.ASCII
)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"{path} does not exist. Fix: give a file, a folder, or a split of the hub, ID/CONFIG:SPLIT")
    if not path.is_dir():
        if _suffix(path) is None:
            raise ValueError(f"{path}: not a kind of file that can be read. Fix: give one of {', '.join(SUFFIXES)}")
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = sorted(state.parent.name for state in path.glob("*/state.json"))
        raise ValueError(f"{path} holds the splits {', '.join(splits)}. Fix: give the folder of one of them")
    files = sorted(file for file in path.iterdir() if _suffix(file) is not None)
    if len({_suffix(file) for file in files}) != 1:
        names = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
        raise ValueError(f"{path}: must hold files of one kind of {', '.join(SUFFIXES)}, it holds {names}")
    return files


def _suffix(path: Path) -> str | None:
    return max((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), key=len, default=None)


class JsonLines:
    """JSON lines: one object a line, blank lines aside. A compressed file is unpacked into a nameless copy."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._descriptors: list[int] = []
        self._starts: list[array[int]] = []  # for each file: where its rows begin, then where it ends
        weakref.finalize(self, _close, self._descriptors)
        for path in files:
            with _unpacked(path) as file:
                self._starts.append(_line_starts(file))
                self._descriptors.append(os.dup(file.fileno()))
        self._ends = list(itertools.accumulate(len(starts) - 1 for starts in self._starts))
        self.columns: Sequence[str] = tuple(self.row(0)) if len(self) else ()

    def __len__(self) -> int:
        return self._ends[-1]

    def row(self, number: int) -> Mapping[str, Any]:
        file, at = self._locate(number)
        start, end = self._starts[file][at : at + 2]
        line = os.pread(self._descriptors[file], end - start, start)
        try:
            row = json.loads(line, parse_float=WrittenFloat)
        except (ValueError, RecursionError) as error:
            cut = "" if line.endswith(b"\n") else "; the file ends there: perhaps it was cut off"
            raise ValueError(f"{self.where(number)}: not JSON ({error}): {shown(line)}{cut}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.where(number)}: must be a JSON object, got {shown(line)}")
        return row

    def where(self, number: int) -> str:
        file, at = self._locate(number)
        before = 0
        for position in range(0, start := self._starts[file][at], 1 << 20):
            before += os.pread(self._descriptors[file], min(1 << 20, start - position), position).count(b"\n")
        return f"{self._files[file]}, line {before + 1}"

    def select(self, columns: Sequence[str]) -> None:
        pass  # a line is read whole

    def _locate(self, number: int) -> tuple[int, int]:
        """Returns the file of a row, and the row's number in it."""
        file = bisect.bisect_right(self._ends, number)
        return file, number - (self._ends[file - 1] if file else 0)


def _unpacked(path: Path) -> BinaryIO:
    file = path.open("rb")
    if path.suffix != ".gz":
        return file
    with file:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 # the caller closes it
        try:
            shutil.copyfileobj(gzip.GzipFile(fileobj=file), copy)
        except (OSError, EOFError) as error:
            copy.close()
            raise ValueError(f"{path} cannot be unpacked: {error}") from error
    copy.seek(0)
    return copy


def _line_starts(file: BinaryIO) -> array[int]:
    """Returns where the lines begin that are not blank, and where the file ends."""
    starts, at = array("Q"), 0
    for line in file:
        if not line.isspace():
            starts.append(at)
        at += len(line)
    starts.append(at)
    return starts


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with suppress(OSError):
            os.close(descriptor)


class MappedRows:
    """Rows that `datasets` maps into memory. place: the path or the hub's name, for messages."""

    def __init__(self, place: str | Path, rows: Any) -> None:
        self._place = place
        self._rows = rows.with_format(None)  # a saved one may have another, such as NumPy's
        self.columns: Sequence[str] = rows.column_names

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Mapping[str, Any]:
        try:
            return self._rows[number]
        except Exception as error:  # decoding may need a library, or meet anything
            raise ValueError(f"{self.where(number)} cannot be read: {_cause(error)}") from error

    def where(self, number: int) -> str:
        return f"{self._place}, row {number}"

    def select(self, columns: Sequence[str]) -> None:
        self._rows = self._rows.select_columns([column for column in columns if column in self.columns])


def _mapped(place: str | Path, load: Callable[[], Any], *, fix: str = "") -> MappedRows:
    """Returns the rows that `load` opens. Raises ValueError naming the place and the cause."""
    try:
        rows = load()
    except Exception as error:  # several libraries raise theirs: a damaged file, a full disk, no network, a wrong split
        advice = f". Fix: {fix}" if fix else ""
        raise ValueError(f"{place} cannot be read: {_cause(error)}{advice}") from error
    if not len(rows):
        raise ValueError(f"{place} holds no rows")
    return MappedRows(place, rows)


def _datasets() -> Any:
    import datasets  # half a second, and pandas

    return datasets


def _cause(error: BaseException) -> str:
    """Returns the cause of an error as one line. The library's own error of a failed conversion says nothing itself."""
    from datasets.exceptions import DatasetGenerationError

    if isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def shown(value: Any) -> str:
    """Returns a value as part of a message, cut where it is long."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} nested very deep"
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 20]} ... {text[-15:]}"
