"""Snapshots of a workspace: its files as a value. Pure.

Invariants
- A snapshot is never changed; each edit makes another one. So trajectories that begin from one cannot see one another,
  nothing is left on a disk, and what a model writes as a path is never looked up on this machine.
- A path is relative, without `..`, and no file lies below another file.
- No snapshot has more files or bytes than its bounds allow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from recipes.tools.guest import answer_of, request_of
from sandbox.require import positive, require_fields

DEEPEST, LONGEST_NAME = 32, 200  # folders below one another; characters of a path


class BadEdit(ValueError):
    """An edit that the workspace does not allow. The message is for the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The most that a workspace may hold."""

    files: int = 200
    bytes: int = 1 << 20

    def __post_init__(self) -> None:
        require_fields(self, positive, "files", "bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The files of a workspace by path.

    >>> Snapshot(files={"a.txt": b"one"}).replaced("a.txt", "one", "two").files["a.txt"]
    b'two'
    """

    files: Mapping[str, bytes]
    bounds: Bounds = field(default_factory=Bounds)

    def __post_init__(self) -> None:
        """Raises BadEdit for a path or a size that no workspace has."""
        if len(self.files) > self.bounds.files:
            raise BadEdit(f"a workspace has at most {self.bounds.files} files, got {len(self.files)}")
        size = sum(map(len, self.files.values()))
        if size > self.bounds.bytes:
            raise BadEdit(f"a workspace has at most {self.bounds.bytes} bytes, got {size}")
        for path in self.files:
            if clean_path(path) != path:
                raise BadEdit(f"no path of a workspace: {path!r:.100}")
            parts = path.split("/")
            for end in range(1, len(parts)):
                if "/".join(parts[:end]) in self.files:
                    raise BadEdit(f"{path!r:.100} lies below a file")

    @classmethod
    def read(cls, state: bytes, bounds: Bounds | None = None) -> Snapshot:
        """Returns the snapshot that `state` wrote. Raises ValueError for other bytes."""
        _, files = answer_of(state.decode())
        return cls(files=files, bounds=bounds or Bounds())

    def state(self) -> bytes:
        return request_of({}, dict(sorted(self.files.items()))).encode()

    def text(self, path: str) -> str:
        """Returns the text of a file. Raises BadEdit if there is none, or it is no text."""
        try:
            return self.files[path].decode()
        except KeyError:
            raise BadEdit(f"FileNotFoundError: no file {path!r:.100}") from None
        except UnicodeDecodeError:
            raise BadEdit(f"UnicodeDecodeError: {path!r:.100} is no text") from None

    def written(self, path: str, text: str) -> Snapshot:
        """Returns a snapshot with this file in place of any file of that path. Raises BadEdit."""
        if any(other.startswith(f"{path}/") for other in self.files):
            raise BadEdit(f"IsADirectoryError: {path!r:.100} is a folder")
        return replace(self, files={**self.files, path: text.encode("utf-8", "replace")})

    def replaced(self, path: str, old: str, new: str) -> Snapshot:
        """Returns a snapshot in which `new` stands for the one place of `old` in a file. Raises BadEdit."""
        text = self.text(path)
        count = text.count(old) if old else 0
        if count != 1:
            raise BadEdit(f"ValueError: the old text occurs {count} times in {path}, and must occur once")
        return self.written(path, text.replace(old, new))


def clean_path(text: str, root: str = "") -> str:
    """Returns a path as snapshots have it. root: a folder by which the model may also name the workspace.

    Raises BadEdit for what is outside of the workspace.

    >>> clean_path("./src//a.py"), clean_path("/app/a.py", root="/app")
    ('src/a.py', 'a.py')
    """
    if not text or len(text) > LONGEST_NAME or not text.isprintable():
        raise BadEdit(f"ValueError: a path has 1 to {LONGEST_NAME} printable characters, got {text!r:.60}")
    try:
        long = any(len(part.encode()) > 255 for part in text.split("/"))
    except UnicodeEncodeError:
        raise BadEdit(f"ValueError: no path: {text!r:.60}") from None
    inside = text.removeprefix(root) if root and text.startswith(f"{root}/") else text
    if inside.startswith("/") and inside is text:
        raise BadEdit(f"PermissionError: {text!r:.100} is outside of the workspace; give a relative path")
    parts = [part for part in inside.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise BadEdit(f"PermissionError: {text!r:.100} is outside of the workspace")
    if not parts or len(parts) > DEEPEST or long:
        raise BadEdit(f"ValueError: {text!r:.100} names no file")
    return "/".join(parts)
