"""`python -m engine.process.tied PID COMMAND...` becomes COMMAND, which is killed as soon as process PID, its parent,
ends.

The parent cannot arrange that itself, because a child of asyncio runs no code of ours between fork and exec. The
setting outlives the exec, so COMMAND runs in this very process.
"""

from __future__ import annotations

import os
import sys

from engine.process.forks import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
