"""Opens what rows come from: files, folders, or a data set of the Hugging Face hub.

Promises
- Rows are read one by one, by their number; memory does not grow with a file (CSV excepted), but for 16 bytes a row.
- A file that cannot be read is refused with its path, the row, and what to do.
- A row has the id that `engine.data.prompts.read_prompts` gives it, so that the samples of a prompt find their row.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.data.tables import SUFFIXES, Table, name_of, open_table, shown
from engine.errors import BadInput

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
KINDS = (*SUFFIXES, ".csv")
ANY_FILES = ("**/*.parquet", "**/*.jsonl", "**/*.json", "**/*.csv")
Fetch = Callable[..., str]
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Hub:
    """Files of a data set on the Hugging Face hub. files: patterns of the paths that are read, in this order."""

    id: str
    files: tuple[str, ...]

    def found_in(self, folder: Path) -> list[Path]:
        """Returns those of its files that a copy of the data set has."""
        paths = [path for pattern in self.files for path in sorted(folder.glob(pattern))]
        return [path for path in dict.fromkeys(paths) if not path.name.startswith((".", "dataset_info"))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A file or folder of rows. name: how their ids begin."""

    path: Path
    name: str
    table: Table

    def __len__(self) -> int:
        return len(self.table)

    def row(self, number: int) -> Mapping[str, Any]:
        """Returns a row. Raises BadInput where it cannot be read."""
        try:
            return self.table.row(number)
        except ValueError as error:
            raise BadInput(f"{error}. Fix: get the file anew, or take this row out of it") from error

    def sha256(self) -> str:
        """Hashes the file, or all files of the folder."""
        digest = hashlib.sha256()
        for path in _files(self.path):
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        return digest.hexdigest()


