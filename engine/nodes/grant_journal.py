"""The journal of one granted group: what is known of it, in memory; what is new goes to the lead's journal."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.run.journal import Journal
from engine.run.journal_records import Decided, Record
from engine.types import Group


class GrantJournal(Journal):
    """records: the group's prompt (Drawn), and what the journal of the run holds of its trajectories.

    written: called with each new record.
    """

    def __init__(self, records: Iterable[Record], written: Callable[[Record], None] = lambda record: None) -> None:
        super().__init__()
        self._written = written
        for record in records:
            self.take(record)

    @property
    def on(self) -> bool:
        return True

    def write(self, record: Record) -> None:
        self._written(record)


def group_of(records: Iterable[Record]) -> Group:
    """The group that these records, of which the last one is the decision, have made."""
    *_, decided = records = list(records)
    assert isinstance(decided, Decided), decided
    group = GrantJournal(records).decided(decided.lease, decided.attempt)
    assert group is not None
    return group
