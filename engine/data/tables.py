"""Rows of data files by their number: JSON lines, parquet, and what Hugging Face `datasets` saves with `save_to_disk`.

Invariants
- Any row is reached without reading those before it, so a stream of rows can begin anywhere.
- Memory is bounded, whatever the number of rows: JSON lines and Arrow files hold 8 bytes a row, parquet files a window
  of row groups.
- A shuffle depends on the files and its keys alone: it is the same on every machine.

Row numbers count from 0 over all files of a table. Messages name a line (from 1, as editors do) or a row.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import os
import shutil
import tempfile
import weakref
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Order = NDArray[np.int64]

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".arrow")

# Row groups that a shuffle mixes with each other. They are in memory together: large enough that rows far apart in the
# file meet, small beside a model.
WINDOW_ROWS = 1 << 16
WINDOW_BYTES = 64 << 20


class WrittenFloat(float):
    """A float of a JSON file, with the text that it was written as: a float has 17 digits only."""

    written: str

    def __new__(cls, written: str) -> Self:
        value = super().__new__(cls, written)
        value.written = written
        return value


class Table(Protocol):
    """columns: the names of the columns; of JSON lines those of the first row."""

    columns: Sequence[str]

    def __len__(self) -> int: ...

    def row(self, number: int) -> Mapping[str, Any]:
        """Raises ValueError naming file and row where there is no row to be read."""
        ...

    def where(self, number: int) -> str:
        """File and row, for a message."""
        ...

    def select(self, columns: Sequence[str]) -> None:
        """From now on rows need hold these columns only."""
        ...

    def order(self, keys: Keys) -> Order:
        """All row numbers, shuffled. keys: a random number for each row."""
        ...


def open_table(path: Path) -> Table:
    """The rows of a file, of all files of a folder in the order of their names, or of a dataset saved by `datasets`.

    Raises ValueError naming the path when it holds no rows that can be read.
    """
    files = _files(path)
    kind = _suffix(files[0])
    table: Table
    if kind == ".parquet":
        table = ParquetTable(files)
    elif kind == ".arrow":
        table = ArrowTable(files)
    else:
        table = JsonLines(files)
    if not len(table):
        raise ValueError(f"{path} holds no rows")
    return table


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if not path.is_dir():
        if _suffix(path) is None:
            raise ValueError(f"{path}: not a kind of file that can be read. Fix: give one of {', '.join(SUFFIXES)}")
        return [path]
    if (path / "dataset_dict.json").exists():
        splits = sorted(state.parent.name for state in path.glob("*/state.json"))
        raise ValueError(f"{path} holds the splits {', '.join(splits)}. Fix: give the folder of one of them")
    if (path / "state.json").exists():
        files = _saved_by_datasets(path / "state.json")
    else:
        files = sorted(file for file in path.iterdir() if _suffix(file) is not None)
    kinds = {_suffix(file) for file in files}
    if len(kinds) != 1:
        found = ", ".join(sorted(file.name for file in path.iterdir())[:10]) or "nothing"
        raise ValueError(f"{path}: must hold files of one kind of {', '.join(SUFFIXES)}, found {found}")
    return files


def _saved_by_datasets(state: Path) -> list[Path]:
    """The files of a dataset, in its own order."""
    try:
        return [state.parent / file["filename"] for file in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{state}: must list _data_files, as `datasets` writes it: {error!r}") from error


def _suffix(path: Path) -> str | None:
    return max((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), key=len, default=None)


class JsonLines:
    """One JSON object a line. Blank lines do not count; of a compressed file a copy is unpacked that has no name."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._descriptors: list[int] = []
        self._starts: list[array[int]] = []  # of each file: where its rows begin, then where it ends
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
        file, at = _locate(self._ends, number)
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
        file, at = _locate(self._ends, number)
        before = 0
        for position in range(0, start := self._starts[file][at], 1 << 20):
            before += os.pread(self._descriptors[file], min(1 << 20, start - position), position).count(b"\n")
        return f"{self._files[file]}, line {before + 1}"

    def select(self, columns: Sequence[str]) -> None:
        pass  # a line is read whole

    def order(self, keys: Keys) -> Order:
        return np.argsort(keys, kind="stable")


def _unpacked(path: Path) -> BinaryIO:
    file = path.open("rb")
    if path.suffix != ".gz":
        return file
    with file:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 # the caller's
        try:
            shutil.copyfileobj(gzip.GzipFile(fileobj=file), copy)
        except (OSError, EOFError) as error:
            copy.close()
            raise ValueError(f"{path} cannot be unpacked: {error}") from error
    copy.seek(0)
    return copy


def _line_starts(file: BinaryIO) -> array[int]:
    """Where lines begin that are not blank, and where the file ends."""
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


