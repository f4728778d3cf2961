"""Calls without a jail, for isolation="none": each has a temporary folder and a process group. Standard library only.

Nothing here protects from guest code: it has the rights of the user who started the host. What a call leaves in its
process group is killed; what leaves the group lives on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time

from sandbox.inside import guest, main_program
from sandbox.inside.slot import Slot, SlotReport


class UnjailedSlot(Slot):
    def enter(self) -> None:
        """Enters no namespaces."""

    def _execute(self, request: guest.SlotRequest, source: int, outputs: list[int]) -> SlotReport:
        folder = tempfile.mkdtemp(prefix="rocstar-call-")
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, 0)
                os.chdir(folder)
                # Not in a /tmp that all share.
                main_program.FILENAME = os.path.join(folder, "main.py")
                sys.path[0] = folder
                main_program.make_ready()
                self._run(request, source, outputs)
            finally:
                os._exit(255)
        ended = self._ended(child, request.wall_s)
        wall = time.monotonic() - started
        for end in (lambda: os.kill(child, signal.SIGKILL), lambda: os.killpg(child, signal.SIGKILL)):
            with contextlib.suppress(ProcessLookupError):
                end()
        _, status, usage = os.wait4(child, 0)
        shutil.rmtree(folder, ignore_errors=True)
        return SlotReport(ended, status, wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
