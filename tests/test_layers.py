"""Who may import whom, and what a light import loads. Read from the source of every module."""

import ast
import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("engine", "sandbox", "algo")
MODULES = {path: ast.parse(path.read_text()) for name in PACKAGES for path in sorted((ROOT / name).glob("**/*.py"))}
OURS = {"engine", "sandbox", "algo", "recipes", "bench", "tests"}
LEARNER_SIDE = {
    f"algo/{name}.py"
    for name in (
        "aggregate",
        "attention",
        "checkpoint",
        "correction",
        "counts",
        "flops",
        "kl",
        "learner",
        "lora",
        "loss",
        "losses",
        "model",
        "objective",
        "offload",
        "pack",
        "place",
        "publish",
        "trainer",
        "transport",
        "transport_gpu",
        "whole",
    )
}
ENGINE_SIDE = {
    f"engine/{name}.py" for name in ("kv_tap", "scheduler", "weights", "weights_direct", "weights_pull", "weights_gpu")
}
ALLOWED = {
    "sandbox": ("sandbox",),
    "engine": ("engine", "sandbox.wire"),
    "algo": ("algo", "engine.types", "engine.ports", "engine.link", "sandbox.wire"),
}


def name(path):
    return path.relative_to(ROOT).as_posix()


def imports(path):
    """Every module that a file imports, also inside functions: (module, line)."""
    for node in ast.walk(MODULES[path]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level <= 1, "no imports from above the package"
            module = ".".join(filter(None, (path.parent.name if node.level else "", node.module)))
            for alias in node.names:
                parts = [*module.split("."), alias.name]
                is_module = parts[0] in OURS and ROOT.joinpath(*parts).with_suffix(".py").is_file()
                yield (".".join(parts) if is_module else module), node.lineno


def within(module, allowed):
    return any(module == other or module.startswith(f"{other}.") for other in allowed)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package):
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in MODULES
        if name(path).startswith(f"{package}/")
        for module, line in imports(path)
        if module.split(".")[0] in OURS and not within(module, ALLOWED[package])
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("heavy", "where"),
    [
        ("vllm", {"engine/replica.py", "algo/transport_gpu.py"} | ENGINE_SIDE),
        ("torch", ENGINE_SIDE | LEARNER_SIDE),
        ("transformers", {"engine/chat.py"} | LEARNER_SIDE),
        ("pyarrow", {"engine/tables.py"}),
    ],
)
def test_heavy_packages_are_imported_in_named_files_only(heavy, where):
    found = {name(path) for path in MODULES for module, _ in imports(path) if within(module, (heavy,))}
    assert found <= where


# what runs inside the jail
INSIDE = ("zygote", "slot", "guest", "program", "plain", "cells", "grader")
LIGHT = [
    path
    for path in map(name, MODULES)
    if path.split("/")[0] in ("engine", "sandbox")
    and path not in ENGINE_SIDE
    and path.rpartition("/")[2].removesuffix(".py") not in INSIDE
]


def test_engine_and_sandbox_load_neither_torch_nor_vllm():
    """In a fresh process: the packages alone, then every module of them that is not for the engine's own process."""
    modules = sorted(path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in LIGHT)
    code = (
        "import sys, importlib\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "print(*sorted({'torch', 'vllm', 'transformers', 'matplotlib', 'tensorboardX', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "")


def test_no_script_shadows_the_standard_library():
    """A script's folder comes first on sys.path."""
    scripts = [path for folder in ("recipes", "bench") for path in (ROOT / folder).glob("*")]
    assert [name(path) for path in scripts if path.stem in sys.stdlib_module_names] == []


def calls(tree):
    """(dotted name of what is called, line)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


RUNS_GUEST_CODE = ("sandbox/program.py", "sandbox/guest.py", "sandbox/cells.py", "algo/grader.py")  # inside the jail


def test_every_task_has_an_owner_and_nothing_sleeps():
    """`create_task` of a TaskGroup only; no gather, no ensure_future, no time.sleep."""
    groups = {"asyncio", "loop", "asyncio.get_running_loop()", "asyncio.get_event_loop()", "self._loop"}
    wrong = []
    for path, tree in MODULES.items():
        if name(path) in RUNS_GUEST_CODE:  # on an event loop of the guest's
            continue
        for function, line in calls(tree):
            owner, _, called = function.rpartition(".")
            bare = called == "create_task" and (not owner or owner in groups)
            unowned = called in ("ensure_future", "gather") and owner in ("", "asyncio")
            if bare or unowned or function == "time.sleep":
                wrong.append(f"{name(path)}:{line} {function}")
    assert wrong == []


def test_nothing_is_pickled_and_nothing_of_the_model_is_evaluated():
    wrong = [
        f"{name(path)}:{line} {function}"
        for path, tree in MODULES.items()
        if name(path) not in RUNS_GUEST_CODE
        for function, line in calls(tree)
        if function in ("eval", "exec", "compile") or function.split(".")[0] in ("pickle", "marshal", "cloudpickle")
    ]
    assert wrong == []


WITH_EXAMPLES = sorted(
    name(path).removesuffix(".py").replace("/", ".")
    for path in MODULES
    if ">>> " in path.read_text() and path.parent.name in ("engine", "algo")
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_work(module):
    failed, tried = doctest.testmod(importlib.import_module(module), raise_on_error=False)
    assert tried > 0
    assert failed == 0
