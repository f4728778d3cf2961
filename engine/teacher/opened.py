"""Opens a teacher: a replica of its own beside the student's, or a connection to a server."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from engine.balancing.round_robin import RoundRobin
from engine.fleet.config import FleetConfig
from engine.fleet.fleet import Fleet
from engine.replica.config import ReplicaConfig
from engine.replica.port import KvSample
from engine.replica.replica import Replica
from engine.rollout.chat_template import ChatTemplate
from engine.teacher.config import ROOM, TeacherConfig
from engine.teacher.endpoint import endpoint_of
from engine.teacher.teacher import Scores, Teacher
from engine.teacher.vocabulary import vocabulary
from engine.telemetry.timeline import Timeline


@asynccontextmanager
async def teacher_of(
    config: TeacherConfig,
    *,
    student: Path,
    chat: ChatTemplate,
    max_tokens: int,
    replicas: int = 0,
    note: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Teacher]:
    """Starts the teacher, or connects to it. student: its checkpoint, whose vocabulary is compared with the teacher's.
    max_tokens: of the longest sequence. replicas: the student's, which have the first cores. note: is told when the
    teacher's replica or server fails, and when it is back.

    Raises ReplicaDied if it does not start, TeacherLost for a server that does not answer, and ValueError for another
    vocabulary.
    """
    fields = json.loads((student / "config.json").read_text())
    tokens = int(fields.get("text_config", fields)["vocab_size"])
    config.check_student(student, max_tokens=max_tokens)
    known = max(vocabulary(student)) + 1

    def teacher(scorer: Scores, trouble: Callable[[], str] = lambda: "") -> Teacher:
        return Teacher(
            scorer,
            name=config.teacher,
            top=config.top,
            deadline_s=config.deadline_s,
            tokens=tokens,
            known=known,
            trouble=trouble,
        )

    if config.is_url:
        async with endpoint_of(config, note=note) as endpoint:
            await endpoint.check(chat, student, longest=max_tokens, top=config.top)
            yield teacher(endpoint, lambda: endpoint.trouble)
        return
    settings = ReplicaConfig(checkpoint=config.teacher, max_model_len=max_tokens + ROOM)
    if config.devices:
        settings = replace(settings, devices=config.devices, tensor_parallel=len(config.devices), dtype="bfloat16")
    pinned = len(os.sched_getaffinity(0)) > replicas  # beside a busy replica it would wait while another core idles

    def make(index: int, core: int | None, on_step: Callable[[int, KvSample], None]) -> Replica:
        return Replica(settings, index, core if pinned else None, on_step)

    def told(line: str) -> None:
        note(f"the teacher's {line}")

    fleet = Fleet(FleetConfig(replicas=1, block_size=settings.block_size), make, RoundRobin(), Timeline(), note=told)
    async with fleet:
        yield teacher(fleet)
