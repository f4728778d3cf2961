"""What a machine needs that has a GPU, Python 3.12, torch and transformers, but no network.

    python -m bench gpu pack --into FOLDER [--from WHEELS]

Downloads vLLM's wheel and those of the packages that such a machine lacks (or takes them from WHEELS), leaves out of
vLLM what a Hopper GPU does not run, and writes pieces of at most 60 MiB with this checkout, MANIFEST.json and start.py.
There, `python start.py` puts all together and checks it; `python start.py -m bench gpu` then runs.

Invariant: a piece is written whole or not at all, and start.py unpacks nothing whose SHA-256 is another.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from bench.report import existing, say

ROOT = Path(__file__).resolve().parents[2]
VLLM = "vllm==0.26.0"  # the newest for torch 2.11
# What a Hopper GPU does not run, or nobody here: kernels of Ampere and Blackwell, the server in Rust.
LEFT_OUT = ("_vllm_fa2_C", "vllm-rs", "_flashmla", "_qutlass", "fmha_sm100", "_rust_tool_parser")
# What vLLM 0.26 and rocstar import and the machine lacks; start.py says what is missing there.
CARRIED = Path(__file__).with_name("carried.txt").read_text().split()
PIECE_BYTES = 60 << 20
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{n}_x86_64" for n in (39, 38, 35, 34, 31, 28, 27, 17, 12)))


class Pieces:
    """A stream that is cut into files of at most `piece_bytes`."""

    def __init__(self, folder: Path, piece_bytes: int = PIECE_BYTES) -> None:
        self.files: list[dict[str, str | int]] = []
        self._folder, self._most = folder, piece_bytes
        self._open: BinaryIO | None = None
        self._written = 0
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        left = memoryview(data)
        while left:
            if self._open is None:
                self._open = (self._folder / f"piece-{len(self.files):02}").open("wb")
                self._written, self._hash = 0, hashlib.sha256()
            part = left[: self._most - self._written]
            self._open.write(part)
            self._hash.update(part)
            self._written += len(part)
            left = left[len(part) :]
            if self._written == self._most:
                self._end()
        return len(data)

    def close(self) -> None:
        if self._open is not None:
            self._end()

    def _end(self) -> None:
        assert self._open is not None
        self._open.close()
        name = Path(self._open.name).name
        self.files.append({"name": name, "size_bytes": self._written, "sha256": self._hash.hexdigest()})
        self._open = None


def cut(wheel: Path) -> Iterator[tuple[str, bytes]]:
    """(name, content) of what of a wheel is carried."""
    with zipfile.ZipFile(wheel) as opened:
        for info in opened.infolist():
            if not info.is_dir() and not any(part in info.filename for part in LEFT_OUT):
                yield info.filename, opened.read(info)


def write(wheels: Iterable[Path], sources: Path, folder: Path, *, piece_bytes: int = PIECE_BYTES) -> list[str]:
    """Writes the pieces, the manifest and start.py; returns the names of the wheels. sources: a checkout.

    Raises OSError, and ValueError for a folder that holds anything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty. Fix: another --into")
    pieces, names = Pieces(folder, piece_bytes), []
    with tarfile.open(fileobj=pieces, mode="w|gz") as archive:  # type: ignore[call-overload]
        for wheel in wheels:
            say(wheel.name)
            names.append(wheel.name)
            for name, content in cut(wheel):
                _add(archive, f"packages/{name}", content)
        for name in _tracked(sources):
            _add(archive, f"rocstar/{name}", (sources / name).read_bytes())
    pieces.close()
    (folder / "MANIFEST.json").write_text(json.dumps({"pieces": pieces.files, "wheels": names}, indent=1) + "\n")
    shutil.copy(Path(__file__).with_name("start.py"), folder / "start.py")
    return names


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    runs = "/bin/" in name or name.endswith((".so", ".sh"))  # a wheel does not say what may be run
    info.size, info.mode = len(content), 0o755 if runs else 0o644
    archive.addfile(info, io.BytesIO(content))


