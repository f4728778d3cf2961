"""Rows of the golden vectors (tests/golden/*.jsonl): one JSON object per line, non-finite numbers as strings."""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden"


def rows(op: str, **params: Any) -> list[Any]:
    """The rows of an operation whose parameters have these values."""
    lines = (FOLDER / f"{op}.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if all(row["params"][name] == params[name] for name in params)]
    assert found, f"no golden row for {op} {params}"
    return found


def numbers(value: Any) -> Any:
    """Numeric inputs and outputs with "nan", "inf" and "-inf" as floats."""
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def name(row: Any) -> str:
    return f"{row['params']['peer']}-{row['params']['case']}".replace(" ", "_")
