"""What a recipe loads."""

import subprocess
import sys


def test_a_recipe_builds_a_loss_without_loading_torch():
    code = "import sys; from algo.learner.config import LearnerConfig; LearnerConfig(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
