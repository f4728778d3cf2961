"""The recipes that there are: every file below recipes/ that ends with one."""

from tests.support.paths import ROOT

RECIPES = sorted(
    path.relative_to(ROOT / "recipes").as_posix()
    for path in (ROOT / "recipes").rglob("*.py")
    if "\nrecipe = Recipe(" in path.read_text()
)
