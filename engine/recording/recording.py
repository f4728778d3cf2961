"""Records a run while it goes on: the event loop hands over what there is, a thread writes it down.

Invariants
- The loop never waits for the disk; what waits to be written is bounded, and what is beyond that is not recorded.
- Nothing that goes wrong with the record ends the run, or changes what it trains: it is said once in the run's notes,
  and named in the record's index.
- A step's record is there when it was trained; the timeline is there SEGMENT_S after it happened, at most.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from msgspec.structs import replace

from engine.encoding import frames
from engine.process.daemon_thread import DaemonThread
from engine.recording import files
from engine.recording.folder import RecordFolder
from engine.recording.groups import Explain, Place, StepRecords, places_of, whole_groups
from engine.recording.policy import RecordConfig
from engine.recording.records import Segment
from engine.recording.segments import segment_of
from engine.telemetry.timeline import Timeline
from engine.types import Batch, Group, LearnerNumbers

SEGMENT_S = 5.0
WAITING = 64  # jobs of the thread
END_S = 30.0  # the end of a run waits so long for the thread


@dataclass(kw_only=True)
class _Step:
    """A step that the learner trains. places: where the rows belong that it is asked about; packed: the groups."""

    number: int
    records: StepRecords
    places: Mapping[int, Place]
    packed: list[bytes] | None = None


class Recording:
    """`async with Recording(...) as recording`; then, as steps are trained, `begin` and `trained`.

    step: the one that is under way first (from 1). tokenizer: as `tokenizers` writes one to a file. note: a line for
    the user. nodes: by lease, the machine that made the group.
    """

    def __init__(
        self,
        run: Path,
        config: RecordConfig,
        timeline: Timeline,
        *,
        step: int,
        tokenizer: str | None,
        note: Callable[[str], None],
    ) -> None:
        self.nodes: dict[int, str] = {}
        self._config, self._timeline, self._note = config, timeline, note
        self._folder = RecordFolder(run, config)
        self._thread = DaemonThread("recording")
        self._step, self._tokenizer = step, tokenizer
        self._training: _Step | None = None
        self._under_way = 0
        self._noted = False

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._post(self._folder.open, self._tokenizer)
        self._later = self._loop.call_later(SEGMENT_S, self._cut_regularly)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._later.cancel()
        await asyncio.shield(self.flush())
        self._thread.close()

    async def flush(self) -> None:
        """Waits until everything so far is handed to the disk, at most END_S."""
        self.cut()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._thread.run(lambda: None)

    def _cut_regularly(self) -> None:
        self.cut()
        self._later = self._loop.call_later(SEGMENT_S, self._cut_regularly)

    def cut(self) -> None:
        """Writes what the timeline holds as a segment of the step that is under way."""
        events, step = self._timeline.drain(), self._step
        if events.dropped:
            span_s = events.end - events.start
            self._problem(f"{events.dropped:,} events of the timeline are left out: {span_s:.0f} s had too many")

        def write() -> None:
            self._folder.write_segment(segment_of(events, step=step))

        self._post(write)

    def happened_on(self, node: str, segment: bytes) -> None:
        """Writes a segment of another machine (`engine.nodes.messages.Happened`); other bytes are left out."""
        step = self._step

        def write() -> None:
            payloads, _ = frames(segment)
            record = files.unpacked(payloads[0]) if payloads else None
            if isinstance(record, Segment):
                self._folder.write_segment(replace(record, node=node, step=step))

        self._post(write)

    def begin(self, step: int, groups: Sequence[Group], batch: Batch, explain: Explain | None = None) -> list[int]:
        """Notes that a step is about to be trained; returns the rows of the batch for which the learner is asked.

        explain: what the selection says of its choices.
        """
        whole = whole_groups(groups, self._config.token_groups)
        places = places_of(batch, groups, whole)
        records = StepRecords(
            step=step,
            groups=groups,
            whole=whole,
            nodes={group.lease: self.nodes.pop(group.lease, "") for group in groups},
            explain=explain,
        )
        self._training = made = _Step(number=step, records=records, places=places)

        def pack() -> None:  # while the learner has its turn, and the loop little to do
            made.packed = [files.packed(record) for record in made.records.records()]

        self._post(pack)
        return list(places)

    def trained(self, numbers: Mapping[int, LearnerNumbers]) -> None:
        """Writes the step that was begun, now that its weights are live. numbers: the learner's, by row."""
        made, finished_at = self._training, self._timeline.now()
        assert made is not None, "a step is begun before it is trained"
        self._training = None
        learner = {made.places[row]: computed for row, computed in numbers.items()}

        def write() -> None:
            if made.packed is None:
                return  # packing failed, which was noted then
            packed = [*made.packed, *(files.packed(tokens) for tokens in made.records.tokens(learner))]
            self._folder.write_step(made.records.row(finished_at), packed)

        self._post(write)
        self.cut()
        self._step = made.number + 1

    def _post(self, job: Callable[..., None], *args: Any) -> None:
        if self._under_way == WAITING:
            self._problem("the disk is too slow for what is recorded; some of it is left out")
            return
        self._under_way += 1
        future = self._thread.post(job, *args)
        future.add_done_callback(self._tell)

    def _tell(self, future: Future[None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and waited long enough
            self._loop.call_soon_threadsafe(self._done, future)

    def _done(self, future: Future[None]) -> None:
        self._under_way -= 1
        error = future.exception()
        if isinstance(error, OSError):
            self._problem(f"cannot write {error.filename or self._folder.folder}: {error.strerror}")
        elif error is not None:
            self._problem("".join(traceback.format_exception(error)).strip())

    def _problem(self, what: str) -> None:
        self._folder.problems.append(what)
        if not self._noted:
            self._noted = True
            self._note(f"the run is not recorded whole, and goes on: {what}")
