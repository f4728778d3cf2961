"""A progress bar on a terminal, and a line for each tenth elsewhere, as in a job's log."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

from sandbox.printable import printable


class Bar(Progress):
    """The bar of rich; without a terminal, a line "title: 30 of 100" at each tenth of a task.

    >>> with Bar(console=Console(force_terminal=False)) as bar:
    ...     task = bar.add_task("rows", total=4)
    ...     for _ in range(4):
    ...         bar.advance(task)
    rows: 1 of 4
    rows: 2 of 4
    rows: 3 of 4
    rows: 4 of 4
    """

    def __init__(self, *columns: str | ProgressColumn, console: Console | None = None) -> None:
        console = console or Console()
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._tenths: dict[TaskID, int] = {}
        super().__init__(*columns, console=console, disable=not self._live)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        task = self._tasks[task_id]
        if self._live or not task.total:
            return
        tenth = int(10 * task.completed / task.total)
        if tenth > self._tenths.get(task_id, 0):
            self._tenths[task_id] = tenth
            line = f"{task.description}: {task.completed:,.0f} of {task.total:,.0f}"
            self.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
