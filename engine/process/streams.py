"""Standard output and error that cannot end a run, and text files that are read as UTF-8.

Invariants
- A write to a stream that nobody reads any more, or whose device is full, never raises. It is reported once; from then
  on all output to it is discarded, also that of child processes that start later.
- Descriptors 0, 1 and 2 are open, so no file of the run gets one of them and is printed into.
- Text files without a declared encoding are read as UTF-8, whatever the locale is.
"""

from __future__ import annotations

import contextlib
import io
import locale
import os
import sys
from collections.abc import Callable
from typing import Self, TextIO


class LastingStream(io.TextIOWrapper):
    """A standard stream that outlives its reader.

    lost: what went wrong with it, as a line for the user. listeners: called with that line, once.
    """

    lost: str | None = None
    title: str
    listeners: list[Callable[[str], None]]

    @classmethod
    def over(cls, stream: TextIO, title: str) -> Self:
        """Returns a stream that takes over the descriptor of another one, which cannot be used any more."""
        assert isinstance(stream, io.TextIOWrapper), stream
        encoding, buffered, through = stream.encoding, stream.line_buffering, stream.write_through
        lasting = cls(stream.detach(), encoding, "replace", line_buffering=buffered, write_through=through)
        lasting.title, lasting.listeners = title, []
        return lasting

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self.fileno())
        self.lost = f"cannot write to {self.title}: {error.strerror}; the run goes on without it"
        for listener in self.listeners:
            listener(self.lost)


def prepare_descriptors() -> None:
    """Opens standard descriptors that are closed, and makes UTF-8 the encoding. Called when a program begins."""
    _open_closed_descriptors()
    _read_text_as_utf8()


def outlive_readers() -> None:
    """Makes writes to standard streams never raise. Called before anything is printed."""
    stdout = LastingStream.over(sys.stdout, "standard output")
    stderr = LastingStream.over(sys.stderr, "standard error")
    stdout.listeners.append(lambda line: print(line, file=stderr, flush=True))
    sys.stdout = sys.__stdout__ = stdout  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = stderr  # type: ignore[misc]


def listen(listener: Callable[[str], None]) -> None:
    """Calls listener with a line for each standard stream that is lost, or was lost before. Needs `outlive_readers`."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, LastingStream):
            stream.listeners.append(listener)
            if stream.lost is not None:
                listener(stream.lost)


def _open_closed_descriptors() -> None:
    """Opens /dev/null for closed descriptors. Python has None for such a stream, which vLLM and others flush anyway."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            assert opened == descriptor, (opened, descriptor)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, mode, closefd=False, encoding="utf-8"))  # noqa: SIM115


def _read_text_as_utf8() -> None:
    """Makes UTF-8 the encoding of text. Torch reads its sources in the locale's, which may be ASCII (LC_ALL=C)."""
    os.environ["PYTHONUTF8"] = "1"  # for child processes
    if locale.getencoding().lower() not in ("utf-8", "utf8"):
        with contextlib.suppress(locale.Error):  # an old C library
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")