class ArrowTable:
    """Arrow IPC files, mapped into memory: the operating system holds of them what is used."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._batches: list[Any] = []
        self._first: list[int] = []  # row numbers with which the files begin
        for path in files:
            self._first.append(sum(len(batch) for batch in self._batches))
            self._batches += _batches(path)
        self._ends = list(itertools.accumulate(len(batch) for batch in self._batches))
        self.columns: Sequence[str] = self._batches[0].schema.names if self._batches else ()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> Mapping[str, Any]:
        batch, at = _locate(self._ends, number)
        return self._batches[batch].slice(at, 1).to_pylist()[0]

    def where(self, number: int) -> str:
        file = bisect.bisect_right(self._first, number) - 1
        return f"{self._files[file]}, row {number - self._first[file]}"

    def select(self, columns: Sequence[str]) -> None:
        self._batches = [
            batch.select([column for column in columns if column in batch.schema.names]) for batch in self._batches
        ]

    def order(self, keys: Keys) -> Order:
        return np.argsort(keys, kind="stable")


def _batches(path: Path) -> list[Any]:
    import pyarrow as pa

    try:
        source = pa.memory_map(str(path))
        if source.read(6) == b"ARROW1":  # the file format; `datasets` writes the stream format
            reader = pa.ipc.open_file(source)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        else:
            source.seek(0)
            batches = list(pa.ipc.open_stream(source))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a whole Arrow file: {error}") from error
    return [batch for batch in batches if len(batch)]


class ParquetTable:
    """Parquet files. The row groups of one window are in memory, and those of no other.

    Without a shuffle each row group is a window of its own. A shuffle puts row groups together at random into windows
    of WINDOW_ROWS rows or WINDOW_BYTES bytes, or a single larger one, and shuffles the rows within each.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = [(path, _parquet_file(path)) for path in files]
        self._groups = [
            (file, group) for file, (_, parquet) in enumerate(self._files) for group in range(parquet.num_row_groups)
        ]
        self._ends = list(itertools.accumulate(self._metadata(group).num_rows for group in range(len(self._groups))))
        self._window: list[int] = list(range(len(self._groups)))  # that each row group belongs to
        self._loaded: dict[int, Any] = {}
        self._selected: list[str] | None = None
        self.columns: Sequence[str] = self._files[0][1].schema_arrow.names

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, number: int) -> Mapping[str, Any]:
        group, at = _locate(self._ends, number)
        return self._rows(group, number).slice(at, 1).to_pylist()[0]

    def where(self, number: int) -> str:
        group, at = _locate(self._ends, number)
        file, in_file = self._groups[group]
        before = sum(self._metadata(group - back).num_rows for back in range(1, in_file + 1))
        return f"{self._files[file][0]}, row {before + at}"

    def select(self, columns: Sequence[str]) -> None:
        self._selected = list(columns)
        self._loaded.clear()

    def order(self, keys: Keys) -> Order:
        self._loaded.clear()
        ends = np.asarray(self._ends)
        rows = np.diff(ends, prepend=0)
        window, full_rows, full_bytes = -1, WINDOW_ROWS, WINDOW_BYTES
        filled = np.flatnonzero(rows)
        for group in filled[np.argsort(keys[ends[filled] - rows[filled]], kind="stable")].tolist():
            more_rows, more_bytes = int(rows[group]), self._bytes(group)
            if full_rows + more_rows > WINDOW_ROWS or full_bytes + more_bytes > WINDOW_BYTES:
                window, full_rows, full_bytes = window + 1, 0, 0
            self._window[group] = window
            full_rows, full_bytes = full_rows + more_rows, full_bytes + more_bytes
        return np.lexsort((keys, np.repeat(self._window, rows)))

    def _rows(self, group: int, number: int) -> Any:
        if group not in self._loaded:
            window = self._window[group]
            self._loaded = {other: rows for other, rows in self._loaded.items() if self._window[other] == window}
            file, in_file = self._groups[group]
            try:
                parquet = self._files[file][1]
                self._loaded[group] = parquet.read_row_group(in_file, columns=self._selected, use_threads=False)
            except (OSError, ValueError) as error:  # of which pyarrow's own are
                raise ValueError(f"{self.where(number)}: the row group cannot be read: {error}") from error
        return self._loaded[group]

    def _metadata(self, group: int) -> Any:
        file, in_file = self._groups[group]
        return self._files[file][1].metadata.row_group(in_file)

    def _bytes(self, group: int) -> int:
        """Of the columns that are read, unpacked."""
        metadata = self._metadata(group)
        columns = [metadata.column(number) for number in range(metadata.num_columns)]
        wanted = self._selected
        return sum(
            column.total_uncompressed_size
            for column in columns
            if wanted is None or column.path_in_schema.split(".")[0] in wanted
        )


def _parquet_file(path: Path) -> Any:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a whole parquet file: {error}") from error


def _locate(ends: Sequence[int], number: int) -> tuple[int, int]:
    """(part, row within it) of a row; ends: the row number with which each part ends."""
    part = bisect.bisect_right(ends, number)
    return part, number - (ends[part - 1] if part else 0)


def shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} nested very deep"
    return text if len(text) <= 80 else f"{text[:60]} ... {text[-15:]}"
