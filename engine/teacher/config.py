"""Which teacher a run has, and what it is asked. Imports nothing heavy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from engine.replica.config import check_head
from engine.replica.port import MOST_TOP
from engine.teacher.vocabulary import check_same_vocabulary
from sandbox.require import Rule, positive, require

URL = ("http://", "https://")
ROOM = 32  # tokens beyond a trajectory's budget, one of which is sampled with each score


@dataclass(frozen=True, kw_only=True, slots=True)
class TeacherConfig:
    """A frozen model that rates what the student has sampled: a checkpoint, or a server.

    >>> TeacherConfig(teacher="http://gpu-2:8000/v1").is_url
    True
    """

    teacher: str
    """A Hugging Face folder, which a replica beside the student's serves; or the URL of an OpenAI-compatible server
    that has `prompt_logprobs`, with /v1 at its end: `rocstar gateway`, or vLLM's own."""
    top: int = 0
    """How many of the teacher's likeliest tokens it names for each position."""
    deadline_s: float = 120.0
    """Seconds in which a turn must be scored, whatever dies and comes back meanwhile; then the run stops."""
    devices: tuple[int, ...] = ()
    """GPUs of a teacher in a folder, all for one replica; none for the CPU. Not yet run on a GPU."""
    in_flight: int = 64
    """Requests that a server gets at once; the others wait."""
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the server's key; a server without keys needs none."""

    def __post_init__(self) -> None:
        require("TeacherConfig.top", self.top, Rule(f"from 0 to {MOST_TOP}", lambda value: 0 <= value <= MOST_TOP))
        require("TeacherConfig.deadline_s", self.deadline_s, positive)
        require("TeacherConfig.in_flight", self.in_flight, positive)
        if not self.teacher:
            raise ValueError(
                "teacher must be a checkpoint's folder or a server's URL, got none. Fix: "
                "teacher=runs/quickstart/checkpoint (what `make quickstart` trains), or teacher=http://HOST:PORT/v1"
            )
        if self.is_url and self.devices:
            raise ValueError(f"devices of a teacher must be empty for a server's URL, got {self.devices}")
        inner = Path(self.teacher, "checkpoint")
        if not self.is_url and not Path(self.teacher, "tokenizer.json").is_file() and inner.is_dir():
            raise ValueError(f"teacher: {self.teacher!r} is the folder of a run. Fix: teacher={inner}")
        if not self.is_url and not Path(self.teacher, "config.json").is_file():
            raise ValueError(
                f"teacher: no config.json in {self.teacher!r}. Fix: a Hugging Face folder on this machine (each "
                "rollout node needs its own copy), or the URL of a server, http://HOST:PORT/v1"
            )

    @property
    def is_url(self) -> bool:
        return self.teacher.startswith(URL)

    def check_student(self, student: Path, *, max_tokens: int) -> None:
        """Raises ValueError for a teacher in a folder whose tokens are not the student's, or that cannot read its
        trajectories of max_tokens. A server is asked later.
        """
        if self.is_url:
            return
        check_same_vocabulary(student, Path(self.teacher))
        fields = json.loads(Path(self.teacher, "config.json").read_text())
        check_head(fields, "teacher")
        fields = fields.get("text_config", fields)
        rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        longest = fields.get("max_position_embeddings")
        if isinstance(longest, int) and "factor" not in rope and max_tokens + ROOM > longest:
            raise ValueError(
                f"teacher {self.teacher!r} can read {longest} tokens (max_position_embeddings), and a trajectory may "
                f"have {max_tokens}. Fix: rollout.max_tokens={longest - ROOM} or less, or another teacher"
            )
