"""Engine processes leave the terminal's session, whichever of them asks first."""

import subprocess
import sys

CODE = """
import os
from engine.process.forks import leave_terminal
before = os.getsid(0)
leave_terminal()
leave_terminal()
print(before != os.getpid() == os.getsid(0) == os.getpgrp())
"""


def test_a_process_leaves_its_terminal_once():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
