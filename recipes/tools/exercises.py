"""Makes small tasks with files: a program with a fault to find, or one to write, and hidden tests. Seeded.

Promises
- `exercises(split, seed)` is endless and depends on its arguments only. No task is in both splits: the split is a hash
  of its files and tests.
- The reference (`metadata["solution"]`, path to text) passes the tests, and the files that the task begins with do not.
  `tests/real/recipes/test_tools_files.py` checks both. The model is shown neither.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Literal

from engine.types import Prompt

Split = Literal["train", "test"]
Task = tuple[str, dict[str, str], dict[str, str], str]  # instruction, files, solution, tests

# What only the files tell, so that who does not look has to guess.
OPERATORS = {"total": "+", "product": "*", "difference": "-"}  # the right ones
OPERANDS = (("a", "b"), ("x", "y"), ("left", "right"))
LAST = ("end", "last", "stop")
COLUMNS = ("price", "weight", "points")


def exercises(split: Split, seed: int) -> Iterator[Prompt]:
    """Yields tasks of one split without end."""
    rng = random.Random(f"{split}-{seed}")
    number = 0
    while True:
        instruction, files, solution, tests = rng.choice(KINDS)(rng)
        digest = hashlib.md5(repr((files, tests)).encode(), usedforsecurity=False).digest()
        if (digest[0] < 26) != (split == "test"):
            continue
        yield Prompt(
            id=f"{split}-{seed}-{number}",
            messages=({"role": "user", "content": instruction},),
            answer="",
            source="exercises",
            metadata={"files": files, "tests": {"test_hidden.py": tests}, "solution": solution},
        )
        number += 1


def _wrong_operator(rng: random.Random) -> Task:
    """A function whose operator is not the one that its name says."""
    name, right = rng.choice(tuple(OPERATORS.items()))
    wrong = rng.choice([operator for operator in OPERATORS.values() if operator != right])
    (x, y), a, b = rng.choice(OPERANDS), rng.randint(2, 99), rng.randint(2, 99)
    value = {"+": a + b, "*": a * b, "-": a - b}[right]
    text = f"def {name}({x}, {y}):\n    return {x} {{}} {y}\n"
    tests = f"from sums import {name}\n\n\ndef test_values():\n    assert {name}({a}, {b}) == {value}\n"
    tests += f"    assert {name}({a + 1}, 0) == {a + 1 if right != '*' else 0}\n"
    files, solution = {"sums.py": text.format(wrong)}, {"sums.py": text.format(right)}
    return f"{name} in sums.py gives a wrong result. Correct it.", files, solution, tests


def _off_by_one(rng: random.Random) -> Task:
    """A range that ends too early."""
    name, step, last = rng.choice(("count_up", "numbers_to", "upwards")), rng.choice((1, 2, 3)), rng.choice(LAST)
    end = step * rng.randint(3, 12)
    text = f"def {name}({last}):\n    return list(range(0, {last}{{}}, {step}))\n"
    tests = f"from counting import {name}\n\n\ndef test_end_is_included():\n"
    tests += f"    assert {name}({end}) == {list(range(0, end + 1, step))}\n    assert {name}(0) == [0]\n"
    instruction = f"{name} in counting.py has to include the number that it is given. Correct it."
    return instruction, {"counting.py": text.format("")}, {"counting.py": text.format(" + 1")}, tests


def _sum_of_column(rng: random.Random) -> Task:
    """A program to write, which reads a table from standard input."""
    column = rng.choice(COLUMNS)
    rows = [(rng.choice("abcdef"), rng.randint(1, 50)) for _ in range(rng.randint(3, 6))]
    table = f"name,{column}\n" + "".join(f"{name},{value}\n" for name, value in rows)
    tests = f"TABLE = {table!r}\n\n\ndef test_sum():\n    ended = run('main.py', stdin=TABLE)\n"
    tests += f"    assert (ended.returncode, ended.stdout.strip()) == (0, '{sum(value for _, value in rows)}')\n\n\n"
    tests += f"def test_no_rows():\n    assert run('main.py', stdin='name,{column}\\n').stdout.strip() == '0'\n"
    instruction = "Write main.py: it reads CSV as in example.csv from standard input and prints the sum of the numbers."
    return instruction, {"example.csv": table}, {"main.py": sum_program(column)}, tests


def sum_program(column: str) -> str:
    """Returns a program that prints the sum of a column of the CSV on its standard input."""
    return f"import csv\nimport sys\n\nprint(sum(int(row[{column!r}]) for row in csv.DictReader(sys.stdin)))\n"


def _setting(rng: random.Random) -> Task:
    """A value that two files must agree on."""
    old, new = rng.sample(range(8000, 9000), 2)
    files = {
        "settings.py": f"PORT = {old}\n",
        "client.py": f"from settings import PORT\n\nURL = f'http://host:{old}'\n",
    }
    solution = {
        "settings.py": f"PORT = {new}\n",
        "client.py": "from settings import PORT\n\nURL = f'http://host:{PORT}'\n",
    }
    tests = f"from client import URL\nfrom settings import PORT\n\n\ndef test_port():\n    assert PORT == {new}\n\n\n"
    tests += f"def test_url():\n    assert URL == 'http://host:{new}'\n"
    return f"Change the port to {new}, in settings.py and wherever it is written out.", files, solution, tests


KINDS: tuple[Callable[[random.Random], Task], ...] = (_wrong_operator, _off_by_one, _sum_of_column, _setting)
