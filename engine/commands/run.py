"""Trains by a recipe file, as `python RECIPE` does: `rocstar run recipes/quickstart.py steps=10`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from engine.console.options import Positional, Rest, parse
from engine.errors import BadInput
from engine.programs.main import main as train
from engine.recipe import load_recipe
from sandbox.printable import printable


@dataclass(frozen=True, kw_only=True)
class Options:
    recipe: Annotated[Path, Positional("the recipe's file; rocstar run RECIPE --help lists its options")]
    options: Annotated[tuple[str, ...], Rest("the recipe's own options")] = ()


def main(argv: Sequence[str]) -> int:
    """Returns the recipe's exit code, 2 for a file without a recipe."""
    path = parse(Options, argv[:1], program="rocstar run", description=__doc__).recipe
    sys.argv[:] = [str(path), *argv[1:]]  # as with `python RECIPE`; commands to rerun are printed from it
    try:
        recipe = load_recipe(path)
    except BadInput as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    return recipe.main(argv[1:]) if recipe.main is not None else train(recipe, argv[1:])
