"""The `Recipe` that a recipe file ends with, and how a program loads it.

    recipe = Recipe(config=Config, train=train)

    if __name__ == "__main__":
        exit_process(main(recipe))

The file's own program, rollout nodes and replays run the same object, so all of them train, sample and grade by the
same code.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.errors import BadInput
from engine.run.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The run that `train` is called with, beside the configuration.

    opens: opens the parts in `engine.assembly.training.training`, for a run as one machine of several, or for a replay;
    None: the run is this machine's alone. metrics_port: where its metrics are served to Prometheus, 0 for any free
    port, None for nowhere.
    """

    folder: RunFolder
    opens: Callable[..., AbstractAsyncContextManager[Any]] | None = None
    metrics_port: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The configuration of a recipe and the coroutine that runs it.

    config: a frozen dataclass whose fields are the options (`engine.console.options`). One is `steps`; another is
    `model`, the folder that training begins with, which a rollout node sets to its copy. train: the recipe itself, from
    `training(config, run)` to the list of stages. main: is called with the command line if a recipe is more than one
    run, and returns the exit code; None: `engine.programs.main`.
    """

    config: type[Any]
    train: Callable[[Any, Run], Coroutine[Any, Any, Any]]
    main: Callable[[Sequence[str]], int] | None = None

    @property
    def is_file(self) -> bool:
        """Whether the recipe is defined in a file, not in a notebook's cell; only a file can be run elsewhere."""
        return getattr(sys.modules[self.train.__module__], "__file__", None) is not None

    @property
    def file(self) -> Path:
        """The file that defines the recipe; other machines and replays run it."""
        path = sys.modules[self.train.__module__].__file__
        assert path is not None, "a recipe is defined in a file"
        return Path(path).resolve()


def load_recipe(path: Path) -> Recipe:
    """Returns the `recipe` of a file. Raises BadInput if there is none, and whatever the file raises."""
    if not path.is_file() or path.suffix != ".py":
        raise BadInput(f"there is no recipe {path}. Fix: give the path of its Python file")
    recipe = getattr(module_of(path, f"recipe_{path.stem}"), "recipe", None)
    if not isinstance(recipe, Recipe):
        raise BadInput(f"{path} has no recipe. Fix: end it with recipe = Recipe(config=Config, train=train)")
    return recipe


def module_of(path: Path, name: str) -> ModuleType:
    """Runs a Python file and returns it as a module. name: must differ from that of any other module.

    The file's folder comes first on sys.path, as with `python FILE`: it may import modules that lie beside it.
    """
    folder = str(path.resolve().parent)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def name_of(recipe: Path) -> str:
    """Returns a recipe's file, relative to the project if it lies within it.

    >>> name_of(ROOT / "recipes" / "quickstart.py")
    'recipes/quickstart.py'
    """
    path = recipe.resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