def _tracked(sources: Path) -> list[str]:
    done = subprocess.run(["git", "-C", str(sources), "ls-files", "-z"], capture_output=True, text=True, check=True)
    names = [*done.stdout.split("\0"), "sandbox/inside/_native.so"]  # built once for the sandbox, for any Python
    return [name for name in names if name and (sources / name).is_file()]


def versions(lock: Path) -> dict[str, str]:
    """Of each package in a lock file, by its name in lower case with dashes."""
    found = re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\+]+)", lock.read_text(), re.MULTILINE)
    return {canonical(name): version for name, version in found}


def canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def required(wheel: Path, python: str) -> dict[str, SpecifierSet]:
    """Which versions of others a wheel asks for on Linux, by name."""
    with zipfile.ZipFile(wheel) as opened:
        [name] = [each for each in opened.namelist() if each.endswith(".dist-info/METADATA")]
        lines = opened.read(name).decode().partition("\n\n")[0].splitlines()
    there = {"python_version": python, "sys_platform": "linux", "platform_system": "Linux", "extra": ""}
    there["platform_machine"] = "x86_64"
    found: dict[str, SpecifierSet] = {}
    for line in lines:
        if line.startswith("Requires-Dist:"):
            wanted = Requirement(line.removeprefix("Requires-Dist:").strip())
            if wanted.marker is None or wanted.marker.evaluate(there):
                found[canonical(wanted.name)] = wanted.specifier
    return found


def chosen(package: str, pinned: Mapping[str, str], asked: Mapping[str, SpecifierSet]) -> str:
    """What to download: our own version where vLLM takes it, else what vLLM asks for. Ours are of another vLLM."""
    key = canonical(package)
    takes = asked.get(key, SpecifierSet())
    if key in pinned and takes.contains(pinned[key]):
        return f"{package}=={pinned[key]}"
    return f"{package}{takes}"


def download(folder: Path, python: str) -> list[str]:
    """Wheels for a version of Python into a folder; returns the packages for which there are none."""
    pinned = versions(ROOT / "requirements" / "cpu.lock")
    common = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    common += [f"--python-version={python}", "--implementation=cp"]
    common += [f"--abi={tag}" for tag in (f"cp{python.replace('.', '')}", "abi3", "none")]
    common += [f"--platform={name}" for name in PLATFORMS] + ["--dest", str(folder)]
    missing = []

    def get(wanted: str) -> None:
        say(wanted)
        done = subprocess.run([*common, wanted], capture_output=True, text=True, check=False)
        if done.returncode:
            missing.append(wanted)

    get(VLLM)
    wheel = next(folder.glob("vllm-*.whl"), None)
    asked = required(wheel, python) if wheel else {}
    for package in CARRIED:
        get(chosen(package, pinned, asked))
    return missing


def main(given: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench gpu pack", description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, required=True, help="a new folder")
    parser.add_argument("--from", dest="wheels", type=existing(), help="folder of wheels instead of a download")
    parser.add_argument("--python", default="3.12", help="version there")
    options = parser.parse_args(given)
    with tempfile.TemporaryDirectory() as made:
        folder = options.wheels or Path(made)
        missing = [] if options.wheels else download(folder, options.python)
        wheels = sorted(folder.glob("*.whl"))
        if not any(wheel.name.startswith("vllm-") for wheel in wheels):
            sys.exit(f"error: no wheel of {VLLM}. Fix: a network, or --from with a folder that has it")
        try:
            names = write(wheels, ROOT, options.into)
        except (OSError, ValueError) as error:
            sys.exit(f"error: {error}")
    sizes = [file.stat().st_size for file in options.into.glob("piece-*")]
    print(f"{len(sizes)} pieces, {sum(sizes) / 1e6:.0f} MB, {len(names)} wheels in {options.into}")
    if missing:
        print(f"without a wheel for Python {options.python}: {', '.join(missing)}")
    print("carry them all to one folder there, then: python start.py && python start.py -m bench gpu")
