"""Starts the learner as the node does; light, for a process that only has to be killed."""

import subprocess
import sys

from tests.support.paths import ROOT


def launch(address, ranks=1, **options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "algo.learner", "--connect", address]
    return subprocess.Popen(command, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL, **options)
