"""Where an event loop stands still is named by file and line."""

import asyncio
import threading
import time

from engine.telemetry.stall_watch import LOOK_S, StallWatch


def stand_still(until):
    while not until():
        time.sleep(LOOK_S / 4)  # as a stage that forgets to await


def test_the_line_at_which_the_loop_stands_is_named():
    late = [0.0]
    with StallWatch(lambda: late[0]) as watch:
        late[0] = 0.3
        stand_still(lambda: watch.seconds)
    [(place, seconds)] = watch.seconds.items()
    assert place.startswith("test_stall_watch.py:")
    assert place.endswith("stand_still")
    assert seconds == 0.3


def test_a_thread_that_takes_the_loops_turns_is_named():
    over = threading.Event()

    def compute():
        while not over.is_set():
            sum(range(1000))

    async def wait():
        late[0] = 0.3
        await asyncio.sleep(1.0)

    late = [0.0]
    busy = threading.Thread(target=compute, name="busy")
    busy.start()
    with StallWatch(lambda: late[0]) as watch:
        asyncio.run(wait())
    over.set()
    busy.join()
    assert any(place.endswith("compute (in thread busy)") for place in watch.seconds), watch.seconds


def test_a_loop_that_serves_its_ticks_is_left_alone():
    looks = []
    with StallWatch(lambda: looks.append(1) or -0.01) as watch:
        stand_still(lambda: len(looks) > 3)
    assert not watch.seconds


def test_the_thread_ends_with_the_watch():
    with StallWatch(lambda: 0.0):
        [thread] = [each for each in threading.enumerate() if each.name == "stall-watch"]
    thread.join(5)
    assert not thread.is_alive()
