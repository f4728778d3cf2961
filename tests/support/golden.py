"""Rows of the golden vectors (tests/golden/*.jsonl): one JSON object per line, non-finite numbers as strings."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.paths import GOLDEN as FOLDER


def rows(op: str, **params: Any) -> list[Any]:
    """The rows of an operation whose parameters have these values."""
    lines = (FOLDER / f"{op}.jsonl").read_text().splitlines()
    found = [row for row in map(json.loads, lines) if all(row["params"].get(name) == params[name] for name in params)]
    assert found, f"no golden row for {op} {params}"
    return found


def name(row: Any) -> str:
    params = row["params"]
    return f"{params['peer']}-{params['definition']}-{params['case']}".replace(" ", "_")


def over(table: list[Any], label: Callable[[Any], str] = name) -> Callable[[Callable[[Any], Any]], Callable[[], None]]:
    """Makes one test of a check of one row: it goes over all rows, and fails with every one that is wrong."""

    def decorate(check: Callable[[Any], Any]) -> Callable[[], None]:
        def test() -> None:
            assert table
            wrong = []
            for row in table:
                try:
                    result = check(row)
                    if asyncio.iscoroutine(result):
                        asyncio.run(result)
                except (Exception, pytest.fail.Exception) as error:
                    wrong.append(f"{label(row)}: {type(error).__name__}: {error}")
            assert not wrong, f"{len(wrong)} of {len(table)} rows are wrong\n" + "\n".join(wrong)

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate


def numbers(value: Any) -> Any:
    """Numeric inputs and outputs with "nan", "inf" and "-inf" as floats."""
    if isinstance(value, list):
        return [numbers(item) for item in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def tensor(value: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(numbers(value), dtype=dtype)


def expected(row: Any) -> dict[str, Any]:
    """What a peer returns when its masked inputs that are not finite are 0."""
    return row["outputs"].get("sanitised", row["outputs"])


class Chosen(NamedTuple):
    """A row's inputs [B, T] at the positions with loss, [M]; what stands elsewhere never gets in."""

    logprobs_BT: Tensor  # a leaf: its gradient is checked at every position
    at: dict[str, Tensor]
    mask_BT: Tensor
    sequence_M: Tensor
    sequences: int

    @classmethod
    def of(cls, row: Any, leaf: str = "log_prob") -> "Chosen":
        matrices = {key: tensor(value) for key, value in row["inputs"].items()}
        finite = torch.stack([value.isfinite() for value in matrices.values()]).all(0)
        mask = matrices.pop("mask", finite).bool()  # where a row has no mask, what is not finite is masked
        logprobs = matrices[leaf].requires_grad_()
        sequence = torch.arange(len(mask))[:, None].expand_as(mask)[mask]
        return cls(logprobs, {key: value[mask] for key, value in matrices.items()}, mask, sequence, len(mask))

    def check_tokens(self, ours_M: Tensor, theirs_BT: Any, tolerance: float) -> None:
        theirs_M = tensor(theirs_BT).expand_as(self.mask_BT)[self.mask_BT]
        torch.testing.assert_close(ours_M.detach().double(), theirs_M, rtol=tolerance, atol=tolerance)

    def check_gradient(self, loss: Tensor, theirs_BT: Any, tolerance: float) -> None:
        """The peer's gradient where there is loss (some peers leave garbage elsewhere), exactly 0 elsewhere."""
        loss.backward()
        assert self.logprobs_BT.grad is not None
        self.check_tokens(self.logprobs_BT.grad[self.mask_BT], theirs_BT, tolerance)
        assert not self.logprobs_BT.grad[~self.mask_BT].any()


def check(ours: Tensor, theirs: Any, tolerance: float) -> None:
    assert ours.item() == pytest.approx(numbers(theirs), rel=tolerance, abs=tolerance)
