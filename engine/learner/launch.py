"""`python -S -m engine.learner.launch --ranks R --folder DIR MODULE ...` runs `python -m MODULE ...` R times: the
learner's ranks on this host. With `--hosts H --at HOST:PORT` there are as many on each of H hosts.

The environment of each rank has LOCAL_RANK, LOCAL_WORLD_SIZE, WORLD_SIZE, and what it needs to meet the others
(`algo.learner.hosts.meet`): RANK and LEARNER_STORE, a file in DIR, if all are on this host; otherwise LEARNER_AT and
LEARNER_RUN, and LEARNER_HOST on hosts other than the lead's.

Invariants
- This program listens nowhere, and ranks of one host meet in a private folder: others find no port to connect to.
- When a rank fails, the others have GRACE_S to report what they know, and are killed then. This program prints one
  line, which names the first rank that failed and how it ended. Its exit status is 1 then, and 0 if no rank failed.
- No rank outlives this process: the kernel kills each with it, from the first moment on.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from engine.process.forks import die_with

GRACE_S = 1  # signal.alarm takes whole seconds
SAYS = "launcher: "


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.learner.launch", description="the learner's ranks here")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks on this host")
    parser.add_argument("--folder", type=Path, required=True, help="private folder where ranks of one host meet")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--at", help="HOST:PORT of the lead, where several hosts meet")
    parser.add_argument("--run", default="", help="a name that no other run has")
    parser.add_argument("--host", help="a name that no other host has; not given on the lead's host")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="MODULE ...")
    options = parser.parse_args(arguments)
    shared = {"WORLD_SIZE": str(options.hosts * options.ranks), "LOCAL_WORLD_SIZE": str(options.ranks)}
    if options.hosts > 1:
        shared |= {"LEARNER_AT": options.at, "LEARNER_RUN": options.run}
        shared |= {"LEARNER_HOST": options.host} if options.host else {}
    else:
        store = options.folder / "ranks"
        store.unlink(missing_ok=True)  # an earlier learner's store would send these ranks to the old ones
        shared |= {"LEARNER_STORE": str(store)}
    ranks: dict[int, int] = {}
    for rank in range(options.ranks):
        own = {"LOCAL_RANK": str(rank)} | ({"RANK": str(rank)} if options.hosts == 1 else {})
        ranks[_start([sys.executable, "-m", *options.command], {**os.environ, **shared, **own})] = rank
    return _watch(ranks)


def _start(command: list[str], environment: Mapping[str, str]) -> int:
    """Starts a rank and returns its pid. The process is tied to this one before it executes the command."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with(parent)
            os.execve(command[0], command, environment)
        finally:
            os._exit(127)
    return pid


def _watch(ranks: dict[int, int]) -> int:
    """Waits until all ranks have ended, and returns the exit status. ranks: rank by pid."""
    failed = False
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = True
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            print(f"{SAYS}rank {rank} {how}", file=sys.stderr, flush=True)
            signal.signal(signal.SIGALRM, lambda *_: _kill(ranks))
            signal.alarm(GRACE_S)
    return int(failed)


def _kill(ranks: Mapping[int, int]) -> None:
    for pid in list(ranks):
        with suppress(ProcessLookupError):  # the signal came between the wait for it and its removal
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
