"""`python -m engine.learner.rank MODULE ...` does as `python -m MODULE ...`, and is killed as soon as its parent, the
launcher, ends: also while the module still imports torch, for seconds.
"""

from __future__ import annotations

import os
import runpy
import sys

from engine.process.forks import die_with

if __name__ == "__main__":
    die_with(os.getppid())
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
