"""vLLM's schedulers with bundled outputs, fewer reports, grammars and routes, for the engine's own process.

They adapt an interface that may change.

Invariants
- All tokens of a bundle were sampled by one version of the weights: nothing is held across a pause.
- No message leaves for a step whose outputs are all held and which is not reported (`engine.replica.step_reports`).
- With routes, what leaves has those of all positions before its last token that have not left.
- A request that is aborted or ends by an error, or whose engine dies, loses less than a bundle of tokens, as if they
  had not been sampled.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import RequestStatus

from engine import clock
from engine.process.forks import leave_terminal
from engine.process.shared_memory import unlink_mapped
from engine.replica.grammars import Grammars, reason_of
from engine.replica.output_bundler import BUNDLE_SIZE, DELIVER_AT, OutputBundler
from engine.replica.routes.capture import held
from engine.replica.routes.slots import ROUTES_FROM, RouteReader
from engine.replica.step_reports import PREEMPTED, EngineState, StepReports


class BundlingScheduler(Scheduler):
    """A request is bundled if its SamplingParams.extra_args have DELIVER_AT and BUNDLE_SIZE. It obeys the `grammar`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if multiprocessing.parent_process() is not None:
            leave_terminal()  # `adopt` runs in the workers, other processes, if there are several
            unlink_mapped()  # the workers have opened it
        self._bundler = OutputBundler()
        self._grammars = Grammars(self.structured_output_manager, self.vllm_config)
        self._refusals: dict[str, str] = {}  # by request, until its end is told
        self._pausing = False
        self._reports = StepReports()
        self._preempted = 0  # requests, since the last report
        self._in_step = False
        self._routes: RouteReader | None = None  # on the CPU, once a request wants its routes

    def add_request(self, request: Any) -> None:
        extra = request.sampling_params.extra_args or {}
        if "grammar" in extra:
            self._grammars.add(request, extra["grammar"], extra["grammar_tokens"])
        super().add_request(request)
        if DELIVER_AT in extra:
            masses = "grammar" in extra
            self._bundler.add(request.request_id, extra[DELIVER_AT], extra[BUNDLE_SIZE], masses=masses)
        if ROUTES_FROM in extra and (slots := held()) is not None:
            self._routes = self._routes or RouteReader(slots)
            self._routes.begin(request.request_id, extra[ROUTES_FROM])

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self._bundler.forget(request.request_id)
            if self._routes is not None:
                self._routes.forget(request.request_id)
            if finished_status is RequestStatus.FINISHED_ERROR and (reason := reason_of(request)):
                self._refusals[request.request_id] = reason
        return finished

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pauses, but one step later if outputs are held, so that they leave first."""
        self._pausing = pause_state is PauseState.PAUSED_ALL and len(self._bundler) > 0
        if not self._pausing:
            super().set_pause_state(pause_state)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        self._in_step = True
        try:
            by_client = super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._in_step = False
        now = clock.now()
        for step in by_client.values():
            for output in step.outputs if self._refusals else ():
                output.stop_reason = self._refusals.get(output.request_id, output.stop_reason)
            for output in step.outputs:
                output.events = None  # nobody reads them: `_report` counts
            step.outputs = self._bundler.push(step.outputs, now)
        self._refusals.clear()
        paused = self._pausing or self.pause_state is not PauseState.UNPAUSED  # steps under way may end after the pause
        if paused:
            by_client.setdefault(0, EngineCoreOutputs()).outputs += self._bundler.flush()
        if self._routes is not None:
            for step in by_client.values():
                self._add_routes(self._routes, step.outputs)
        if self._pausing:
            self._pausing = False
            super().set_pause_state(PauseState.PAUSED_ALL)
        by_client = {client: step for client, step in by_client.items() if step.outputs or step.finished_requests}
        self._report(by_client, last=paused)
        return by_client

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """Returns None in the middle of a step; `_report` asks again at its end. What is summed up stays with vLLM."""
        return None if self._in_step else super().make_stats(*args, **kwargs)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        self._preempted += 1
        self._read_routes(request)
        super()._preempt_request(request, *args, **kwargs)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._read_routes(request)
        return super()._free_request(request, *args, **kwargs)

    def _read_routes(self, request: Any) -> None:
        """Reads the routes of what a request has computed, as long as it has its blocks."""
        if self._routes is not None and request.request_id in self._routes:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)[self._routes.group]
            computed = min(request.num_computed_tokens, request.num_tokens - 1)
            self._routes.read(request.request_id, blocks, computed)

    def _add_routes(self, routes: RouteReader, outputs: Iterable[Any]) -> None:
        """Adds to the outputs that leave the routes of all positions before their last token."""
        for output in outputs:
            if output.request_id not in routes:
                continue
            if (request := self.requests.get(output.request_id)) is not None:
                self._read_routes(request)
            output.routed_experts = routes.release(output.request_id)
            if output.finish_reason is not None:
                routes.forget(output.request_id)

    def _report(self, by_client: dict[int, EngineCoreOutputs], *, last: bool) -> None:
        """Adds the engine's state to what leaves after a step, if it is due. last: before a pause."""
        running, waiting = self.get_request_counts()
        state = EngineState(self.kv_cache_manager.usage, running, waiting, self._preempted)
        steps = self._reports.step(state, time.monotonic(), last=last)
        stats = self.make_stats() if steps else None
        if stats is None:
            return
        # vLLM's own uses of these two fields are data parallelism and KV connectors, whose reports nobody reads here.
        stats.step_counter, stats.kv_connector_stats = steps, {PREEMPTED: self._preempted}
        self._preempted = 0
        receiver = next(iter(by_client), 0)
        by_client.setdefault(receiver, EngineCoreOutputs()).scheduler_stats = stats


class BundlingAsyncScheduler(BundlingScheduler, AsyncScheduler): ...
