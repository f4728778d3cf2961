"""Runs PyTorch's own profiler around one batch, for `LearnerConfig.trace`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

BATCH = 2  # number of the traced batch of a process; the first one warms up
OPERATORS = 25


@contextmanager
def traced(folder: str, batch: int) -> Iterator[None]:
    """Writes learner_trace.json (for ui.perfetto.dev) and learner_operators.txt for the second batch, on rank 0.

    batch: this process's number of the batch, from 1. folder: "" traces nothing. Raises OSError if it cannot be
    written.
    """
    if not folder or batch != BATCH or dist.get_rank():
        yield
        return
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=kinds) as profiler:
        yield
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(place / "learner_trace.json"))
    by = "self_cuda_time_total" if len(kinds) > 1 else "self_cpu_time_total"
    (place / "learner_operators.txt").write_text(profiler.key_averages().table(sort_by=by, row_limit=OPERATORS))
