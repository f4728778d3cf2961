"""Keeps the work on a set in shards, so that it goes on after an interruption, and makes files of them.

Promises
- A shard is whole or not there. The rows of a finished shard are not read again.
- train.parquet, test.parquet and dropped.jsonl are whole or not there, and report.json is written after them: a folder
  without it is not finished.
- A shard at a time is in memory, and of each row that is kept 8 bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.atomic_files import atomic_path, write_whole, writing
from recipes.rstar2.parts.preparation.rows import Dropped, Row, fingerprint

TRAIN, TEST, DROPPED, REPORT = "train.parquet", "test.parquet", "dropped.jsonl", "report.json"
SHARD_ROWS = 5_000  # rows of the source; an interruption costs a second or two of work


Results = Callable[[range], Iterable[tuple[str, Row | Dropped]]]


class Shards:
    """A folder of finished shards, one file each; a line is a row that is kept, or one that is dropped."""

    def __init__(self, folder: Path, rows: int) -> None:
        self.folder = folder
        self.ranges = [range(start, min(start + SHARD_ROWS, rows)) for start in range(0, rows, SHARD_ROWS)]

    @property
    def done_rows(self) -> int:
        """The rows of the source in finished shards."""
        return sum(len(rows) for shard, rows in enumerate(self.ranges) if self.is_done(shard))

    def is_done(self, shard: int) -> bool:
        return self._path(shard).exists()

    def fill(self, results: Results, *, seed: int, on_rows: Callable[[int], Any]) -> None:
        """Writes the shards that are not there yet.

        results: of these rows of the source, the id of each and what became of it. on_rows: called with the number of
        rows that are done. Raises CannotWrite.
        """
        for shard, rows in enumerate(self.ranges):
            if not self.is_done(shard):
                lines = [_line(row_id, result, seed) for row_id, result in results(rows)]
                write_whole(self._path(shard), lines)
            on_rows(rows.stop)

    def lines(self, shard: int) -> Iterator[dict[str, Any]]:
        with self._path(shard).open("rb") as file:
            yield from map(json.loads, file)

    def marks(self) -> Iterator[int]:
        """Returns the fingerprints of all rows that the finished shards keep."""
        for shard in filter(self.is_done, range(len(self.ranges))):
            yield from (line["mark"] for line in self.lines(shard) if "row" in line)

    def _path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:06d}.jsonl"


def _line(row_id: str, result: Row | Dropped, seed: int) -> bytes:
    if isinstance(result, Dropped):
        line = {"id": row_id, **{name: value for name, value in asdict(result).items() if value}}
    else:
        digest = hashlib.blake2b(f"{seed}/{row_id}".encode(errors="replace"), digest_size=8).digest()
        draw = int.from_bytes(digest, "big")
        line = {"row": result.columns(""), "mark": fingerprint(result.identity), "draw": draw}
    return json.dumps(line).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of the rows. files: name -> rows, and a hash of them that does not depend on parquet's version.

    against: how many rows each row of a test set dropped.
    """

    rows_in: int
    dropped: dict[str, int]
    files: dict[str, dict[str, Any]]
    against: dict[str, int] = field(default_factory=dict)


def assemble(shards: Shards, output: Path, *, train_rows: int | None, conversations: bool) -> Outcome:
    """Writes the rows of all shards to TRAIN and TEST, and what was dropped to DROPPED.

    train_rows: how many rows, drawn at random, are for training; the rest is for testing. None: all. A file without
    rows is not written. Raises CannotWrite.
    """
    draws = [line["draw"] for shard in range(len(shards.ranges)) for line in shards.lines(shard) if "row" in line]
    in_train = split(np.asarray(draws, np.uint64), train_rows)
    reasons: Counter[str] = Counter()
    against: Counter[str] = Counter()
    with ExitStack() as stack:
        outputs = {
            name: stack.enter_context(_RowFile(output / name, conversations))
            for name, is_written in ((TRAIN, in_train.any()), (TEST, not in_train.all()))
            if is_written
        }
        drafts = stack.enter_context(writing(output / DROPPED))
        draft = stack.enter_context(atomic_path(drafts))
        dropped = stack.enter_context(draft.open("wb"))
        kept = 0
        for shard in range(len(shards.ranges)):
            for line in shards.lines(shard):
                if "row" in line:
                    outputs[TRAIN if in_train[kept] else TEST].add(line["row"])
                    kept += 1
                else:
                    reasons[line["reason"]] += 1
                    if "against" in line:
                        against[line["against"]] += 1
                    dropped.write(json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n")
        for file in outputs.values():
            file.finish()
    return Outcome(
        rows_in=sum(map(len, shards.ranges)),
        dropped=dict(reasons.most_common()),
        files={name: file.described() for name, file in outputs.items()},
        against=dict(against.most_common()),
    )


def split(draws: NDArray[np.uint64], train_rows: int | None) -> NDArray[np.bool_]:
    """Returns which rows are for training: those with the smallest draws. The order of the rows decides nothing.

    >>> split(np.asarray([7, 1, 5], np.uint64), 2)
    array([False,  True,  True])
    """
    chosen = np.zeros(len(draws), np.bool_)
    chosen[np.argsort(draws, kind="stable")[:train_rows]] = True
    return chosen


class _RowFile:
    """A parquet file that appears when it is complete. A context manager."""

    def __init__(self, path: Path, conversations: bool) -> None:
        import pyarrow as pa

        self.rows, self._path, self._stack = 0, path, ExitStack()
        self._split = path.stem
        self._schema: Any = _conversations(pa) if conversations else _problems(pa)
        self._held: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()

    def __enter__(self) -> _RowFile:
        from pyarrow import parquet

        with ExitStack() as stack:
            stack.enter_context(writing(self._path))
            draft = stack.enter_context(atomic_path(self._path))
            self._writer = stack.enter_context(parquet.ParquetWriter(draft, self._schema, compression="zstd"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def add(self, row: dict[str, Any]) -> None:
        if "extra_info" in row:
            row["extra_info"]["split"] = self._split
        self._digest.update(json.dumps(row, sort_keys=True).encode())
        self._held.append(row)
        self.rows += 1
        if len(self._held) >= SHARD_ROWS:
            self.finish()

    def finish(self) -> None:
        """Writes what is held, as a row group."""
        import pyarrow as pa

        if self._held:
            self._writer.write_table(pa.Table.from_pylist(self._held, schema=self._schema))
            self._held.clear()

    def described(self) -> dict[str, Any]:
        return {"rows": self.rows, "sha256_of_rows": self._digest.hexdigest()}


def _problems(pa: Any) -> Any:
    text = pa.string()
    query = pa.struct({"query": text, "ground_truth": text})
    extra = {
        "split": text,
        "index": pa.int64(),
        "answer": text,
        "question": text,
        "need_tools_kwargs": pa.bool_(),
        "interaction_kwargs": query,
    }
    return pa.schema(
        {
            "data_source": text,
            "agent_name": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct(extra),
        }
    )


def _conversations(pa: Any) -> Any:
    text = pa.string()
    call = pa.struct({"type": text, "function": pa.struct({"name": text, "arguments": text})})
    message = pa.struct({"role": text, "content": text, "tool_calls": pa.list_(call)})
    return pa.schema({"messages": pa.list_(message), "tools": text, "source": text, "id": text})


def read_report(output: Path) -> Mapping[str, Any] | None:
    """Returns the report of a folder that is finished, else None."""
    try:
        return json.loads((output / REPORT).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
