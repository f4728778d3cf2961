"""Which cores the engines of a fleet are pinned to, beside those of other fleets on the machine."""

import os

from engine.fleet.cores import least_pinned


def test_cores_that_nobody_is_pinned_to_come_first(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5})
    assert least_pinned(tmp_path) == [2, 3, 5]
    for number, allowed in enumerate(["2", "0-7", "2", "5", "3,5", "7"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "status").write_text(
            f"Name:\tx\nVmSize:\t8 kB\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\nMems_allowed:\t1\n"
        )
    (tmp_path / "9").mkdir()
    for thread in ("21", "22"):  # of the kernel, which has no memory of its own
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "status").write_text("Name:\tkworker\nCpus_allowed_list:\t3\nMems_allowed:\t1\n")
    assert least_pinned(tmp_path) == [3, 5, 2]


def test_of_this_machine_all_cores_that_may_be_used_are_there():
    assert set(least_pinned()) == os.sched_getaffinity(0)
