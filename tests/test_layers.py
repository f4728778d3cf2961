"""Who may import whom, by folder, and what a light import loads. Read from the source of every module."""

import ast
import doctest
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.programs.rocstar import COMMANDS

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
PACKAGES = ("engine", "sandbox", "algo")
MODULES = {path: ast.parse(path.read_text()) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))}
OURS = {"engine", "sandbox", "algo", "recipes", "bench", "tests"}

# What each folder, or file of a package's ground floor, may import of ours beside itself. A longer path comes first.
GROUND = (
    "engine.atomic_files",
    "engine.clock",
    "engine.encoding",
    "engine.errors",
    "engine.metric_names",
    "engine.numbered_files",
    "engine.routes",
    "engine.types",
    "sandbox.printable",
    "sandbox.require",
)
MAY_IMPORT = {
    "engine/commands": ("engine", "sandbox"),
    "engine/programs": (
        *GROUND,
        "engine.assembly",
        "engine.console",
        "engine.learner",
        "engine.nodes",
        "engine.process",
        "engine.recipe",
        "engine.replica.config",
        "engine.run",
        "engine.stages",
        "engine.telemetry",
        "sandbox.http.listener",
        "sandbox.keys",
    ),
    "engine/assembly": (
        *GROUND,
        "engine.balancing",
        "engine.console",
        "engine.fleet",
        "engine.gateway",
        "engine.learner",
        "engine.pipeline",
        "engine.ports",
        "engine.process",
        "engine.recipe",
        "engine.recording",
        "engine.replica",
        "engine.rollout",
        "engine.run",
        "engine.stages",
        "engine.teacher",
        "engine.telemetry",
        "engine.tools",
        "engine.user_parts",
        "sandbox",
    ),
    "engine/nodes": (
        *GROUND,
        "engine.fleet",
        "engine.learner",
        "engine.recipe",
        "engine.recording",
        "engine.run",
        "engine.stages",
        "engine.telemetry",
        "sandbox.config",
        "sandbox.keys",
        "sandbox.mailbox",
    ),
    "engine/view": (
        *GROUND,
        "engine.diagnosis",
        "engine.recording",
        "engine.run",
        "engine.telemetry",
        "sandbox",
    ),
    "engine/console": (
        *GROUND,
        "engine.diagnosis",
        "engine.fleet",
        "engine.recording",
        "engine.rollout",
        "engine.run",
        "engine.telemetry",
    ),
    "engine/gateway": (
        *GROUND,
        "engine.fleet",
        "engine.ports",
        "engine.replica.port",
        "engine.rollout",
        "engine.run",
        "engine.telemetry",
        "sandbox.http.connections",
        "sandbox.http.incoming",
        "sandbox.http.listener",
    ),
    "engine/teacher": (
        *GROUND,
        "engine.balancing",
        "engine.fleet",
        "engine.replica",
        "engine.rollout",
        "engine.run",
        "engine.telemetry",
    ),
    "engine/stages": (
        *GROUND,
        "engine.fleet",
        "engine.learner",
        "engine.pipeline",
        "engine.ports",
        "engine.recording",
        "engine.rollout",
        "engine.run",
        "engine.telemetry",
        "engine.user_parts",
    ),
    "engine/rollout": (
        *GROUND,
        "engine.fleet",
        "engine.ports",
        "engine.replica.port",
        "engine.run",
        "engine.telemetry",
        "engine.tools",
        "engine.user_parts",
        "sandbox.wire",
    ),
    "engine/tools": (*GROUND, "engine.ports", "engine.user_parts", "sandbox.wire"),
    "engine/fleet": (*GROUND, "engine.balancing", "engine.replica.port", "engine.telemetry"),
    "engine/recording": (
        *GROUND,
        "engine.process.daemon_thread",
        "engine.replica.port",
        "engine.run",
        "engine.telemetry",
    ),
    "engine/telemetry": (*GROUND, "engine.pipeline", "engine.replica.port", "engine.run"),
    "engine/data": (*GROUND, "engine.run"),
    "engine/run": GROUND,
    "engine/diagnosis": ("engine.metric_names",),
    "engine/balancing": ("engine.replica.port", "sandbox.require"),
    "engine/replica": (*GROUND, "engine.process"),
    "engine/learner/messages": (),  # of both sides: algo imports it, and not the process
    "engine/learner": (*GROUND, "engine.process"),
    "engine/pipeline": (*GROUND, "engine.user_parts"),
    "engine/process": (),
    "engine/recipe": (*GROUND, "engine.run"),
    "engine/contracts": (
        *GROUND,
        "engine.balancing",
        "engine.ports",
        "engine.replica.port",
        "engine.tools",
        "engine.user_parts",
        "sandbox.wire",
    ),
    "engine/ports": ("engine.types", "sandbox.wire"),
    "engine/types": ("engine.routes", "sandbox.wire"),
    "engine/routes": (),
    "engine/user_parts": (),
    "engine/errors": (),
    "engine/atomic_files": (),
    "engine/clock": (),
    "engine/encoding": (),
    "engine/metric_names": (),
    "engine/numbered_files": (),
    "engine/__init__": (),
    "sandbox/inside": (),
    "sandbox/host": ("sandbox",),
    "sandbox": ("sandbox",),
    "algo/learner": (
        "algo.loss",
        "algo.weights",
        "engine.routes",
        "engine.types",
        "engine.ports",
        "engine.learner.gpu_peaks",
        "engine.learner.messages",
        "engine.atomic_files",
        "engine.process.heap",
        "sandbox.require",
    ),
    "algo": (
        "algo",
        "engine.routes",
        "engine.types",
        "engine.ports",
        "engine.errors",
        "engine.user_parts",
        "engine.learner.messages",
        "engine.atomic_files",
        "sandbox.require",
        "sandbox.wire",
    ),
}
NEVER = {"sandbox/client": "sandbox.inside", "sandbox/http": "sandbox.inside"}
HEAVY = {
    "vllm": ("engine/replica/", "algo/weights/"),
    "torch": ("engine/replica/", "algo/weights/", "algo/learner/", "algo/loss/", "algo/contracts.py"),
    "transformers": ("engine/rollout/chat_template.py", "engine/replica/grammars.py", "algo/learner/"),
    "datasets": ("engine/data/tables.py",),
}
MOST_FILES = 18  # Python files in a folder
INSIDE_THE_JAIL = ("sandbox/inside/", "algo/reward/maths/guest/", "algo/reward/code/guest/")