class Sources:
    """The rows of several sources, numbered one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def rows(self, numbers: range) -> Iterator[tuple[Source, int, Mapping[str, Any]]]:
        """Yields (source, number within it, row). Raises BadInput."""
        first = 0
        for source in self.sources:
            start, stop = max(numbers.start - first, 0), min(numbers.stop - first, len(source))
            for number in range(start, stop):
                yield source, number, source.row(number)
            first += len(source)


def open_source(path: Path, columns: Sequence[str] | None = None) -> Source:
    """Opens a source. columns: those of a parquet file that are read, where it has them; None: all.

    Raises BadInput naming the path where there are no rows.
    """
    try:
        table = _table(path)
    except ValueError as error:
        raise BadInput(f"{error}. Fix: give a file or folder of {', '.join(KINDS)}") from error
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    if columns is not None and (there := [column for column in columns if column in table.columns]):
        table.select(there)
    return Source(path=path, name=name_of(path), table=table)


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _table(path: Path) -> Table:
    """Opens the rows. Raises ValueError where there are none."""
    if path.suffix == ".csv" and path.is_file():
        return CsvFile(path)
    return JsonArray(path) if _is_array(path) else open_table(path)


def _is_array(path: Path) -> bool:
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(64).lstrip().startswith(b"[")


class JsonArray:
    """A file that is one JSON array of objects, as many data sets of the hub are. Its elements are found by reading it
    once; it is never whole in memory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._ends = array("Q"), array("Q")
        self._find_elements()
        if not self._starts:
            raise ValueError(f"{path} holds no rows")
        self.columns: Sequence[str] = tuple(self.row(0))

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, number: int) -> Mapping[str, Any]:
        start = self._starts[number]
        try:
            row = json.loads(self._bytes(start, self._ends[number] - start))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.where(number)}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{self.where(number)}: must be a JSON object, got {shown(row)}")
        return row

    def where(self, number: int) -> str:
        return f"{self._path}, row {number}"

    def select(self, columns: Sequence[str]) -> None:
        pass  # an element is read whole

    def _find_elements(self) -> None:
        """Bytes are read as Latin-1, where a character is a byte; JSON's own characters are the same in UTF-8."""
        decode = json.JSONDecoder(strict=False).raw_decode
        text, base = "", 0  # the part in memory, and where it begins in the file
        at, size, ended = 0, _CHUNK, False
        opened = False
        while True:
            at = _skip(text, at, " \t\r\n," if opened else " \t\r\n[")
            opened = opened or at > 0
            if at < len(text) and text[at] == "]":
                return
            try:
                _, end = decode(text, at)
            except (ValueError, RecursionError) as error:
                if ended:
                    where = f"{self._path}, row {len(self._starts)}"
                    raise ValueError(f"{where}: not JSON ({error}); the file may have been cut off") from error
            else:
                self._starts.append(base + at)
                self._ends.append(base + end)
                at = end
                continue
            more = self._bytes(base + len(text), size).decode("latin-1")
            ended = not more
            base, text, at = base + at, text[at:] + more, 0
            size = max(_CHUNK, len(text))  # an element longer than what is read is not decoded many times

    def _bytes(self, start: int, size: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek(start)
            return file.read(size)


class CsvFile:
    """A file of comma-separated values whose first line names the columns. It is in memory whole: GPQA is small."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open(newline="", encoding="utf-8-sig") as file:
                self._rows = list(csv.DictReader(file, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read as CSV: {error}") from error
        if not self._rows:
            raise ValueError(f"{path} holds no rows")
        self.columns: Sequence[str] = tuple(column for column in self._rows[0] if column is not None)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Mapping[str, Any]:
        return self._rows[number]

    def where(self, number: int) -> str:
        return f"{self._path}, row {number}"

    def select(self, columns: Sequence[str]) -> None:
        pass  # all are in memory


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at


def find(given: Sequence[str], hub: Hub | None, set_name: str, fetch: Fetch | None = None) -> list[Path]:
    """Returns the files of the sources that were given, or those of the set's own data set on the hub.

    fetch: as of `download`. Raises BadInput for a source that is not there.
    """
    if not given:
        if hub is None:
            raise BadInput(f"source: {set_name} is on no hub that is known. Fix: give a file or folder, source=...")
        return download(hub, fetch)
    paths: list[Path] = []
    for text in given:
        path = Path(text).expanduser()
        if path.is_dir() and hub is not None and (copy := hub.found_in(path)):
            paths += copy
        elif path.exists():
            paths.append(path)
        elif HUB_ID.fullmatch(text) and not text.endswith(KINDS):
            same = hub is not None and hub.id == text
            paths += download(hub if same and hub else Hub(id=text, files=ANY_FILES), fetch)
        else:
            raise BadInput(f"source: {text} does not exist. Fix: give a file, a folder, or the id of a data set")
    return paths


def download(hub: Hub, fetch: Fetch | None = None) -> list[Path]:
    """Returns the data set's files, from the hub or from its cache on this machine. Raises BadInput with what to do.

    fetch: what downloads, huggingface_hub.snapshot_download where it is None.
    """
    from huggingface_hub import errors, snapshot_download

    local = "get its files on a machine that can, and give them here: source=FILE_OR_FOLDER"
    page = f"the page of the data set {hub.id}"
    try:
        folder = (fetch or snapshot_download)(
            hub.id, repo_type="dataset", allow_patterns=list(hub.files), max_workers=4
        )
    except errors.GatedRepoError as error:
        fix = f"accept its terms on {page}, then set HF_TOKEN; or {local}"
        raise BadInput(f"source: {hub.id} is gated, and this account has no access to it. Fix: {fix}") from error
    except errors.RepositoryNotFoundError as error:
        fix = f"correct the id; or set HF_TOKEN, if the data set is private; or {local}"
        raise BadInput(f"source: the hub has no data set {hub.id} for this account. Fix: {fix}") from error
    except Exception as error:  # several libraries raise their own: no network, a full disk, a hub that is down
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise BadInput(f"source: {hub.id} cannot be had from the hub ({cause}). Fix: {local}") from error
    paths = hub.found_in(Path(folder))
    if not paths:
        files = ", ".join(hub.files)
        raise BadInput(f"source: the data set {hub.id} has no file {files} on the hub any more. Fix: {local}")
    return paths
