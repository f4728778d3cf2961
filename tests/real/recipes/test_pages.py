"""The programs of recipes/evaluating.md and recipes/notebook.md, as a reader runs them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.packages import environment_with
from tests.support.paths import ROOT

NOTEBOOK = ("ipykernel==7.4.0", "nbclient==0.11.0")


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "recipes" / page).read_text(), re.DOTALL)


@pytest.mark.timeout(200)
def test_a_checkpoint_is_evaluated_without_a_learner(tmp_path: Path) -> None:
    """Bounds are four standard errors around the recorded accuracy of the tiny agent, 0.31."""
    (tmp_path / "mine.py").write_text(
        blocks("evaluating.md")[0].replace("recipes/tiny/agent", f"{ROOT}/recipes/tiny/agent")
    )
    ended = subprocess.run(
        [sys.executable, "mine.py"], capture_output=True, text=True, cwd=tmp_path, timeout=180, check=False
    )
    assert ended.returncode == 0, ended.stderr
    [accuracy] = re.findall(r"^(\S+) of 64 are right$", ended.stdout, re.MULTILINE)
    assert 0.08 < float(accuracy) < 0.54


KERNEL = """
import sys, nbclient, nbformat
cells = [nbformat.v4.new_code_cell(text) for text in open("cells").read().split("\\0")]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
for cell in cells:
    for output in cell.outputs:
        if output.output_type == "execute_result":
            print(output.data["text/plain"])
"""


@pytest.mark.timeout(900)
def test_the_notebooks_cells_run_in_a_kernel(tmp_path: Path) -> None:
    python = environment_with("notebook", *NOTEBOOK) / "bin" / "python"
    quick, own, results = blocks("notebook.md")
    small = "steps=2, prompts_per_step=4, group_size=2, eval_problems=8"
    cells = [quick.replace("Config(steps=4)", f"Config({small})"), own, f"await run(mine, Mine({small[:41]}))"]
    cells += [results + "\nsorted(curve)", "(Path('runs') / 'notebook-2' / 'checkpoint').exists()"]
    (tmp_path / "cells").write_text("\0".join(cells))
    command = [str(python), "-c", KERNEL]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    accuracies, *_, steps, saved = ended.stdout.splitlines()
    assert re.fullmatch(r"\(\S+, \S+\)", accuracies), ended.stdout
    assert (steps, saved) == ("[1, 2]", "True")