def name(path):
    return path.relative_to(ROOT).as_posix()


def imports(path):
    """Every module that a file imports, also inside functions: (module, line)."""
    for node in ast.walk(MODULES[path]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: imports name their package"
            for alias in node.names:
                parts = [*node.module.split("."), alias.name]
                is_module = parts[0] in OURS and ROOT.joinpath(*parts).with_suffix(".py").is_file()
                yield (".".join(parts) if is_module else node.module), node.lineno


def within(module, allowed):
    return any(module == other or module.startswith(f"{other}.") for other in allowed)


def test_imports_point_one_way():
    wrong = []
    for path in MODULES:
        folder = next(folder for folder in MAY_IMPORT if name(path).startswith((f"{folder}/", f"{folder}.py")))
        allowed = (folder.replace("/", "."), *MAY_IMPORT[folder])
        for module, line in imports(path):
            if module.split(".")[0] in OURS and not within(module, allowed):
                wrong.append(f"{name(path)}:{line} imports {module}")
    assert wrong == []


def import_graph(room):
    """What each room imports, a room being what `room` makes of a module's dotted name."""
    modules = {name(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in MODULES}
    graph = {room(module): set() for module in modules}
    for module, path in modules.items():
        graph[room(module)] |= {room(other) for other, _ in imports(path) if other in modules} - {room(module)}
    return graph


def folder_of(module):
    """A folder of a package, or a file of its ground floor: engine.run, engine.types."""
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("room", [str, folder_of], ids=["modules", "folders"])
def test_nothing_imports_in_a_circle(room):
    """Imports inside functions and those of types count too."""
    try:
        graphlib.TopologicalSorter(import_graph(room)).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_picture_of_the_rooms_is_that_of_the_imports():
    """Each room of engine imports only rooms of lower lines of the picture."""
    picture = (ROOT / "engine" / "README.md").read_text().partition("## The rooms")[2].split("```")[1]
    lines = [re.findall(r"([a-z_]+)(?:/|\.py)(?!\w)", line) for line in picture.strip().splitlines()]
    floors = {f"engine.{room}": -floor for floor, rooms in enumerate(lines) for room in rooms}
    graph = {room: others for room, others in import_graph(folder_of).items() if room.startswith("engine.")}
    assert floors.keys() == graph.keys()
    up = [
        f"{room} imports {other}"
        for room in graph
        for other in graph[room] & graph.keys()
        if floors[room] <= floors[other]
    ]
    assert up == []


def test_every_folder_says_what_it_may_import():
    rooms = {folder_of(module).replace(".", "/") for module in import_graph(str) if module.startswith("engine.")}
    assert rooms <= MAY_IMPORT.keys()


def test_a_folder_is_small_enough_to_look_through():
    """A folder with more files than these has room for a second purpose, and is split by it."""
    folders = [
        folder for package in sorted(OURS - {"tests"}) for folder in (ROOT / package, *(ROOT / package).rglob("*/"))
    ]
    files = {name(folder): len(list(folder.glob("*.py"))) for folder in folders}
    assert {folder: count for folder, count in files.items() if count > MOST_FILES} == {}


def defined(tree):
    """Names that a module makes itself, also under a condition."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_a_name_is_imported_from_where_it_is_defined():
    """No re-exports that hide a room; only `sandbox` itself offers a public face."""
    homes = {name(path).removesuffix(".py").replace("/", "."): set(defined(tree)) for path, tree in MODULES.items()}
    wrong = [
        f"{name(path)}:{node.lineno} imports {alias.name} from {node.module}"
        for folder in sorted(OURS)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in homes
        for alias in node.names
        if alias.name not in homes[node.module]
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", NEVER)
def test_the_nodes_side_of_the_sandbox_does_not_reach_into_the_jail(folder):
    paths = [path for path in MODULES if name(path).startswith(f"{folder}/")]
    assert paths
    assert [name(path) for path in paths for module, _ in imports(path) if within(module, (NEVER[folder],))] == []


@pytest.mark.parametrize("heavy", HEAVY)
def test_heavy_packages_are_imported_in_few_folders_only(heavy):
    found = {name(path) for path in MODULES for module, _ in imports(path) if within(module, (heavy,))}
    assert found
    assert [path for path in sorted(found) if not path.startswith(HEAVY[heavy])] == []


def test_engine_and_sandbox_load_neither_torch_nor_vllm():
    """In a fresh process, every module of them but those that run in an engine's process or in a jail."""
    elsewhere = (*INSIDE_THE_JAIL, "engine/replica/")
    paths = [name(path) for path in MODULES if not name(path).startswith(("algo/", *elsewhere))]
    paths = [path for path in paths if not path.endswith("__main__.py")] + [
        "engine/replica/config.py",
        "engine/replica/port.py",
        "engine/replica/replica.py",
    ]
    modules = sorted(path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths)
    code = (
        "import sys, importlib\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'matplotlib', 'tensorboardX', 'pyarrow', 'datasets'}\n"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "")


NOTHING_HAPPENS = """
import gc, importlib, os, signal, sys, threading, warnings
# What these do is not ours.
import aiohttp.web, matplotlib, torch.nn.attention.varlen, transformers.masking_utils, transformers.modeling_utils

def state():
    return {
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "collector": gc.get_threshold(),
        "warnings": [str(each) for each in warnings.filters],
        "streams": (sys.stdin, sys.stdout, sys.stderr),
    }

def load():
    for module in sys.argv[1:]:
        importlib.import_module(module)
        now = state()
        for name in now:
            if now[name] != before[name]:
                print(f"{module} changes {name}")
        before.update(now)

before = state()
thread = threading.Thread(target=load)
thread.start()
thread.join()
"""


def test_nothing_happens_at_import():
    """Of any module, but for those that run in an engine's process or in a jail. Each is imported in a thread."""
    paths = [path for folder in sorted(OURS - {"tests"}) for path in sorted((ROOT / folder).rglob("*.py"))]
    names = [name(path) for path in paths if path.name not in ("__main__.py", "__init__.py")]
    inside = (*INSIDE_THE_JAIL, "sandbox/inside/")
    elsewhere = [
        name(path).removesuffix(".py")
        for path in paths
        if imports_at_once(ast.parse(path.read_text()), "vllm", "math_verify")
    ]
    names = [each for each in names if not each.startswith((*inside, *elsewhere))]
    modules = [each.removesuffix(".py").replace("/", ".") for each in names]
    done = subprocess.run(
        [sys.executable, "-c", NOTHING_HAPPENS, *modules], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stderr + done.stdout == ""


def imports_at_once(tree, *packages):
    """Whether a module imports one of the packages when it is itself imported."""
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in at_once]
    return any(within(each, packages) for each in names)


def test_the_overview_of_commands_loads_none_of_them():
    """`rocstar --help` answers at once."""
    code = "import sys; from engine.programs.rocstar import start; start([]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert not loaded & {"asyncio", "msgspec", "numpy", *(command.module for command in COMMANDS.values())}


def test_no_script_shadows_the_standard_library():
    """A script's folder comes first on sys.path. A folder without __init__.py shadows nothing."""
    paths = [path for folder in ("recipes", "bench") for path in (ROOT / folder).glob("*")]
    scripts = [path for path in paths if path.is_file() or (path / "__init__.py").exists()]
    assert [name(path) for path in scripts if path.stem in sys.stdlib_module_names] == []


def calls(tree):
    """(dotted name of what is called, line)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def test_every_task_has_an_owner_and_nothing_sleeps():
    """`create_task` of a TaskGroup only; no gather, no ensure_future, no time.sleep. A TaskGroup would wait without end
    for an agent that goes on after it was cancelled: `AgentRollouts` owns its one task by itself. vLLM owns, and
    cancels, the task that reads for it.
    """
    own = {ROOT / "engine" / "gateway" / "agent.py", ROOT / "engine" / "replica" / "output_reader.py"}
    groups = {"asyncio", "loop", "asyncio.get_running_loop()", "asyncio.get_event_loop()", "self._loop"}
    wrong = []
    for path, tree in MODULES.items():
        if name(path).startswith(INSIDE_THE_JAIL):  # guest code awaits what it likes
            continue
        for function, line in calls(tree):
            owner, _, called = function.rpartition(".")
            bare = called == "create_task" and (not owner or owner in groups) and path not in own
            unowned = called in ("ensure_future", "gather") and owner in ("", "asyncio")
            if bare or unowned or function == "time.sleep":
                wrong.append(f"{name(path)}:{line} {function}")
    assert wrong == []


def test_nothing_is_pickled_and_nothing_of_the_model_is_evaluated():
    wrong = [
        f"{name(path)}:{line} {function}"
        for path, tree in MODULES.items()
        if not name(path).startswith(INSIDE_THE_JAIL)
        for function, line in calls(tree)
        if function in ("eval", "exec", "compile") or function.split(".")[0] in ("pickle", "marshal", "cloudpickle")
    ]
    assert wrong == []


WITH_EXAMPLES = sorted(
    name(path).removesuffix(".py").replace("/", ".")
    for path in MODULES
    if ">>> " in path.read_text() and not name(path).startswith("sandbox/")
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_work(module):
    failed, tried = doctest.testmod(importlib.import_module(module), raise_on_error=False)
    assert tried > 0
    assert failed == 0
