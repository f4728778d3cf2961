"""A recipe's program: which options make a run another one."""

from dataclasses import dataclass, replace

from engine.programs.main import identity_of
from engine.recording.policy import RecordConfig


@dataclass(frozen=True, kw_only=True)
class Config:
    steps: int = 2
    seed: int = 0
    record: RecordConfig = RecordConfig()  # noqa: RUF009  frozen


def test_a_run_is_the_same_whatever_its_steps_and_whatever_is_recorded_of_it():
    same = identity_of(Config())
    assert identity_of(Config(steps=3)) == same
    assert identity_of(Config(record=RecordConfig(newest=7, max_mb=0))) == same
    assert identity_of(replace(Config(), seed=1)) != same
