"""What importing the sandbox loads."""

from __future__ import annotations

import subprocess
import sys

from tests.support.paths import ROOT


def test_import_is_light() -> None:
    code = (
        "import sys, sandbox\nassert not {'torch', 'vllm', 'numpy', 'uvloop'} & set(sys.modules)\n"
        "assert not {'engine', 'algo'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
