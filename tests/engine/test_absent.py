"""The node starts without scipy, and can still have it. In processes of their own: imports cannot be taken back."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_scipy = pytest.mark.skipif(find_spec("scipy") is None, reason="without scipy there is nothing to keep out")

NODE = """
import asyncio, sys
from pathlib import Path
from engine.chat import Chat
from engine.replica import Replica, ReplicaConfig, prepare_environment

async def main():
    Chat.load("recipes/tiny")
    replica = Replica(ReplicaConfig(checkpoint="recipes/tiny", kv_blocks=64), 0, None, lambda *_: None)
    try:
        await replica.start()
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in ("self", replica.pid)]
    finally:
        await replica.shutdown()
    print("torch" in maps[1], ["site-packages/scipy/" in text for text in maps], "scipy" in sys.modules)
    import scipy.signal

prepare_environment()
asyncio.run(main())
"""

FOREIGN = """
import sys
import transformers
from engine.absent import scipy_absent

assert transformers.utils.is_scipy_available()
with scipy_absent():
    import transformers.loss.loss_for_object_detection
    print("scipy.optimize" in sys.modules)
"""

NESTED = """
import sys
from engine.absent import scipy_absent

for _ in range(2):
    try:
        with scipy_absent():
            import scipy
    except ModuleNotFoundError:
        print("absent", "scipy" in sys.modules)
import scipy
with scipy_absent():
    import scipy.special
    print("there")
"""


def said(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_scipy
def test_neither_the_node_nor_its_engine_loads_scipy():
    assert said(NODE) == "True [False, False] False\n"


@needs_scipy
def test_transformers_that_knows_of_scipy_gets_it():
    assert said(FOREIGN) == "True\n"


@needs_scipy
def test_scipy_is_absent_only_meanwhile_and_only_where_it_is_not_loaded():
    assert said(NESTED) == "absent False\nabsent False\nthere\n"
