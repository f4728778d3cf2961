"""Reads tasks in the shape of Harbor (harborframework.com/docs/tasks), which Terminal-Bench 2 uses, as prompts.

    my-task/
      task.toml            [metadata], [verifier] timeout_sec, [agent], [environment]
      instruction.md       what the model reads
      environment/         Dockerfile (FROM, WORKDIR, COPY) and the files that it copies
      tests/test_*.py      functions test_*, with assert
      solution/            files that make the tests pass, put over the workspace's; not read beside a solve.sh

Tests say what a program does: `from stats import mean` and `mean([1, 2])`, or `run("main.py", "7", stdin="...")`, which
has returncode, stdout and stderr. Of pytest there is raises, approx and mark.parametrize. `open("out.txt")` and
`open("/app/out.txt")`, where /app is the WORKDIR, read what the model has left or a program of it has written: texts of
a test that begin with the WORKDIR are made the folder that the jail has. A module of Python or of the environment comes
before one of the workspace, so a workspace's modules need names of their own.

A task that needs a container (commands of its Dockerfile, other services, a shell) is refused by the name of what
needs it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from engine.errors import BadInput
from engine.types import Prompt
from recipes.tools.checked_tests import checked_tests
from recipes.tools.snapshot import BadEdit, Bounds, Snapshot, clean_path

OLDER = "task.yaml"  # the first format of Terminal-Bench
# In task.toml: what asks for more than files and Python.
NEEDS = ("docker_image", "gpus", "gpu_types", "mcp_servers", "services", "env", "setup", "skills_dir", "healthcheck")
# Images of Python, Terminal-Bench's included.
PYTHON = re.compile(
    r"(?:--platform=\S+ )?(?:\S*/)?python(?:-\d[\d-]*)?(?:[:@]\S+)?(?: as \S+)?", re.IGNORECASE
)  # images
FOLDER = re.compile(r"/[\w.-]+(?:/[\w.-]+)*/?")


def read_tasks(folder: Path, bounds: Bounds | None = None) -> Iterator[Prompt]:
    """Yields a prompt for each task folder, in the order of their names. Raises BadInput."""
    for task in task_folders(folder):
        yield read_task(task, bounds)


def task_folders(folder: Path) -> list[Path]:
    """Returns the folders of tasks in the order of their names. Raises BadInput if there are none."""
    tasks = sorted(each.parent for each in Path(folder).glob("*/task.toml"))
    older = sorted(Path(folder).glob(f"*/{OLDER}"))
    if older:
        raise BadInput(f"{older[0]} is a task of the first Terminal-Bench. Fix: convert it to Harbor's format")
    if not tasks:
        raise BadInput(f"{folder} holds no tasks. Fix: name a folder with TASK/task.toml and TASK/instruction.md")
    return tasks


def read_task(folder: Path, bounds: Bounds | None = None) -> Prompt:
    """Returns the prompt of one task. Raises BadInput, which names file and field, for one that cannot be had here."""
    settings = _settings(folder / "task.toml")
    instruction = _text(folder / "instruction.md").strip()
    if not instruction:
        raise BadInput(f"{folder / 'instruction.md'} is empty. Fix: say there what is to be done")
    root, files = _environment(folder / "environment")
    try:
        Snapshot(files={path: text.encode() for path, text in files.items()}, bounds=bounds or Bounds())
    except BadEdit as error:
        raise BadInput(f"{folder / 'environment'}: {error}. Fix: make it smaller, or raise the bounds") from error
    tests = _tests(folder / "tests", root, _modules(files))
    metadata: dict[str, Any] = {"files": files, "root": root, "tests": tests}
    if solution := _solution(folder / "solution"):
        metadata["solution"] = solution
    timeout_s = settings.get("verifier", {}).get("timeout_sec")
    if timeout_s is not None:
        if type(timeout_s) not in (int, float) or not timeout_s > 0:
            raise BadInput(f"{folder / 'task.toml'}: verifier.timeout_sec must be above 0, got {timeout_s!r}")
        metadata["verifier_s"] = float(timeout_s)
    return Prompt(
        id=folder.name,
        messages=({"role": "user", "content": instruction},),
        answer="",
        source="tasks",
        metadata=metadata,
    )


def _needs_container(place: Path, what: str) -> BadInput:
    return BadInput(
        f"{place}: {what} needs a container, which the sandbox is not. Fix: leave the task out, or change it"
    )


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = tomllib.loads(_text(path))
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} is no TOML: {error}") from error
    for table in ("environment", "verifier", "solution", "agent"):
        given = settings.get(table, {})
        if not isinstance(given, dict):
            raise BadInput(f"{path}: [{table}] must be a table, got {given!r:.100}")
        for name in NEEDS:
            if given.get(name):
                raise _needs_container(path, f"{table}.{name} = {given[name]!r:.60}")
    if settings.get("steps"):
        raise BadInput(f"{path}: tasks of several [[steps]] are not supported. Fix: make a task of each")
    return settings


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is no UTF-8 text. Fix: a workspace begins with texts only") from error


def _environment(folder: Path) -> tuple[str, dict[str, str]]:
    """Returns the WORKDIR, and the files that are copied into it. Without a Dockerfile: all files of the folder."""
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / name).exists():
            raise _needs_container(folder, name)
    if (folder / ".dockerignore").exists():
        raise BadInput(f"{folder / '.dockerignore'} is not read. Fix: remove it and the files that it leaves out")
    path = folder / "Dockerfile"
    if not path.exists():
        return "", dict(_files_below(folder, "")) if folder.is_dir() else {}
    root, files = "", dict[str, str]()
    for line in _lines(_text(path)):
        word, _, rest = line.partition(" ")
        match word.upper():
            case "FROM" if PYTHON.fullmatch(rest.strip()):
                continue
            case "WORKDIR" if FOLDER.fullmatch(rest) and root in ("", rest.rstrip("/")):
                root = rest.rstrip("/")
            case "COPY" if not rest.lstrip().startswith(("--", "[")):
                files |= _copied(folder, rest.split(), root, path)
            case _:
                raise _needs_container(path, f"`{line[:80]}`")
    return root, files


def _solution(folder: Path) -> dict[str, str]:
    """Returns the files of the reference, none where a script makes them: that would need a shell."""
    if not folder.is_dir() or (folder / "solve.sh").exists():
        return {}
    return dict(_files_below(folder, ""))


def _lines(text: str) -> list[str]:
    whole = re.sub(r"\\\n", " ", text)
    return [" ".join(line.split()) for line in whole.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def _copied(folder: Path, words: list[str], root: str, dockerfile: Path) -> dict[str, str]:
    """Returns what one COPY puts below the WORKDIR."""
    *sources, target = words or [""]
    absolute = target if target.startswith("/") else f"{root}/{target}"
    below = f"{absolute.rstrip('/')}/"
    if not sources or not root or not below.startswith(f"{root}/") or "*" in "".join(sources):
        raise _needs_container(dockerfile, f"`COPY {' '.join(words)}`, not from here into the WORKDIR {root!r},")
    prefix = below.removeprefix(f"{root}/").removeprefix("./")
    files: dict[str, str] = {}
    for source in sources:
        place = folder / source
        if not place.resolve().is_relative_to(folder.resolve()):
            raise BadInput(f"{dockerfile}: COPY {source} leaves the folder of the task")
        if place.is_dir():
            files |= dict(_files_below(place, prefix, leave_out=(dockerfile,)))
        else:
            into = target.endswith("/") or target in (".", "./") or len(sources) > 1 or absolute.rstrip("/") == root
            files[f"{prefix}{place.name}" if into else prefix.rstrip("/")] = _text(place)
    try:
        return {clean_path(path): text for path, text in files.items()}
    except BadEdit as error:
        raise BadInput(f"{dockerfile}: COPY {' '.join(words)}: {error}") from error


def _files_below(folder: Path, prefix: str, leave_out: tuple[Path, ...] = ()) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise BadInput(f"{path} is a link. Fix: put the file there")
        if path.is_file() and path not in leave_out:
            yield f"{prefix}{path.relative_to(folder).as_posix()}", _text(path)


def _modules(files: Iterable[str]) -> set[str]:
    """Returns the names by which the files of a workspace can be imported, packages included."""
    return {path.partition("/")[0].removesuffix(".py") for path in files if path.endswith(".py")}


def _tests(folder: Path, root: str, modules: set[str]) -> dict[str, str]:
    """Returns the source of each test file, with `root` in its texts made the folder that the jail has."""
    files = {path.name: path for path in sorted(folder.glob("test_*.py"))}
    if not files:
        raise _needs_container(folder, "tests without a file test_*.py, such as a test.sh alone,")
    others = [path.name for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in files]
    others = [name for name in others if name not in ("test.sh", "__init__.py")]
    if others:
        raise BadInput(f"{folder / others[0]}: tests must be Python files named test_*.py. Fix: put its values there")
    return {name: checked_tests(path, _text(path), root, modules) for name, path in files.items()}
