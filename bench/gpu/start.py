"""Puts the carried pieces together and runs Python with them: `python start.py` once, then `python start.py -m ...`.

Needs nothing but Python's own library. Unpacks beside itself into `unpacked`; says what cannot be imported.
"""

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE / "unpacked"
IMPORTED = (
    "torch",
    "transformers",
    "vllm.v1.engine.async_llm",
    "vllm.distributed.weight_transfer.factory",
    "vllm.model_executor.models.qwen3",
    "vllm.lora.model_manager",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.device_allocator.cumem",
    "engine.replica.replica",
    "engine.replica.weight_transfer",
    "engine.replica.weight_transfer_gpu",
    "algo.weights.transport_gpu",
    "engine.replica.scheduler",
    "engine.fleet.fleet",
    "engine.assembly.training",
    "algo.learner.trainer",
    "sandbox",
    "recipes.quickstart",
)


class Joined:
    """The pieces as one stream; each is checked before it is read."""

    def __init__(self, pieces):
        self.pieces, self.open = list(pieces), None

    def read(self, size):
        while True:
            if self.open is None:
                if not self.pieces:
                    return b""
                self.open = checked(self.pieces.pop(0)).open("rb")
            data = self.open.read(size)
            if data:
                return data
            self.open.close()
            self.open = None


def checked(piece):
    path, found = HERE / piece["name"], hashlib.sha256()
    if not path.is_file():
        sys.exit(f"error: {path} is missing. Fix: carry every piece of MANIFEST.json")
    with path.open("rb") as opened:
        while block := opened.read(1 << 20):
            found.update(block)
    if found.hexdigest() != piece["sha256"]:
        sys.exit(f"error: {path} is damaged: its SHA-256 is {found.hexdigest()}. Fix: carry it again")
    return path


def unpack():
    manifest = json.loads((HERE / "MANIFEST.json").read_text())
    print(f"unpacking {len(manifest['pieces'])} pieces", flush=True)
    beside = TARGET.with_name("unpacking")
    with tarfile.open(fileobj=Joined(manifest["pieces"]), mode="r|gz") as archive:
        archive.extractall(beside, filter="data")
    beside.rename(TARGET)


def environment():
    sources = TARGET / "rocstar"
    # the machine's own torch and transformers go first, else a package that came along would hide them
    script = "import sys, os; sys.path.append(os.environ['ROCSTAR_PACKAGES'])"
    hook = TARGET / "hook"
    hook.mkdir(exist_ok=True)
    (hook / "sitecustomize.py").write_text(script + "\n")
    paths = [str(hook), str(sources), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "ROCSTAR_PACKAGES": str(TARGET / "packages")}


def rehearse():
    """Imports what a run needs, each in a process of its own."""
    failed = 0
    for name in IMPORTED:
        code = f"import importlib; importlib.import_module({name!r})"
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment(), cwd=TARGET / "rocstar", capture_output=True, text=True
        )
        last = (run.stderr.strip().splitlines() or [""])[-1]
        print(f"{'ok    ' if run.returncode == 0 else 'FAILED'} {name} {last if run.returncode else ''}", flush=True)
        failed += run.returncode != 0
    return failed


def main():
    if not TARGET.is_dir():
        unpack()
    if sys.argv[1:]:
        os.chdir(TARGET / "rocstar")
        os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
    sys.exit(1 if rehearse() else 0)


if __name__ == "__main__":
    main()
