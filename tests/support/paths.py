"""Where things lie in the repository."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "recipes" / "tiny" / "agent"
GOLDEN = ROOT / "tests" / "golden"
ROCSTAR = (sys.executable, "-u", "-m", "engine.programs.rocstar")
