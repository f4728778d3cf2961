"""Which cores the engines of a fleet are pinned to, beside those of other fleets on the machine."""

import os
from pathlib import Path

from engine.fleet.cores import claimed_cores, least_pinned


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


def machine_of(monkeypatch, folder, *cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    for core in cores:
        (folder / f"cpu{core}").mkdir()


def test_fleets_that_start_at_the_same_moment_get_different_cores(tmp_path, monkeypatch):
    machine_of(monkeypatch, tmp_path, 90001, 90002, 90003)  # none of this machine's, to which others may be pinned
    with claimed_cores(1, tmp_path) as first, claimed_cores(1, tmp_path) as second:
        assert (first, second) == ([90001], [90002])
        with claimed_cores(2, tmp_path) as third:
            assert third == [90003, 90001], "one is free, and the other has to be shared"
    with claimed_cores(2, tmp_path) as later:
        assert later == [90001, 90002]


def test_replicas_are_pinned_only_where_each_has_a_core(tmp_path, monkeypatch):
    machine_of(monkeypatch, tmp_path, 90001, 90002)
    with claimed_cores(3, tmp_path) as none, claimed_cores(2, tmp_path) as both:
        assert (none, both) == ([None] * 3, [90001, 90002])


def test_where_cores_cannot_be_claimed_they_are_shared(tmp_path, monkeypatch):
    machine_of(monkeypatch, tmp_path, 90001, 90002)
    with claimed_cores(1, tmp_path / "not there") as cores:
        assert cores == [90001]


def test_the_kernel_has_a_folder_for_each_core():
    assert [core for core in os.sched_getaffinity(0) if not Path(f"/sys/devices/system/cpu/cpu{core}").is_dir()] == []
