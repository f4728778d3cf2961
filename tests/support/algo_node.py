"""Starts the learner, or another program on several ranks, as the node does; light, for a process that only has to be
killed.
"""

import subprocess
import tempfile

from engine.learner.process import LAUNCHER
from tests.support.paths import ROOT


def on_ranks(ranks, module, *words):
    """The command that runs a module on so many ranks."""
    return [*LAUNCHER, f"--ranks={ranks}", f"--folder={tempfile.mkdtemp()}", module, *map(str, words)]


def launch(address, ranks=1, **options):
    command = on_ranks(ranks, "algo.learner", "--connect", address)
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL, **options)
