"""What one call does and answers."""

from __future__ import annotations

import asyncio

import pytest

from sandbox import TIERS, Limits, Sandbox, SandboxConfig, Tier
from sandbox.host.slots import GRACE_S
from sandbox.tiers import choose

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHORT = Limits(wall_s=0.3)


@pytest.mark.smoke
async def test_ok(box: Sandbox) -> None:
    result = await box.run("print(1 + 1)")
    assert (result.outcome, result.stdout, result.stderr, result.exit_code) == ("ok", "2\n", "", 0)
    assert result.jailed
    assert not result.truncated
    assert result.wall_s > 0
    assert result.cpu_s > 0
    assert result.peak_memory_bytes > 0


async def test_error_shows_the_traceback_that_python_shows(box: Sandbox) -> None:
    result = await box.run("def f(x):\n    return 1 / x\n\nprint('before')\nf(0)\n")
    assert (result.outcome, result.stdout, result.exit_code) == ("error", "before\n", 1)
    assert result.stderr == (
        "Traceback (most recent call last):\n"
        '  File "/tmp/main.py", line 5, in <module>\n'
        "    f(0)\n"
        '  File "/tmp/main.py", line 2, in f\n'
        "    return 1 / x\n"
        "           ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
    )


@pytest.mark.parametrize("display", [False, True])
async def test_syntax_error(box: Sandbox, display: bool) -> None:
    result = await box.run("x = 1\nif x\n    pass", display=display)
    assert (result.outcome, result.exit_code) == ("error", 1)
    assert result.stderr == "  File \"/tmp/main.py\", line 2\n    if x\n        ^\nSyntaxError: expected ':'\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "stderr"),
    [
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("exit(4)", 4, ""),
        ("import os; os._exit(7)", 7, ""),
        ("raise SystemExit(-1)", 255, ""),
    ],
)
async def test_exit_codes(box: Sandbox, code: str, exit_code: int, stderr: str) -> None:
    result = await box.run(code)
    assert (result.exit_code, result.stderr) == (exit_code, stderr)
    assert result.outcome == ("ok" if exit_code == 0 else "error")


async def test_code_is_the_main_program(box: Sandbox) -> None:
    code = "import sys, __main__\nx = 3\nprint(__name__, __main__.x, sys.argv, __file__, 'sandbox' in sys.modules)"
    assert (await box.run(code)).stdout == "__main__ 3 ['main.py'] /tmp/main.py False\n"


async def test_threads_and_atexit_finish(box: Sandbox) -> None:
    code = (
        "import atexit, threading, time\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\nprint('main')"
    )
    assert (await box.run(code)).stdout == "main\nthread\nlast\n"


async def test_stdin(box: Sandbox) -> None:
    result = await box.run("print(int(input()) + int(input()))", stdin="1\n2\n")
    assert result.stdout == "3\n"
    assert "EOFError" in (await box.run("input()")).stderr


async def test_unicode(box: Sandbox) -> None:
    result = await box.run("print(input() + ' ∑ 😀')", stdin="żółć")
    assert result.stdout == "żółć ∑ 😀\n"
    lone = await box.run("print('\ud800')")
    assert (lone.outcome, lone.exit_code) == ("error", 1)


@pytest.mark.parametrize("display", [False, True])
@pytest.mark.parametrize(
    "declaration",
    [
        "# -*- coding: latin-1 -*-",
        "#!/usr/bin/python\n# vim: set fileencoding=cp1252 :",
        "# coding: klingon",
        "# coding: utf-16",
        "# coding: ascii\n# coding=latin-1",
        "# coding: utf-8",
    ],
)
async def test_a_coding_declaration_says_nothing_about_text(box: Sandbox, declaration: str, display: bool) -> None:
    result = await box.run(f"{declaration}\nprint('é€')\nx = 'ó' + 1", display=display)
    line = declaration.count("\n") + 3
    assert (result.stdout, result.exit_code) == ("é€\n", 1)
    assert f"File \"/tmp/main.py\", line {line}, in <module>\n    x = 'ó' + 1\n" in result.stderr
    wrong = await box.run(f"{declaration}\nx = 'ó' 'ó' = 1", display=display)
    assert "    x = 'ó' 'ó' = 1\n" in wrong.stderr
    assert "SyntaxError" in wrong.stderr


async def test_no_code_and_much_code(box: Sandbox) -> None:
    assert (await box.run("")).outcome == "ok"
    much = await box.run("x = 1\n" * 200_000 + "print('end')", limits=Limits(wall_s=60, cpu_s=60))
    assert much.stdout == "end\n"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal as s, time\nfor n in {*range(1, 32)} - {9, 19}: s.signal(n, s.SIG_IGN)\ntime.sleep(60)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "x = 7 ** (7 ** 9)",
    ],
)
async def test_wall_limit(box: Sandbox, code: str) -> None:
    """Ended from outside soon after the limit, and answered without the host's help for slots that say nothing."""
    result = await box.run(code, limits=SHORT)
    assert result.outcome == "timeout"
    assert SHORT.wall_s <= result.wall_s < SHORT.wall_s + 1
    assert result.queue_s < GRACE_S


async def test_cpu_limit(box: Sandbox) -> None:
    assert (await box.run("while True: pass", limits=Limits(wall_s=30, cpu_s=1))).outcome == "timeout"


@pytest.mark.parametrize("display", [False, True])
@pytest.mark.parametrize(
    "rest",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import threading, time\nt = threading.Thread(target=time.sleep, args=(60,))\nt.start()\nt.join()",
        "import io, sys\nsys.stdout = io.StringIO()\nwhile True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "import asyncio; asyncio.run(asyncio.sleep(60))",
    ],
)
async def test_what_was_printed_before_the_wall_limit_is_shown(box: Sandbox, rest: str, display: bool) -> None:
    result = await box.run(f"import sys\nprint('out')\nprint('err', end='', file=sys.stderr)\n{rest}", "", SHORT)
    assert (result.outcome, result.stdout, result.stderr) == ("timeout", "out\n", "err")


async def test_what_was_printed_before_the_cpu_limit_is_shown_once(box: Sandbox) -> None:
    limits = Limits(wall_s=30, cpu_s=1)
    result = await box.run("print('out')\nwhile True: pass", limits=limits)
    assert (result.outcome, result.stdout) == ("timeout", "out\n")
    fork = "import os, signal\nprint('out')\nif os.fork() == 0:\n    while True: pass\n"
    code = f"{fork}print(os.wait()[1] == signal.SIGXCPU)"
    assert (await box.run(code, limits=limits)).stdout == "out\nTrue\n"  # the child's copy of it is not written


async def test_the_time_to_write_out_what_was_printed_is_short(box: Sandbox) -> None:
    """For a program that makes use of it to run on, and for one call into C, which loses what it printed."""
    spin = "import signal\ndef spin(*_):\n    while True: pass\nfor n in range(34, 64): signal.signal(n, spin)\n"
    for code in (spin + "while True: pass", "import itertools\nprint(1)\nsum(itertools.repeat(0))"):
        result = await box.run(code, limits=SHORT)
        assert (result.outcome, result.stdout) == ("timeout", "")
        assert result.wall_s < SHORT.wall_s + 1


@pytest.mark.parametrize("code", ["x = bytearray(3 << 30)", "x = []\nwhile True: x.append(bytearray(1 << 20))"])
async def test_memory_limit(box: Sandbox, code: str) -> None:
    result = await box.run(code, limits=Limits(memory_bytes=256 << 20))
    assert (result.outcome, result.exit_code) == ("memory", 1)
    assert "MemoryError" in result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "x = []\nwhile True: x.append(len(x))",
        "x = None\nwhile True: x = (x,)",
        "x = {}\nwhile True: x[len(x)] = None",
        "x = [0] * (1 << 22)\nfor n in range(1 << 30): x[n] = object()",
    ],
)
@pytest.mark.parametrize("display", [False, True])
async def test_memory_of_which_nothing_is_left(box: Sandbox, code: str, display: bool) -> None:
    """Not for a number either: what reports the end must do without."""
    result = await box.run(code, limits=Limits(wall_s=20, cpu_s=20, memory_bytes=64 << 20), display=display)
    assert (result.outcome, result.exit_code) == ("memory", 1)


REPEATED = """
import signal
def late(*_): raise TimeoutError
signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.0001)
while True: pass
"""


async def test_what_breaks_into_its_ending_makes_no_success_of_a_program(box: Sandbox) -> None:
    for _ in range(5):
        result = await box.run(REPEATED)
        assert (result.outcome, result.stdout) == ("error", "")
    full = "x = []\ntry:\n    while True: x.append(len(x))\nexcept MemoryError: pass\n1 / 0"
    assert (await box.run(full, limits=Limits(memory_bytes=64 << 20))).outcome in ("memory", "error")
    deaf = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMAX})\n"
    woken = "signal.signal(signal.SIGALRM, print)\nsignal.setitimer(signal.ITIMER_REAL, 0.1)\nraise MemoryError"
    assert (await box.run(deaf + woken)).outcome == "error"


async def test_output_limits(box: Sandbox) -> None:
    long = await box.run("print('é' * 1000)", limits=Limits(output_bytes=101))
    assert (long.outcome, long.truncated, long.stdout) == ("ok", True, "é" * 50)
    limits = Limits(output_bytes=1000, disk_bytes=1 << 20)
    flood = await box.run("while True: print('x' * 1000)", limits=limits)
    assert (flood.outcome, flood.truncated, len(flood.stdout)) == ("output", True, 1000)
    by_signal = "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)\nwhile True: print('x' * 1000)"
    assert (await box.run(by_signal, limits=limits)).outcome == "output"


async def test_a_stdin_that_the_disk_cannot_hold_has_no_name_rather_than_a_part_of_it(box: Sandbox) -> None:
    """Its name is a file of the call's; see main_program.write_main."""
    code = "import sys\nprint(len(sys.stdin.read()))\nprint(len(open('/dev/stdin').read()))"
    whole, part = [await box.run(code, "x" * size, Limits(disk_bytes=1 << 20)) for size in (1 << 19, 1 << 21)]
    assert (whole.stdout, whole.outcome) == ("524288\n524288\n", "ok")
    assert (part.stdout, part.outcome) == ("2097152\n", "error")
    assert "FileNotFoundError" in part.stderr


async def test_a_limit_beyond_what_the_machine_allows_is_no_error_of_the_call(box: Sandbox) -> None:
    limits = Limits(processes=1 << 40)
    assert (await box.run("print(1)", limits=limits)).stdout == "1\n"
    async with box.session(limits=limits) as session:
        assert (await session.run("1")).display == "1"


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGABRT"])
async def test_killed_by_itself(box: Sandbox, signal: str) -> None:
    result = await box.run(f"import os, signal; os.kill(os.getpid(), signal.{signal})")
    assert (result.outcome, result.exit_code) == ("killed", None)


async def test_misuse(box: Sandbox) -> None:
    with pytest.raises(ValueError, match="code must be a str, got bytes"):
        await box.run(b"print(1)")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="limits must be Limits"):
        await box.run("print(1)", limits=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"tier must be one of .*, got 'odd'"):
        await box.run("print(1)", tier="odd")
    with pytest.raises(ValueError, match=r"tier must be one of .*, got 7"):
        box.session(tier=7)  # type: ignore[arg-type]
    for seed in (-1, True, 1.0):
        with pytest.raises(ValueError, match="seed must be an int"):
            await box.run("print(1)", seed=seed)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="seed must be an int"):
            box.session(seed=seed)  # type: ignore[arg-type]
    for display in (1, None, "x"):
        with pytest.raises(ValueError, match="display must be a bool, got "):
            await box.run("print(1)", display=display)  # type: ignore[arg-type]
    for slots in (-1, 2.0, "2"):
        with pytest.raises(ValueError, match=rf"SandboxConfig.slots must be an int .* got {slots!r}"):
            SandboxConfig(slots=slots)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"SandboxConfig.listen must be set when slots is 0"):
        SandboxConfig(slots=0)
    with pytest.raises(ValueError, match=r"SandboxConfig.isolation .* got 'chroot'"):
        SandboxConfig(isolation="chroot")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "tier"),
    [
        ("import math, __main__", "bare"),
        ("from numpy import array", "math"),
        ("import os, scipy.stats as s", "full"),
        ("import unknown", "full"),
    ],
)
async def test_a_call_runs_in_the_first_tier_that_has_what_it_imports(code: str, tier: str) -> None:
    assert choose(code, TIERS) == tier


async def test_two_thousand_queued_calls_are_answered_once_each(box: Sandbox) -> None:
    before = box.stats.outcomes.total()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(box.run(f"print({i})"), name=f"call-{i}") for i in range(2000)]
    assert [task.result().stdout for task in tasks] == [f"{i}\n" for i in range(2000)]
    assert box.stats.outcomes.total() - before == 2000


async def test_calls_start_in_order() -> None:
    async with Sandbox(SandboxConfig(slots=1)) as single, asyncio.TaskGroup() as group:
        done: list[int] = []

        async def call(i: int) -> None:
            await single.run("pass")
            done.append(i)

        for i in range(20):
            group.create_task(call(i), name=f"call-{i}")
    assert done == list(range(20))


DRAWS = """
import numpy, os, random, secrets, sympy.core.random, tempfile, uuid
print(random.random(), random.Random().random(), random.SystemRandom().random(), random.Random(3).random())
print(numpy.random.rand(), numpy.random.default_rng().random(), numpy.random.RandomState().rand())
print(sympy.core.random.random(), uuid.uuid4(), secrets.token_hex(4), os.urandom(4).hex(), os.urandom(0))
print(tempfile.mkdtemp(), tempfile.NamedTemporaryFile().name)
random.seed(); numpy.random.seed(None)
print(random.random(), numpy.random.rand())
"""


@pytest.mark.parametrize("tier", [tier.name for tier in TIERS])
async def test_a_seed_reaches_all_that_draws(box: Sandbox, tier: str) -> None:
    one, same, other, free, again = [await box.run(DRAWS, seed=seed, tier=tier) for seed in (7, 7, 8, None, None)]
    assert (one.outcome, one.stderr) == ("ok", "")
    assert one.stdout == same.stdout
    drawn = [set(result.stdout.split()) for result in (one, other, free, again)]
    for index, numbers in enumerate(drawn):
        assert len(numbers) >= 15  # random's and sympy's are seeded alike
        for others in drawn[index + 1 :]:
            assert numbers & others == {"0.23796462709189137", "b''"}  # Random(3), and nothing


async def test_libraries_are_preloaded_and_reseeded() -> None:
    async with Sandbox(
        SandboxConfig(slots=2, tiers=(Tier(name="numeric", preload=("random", "numpy.random")),))
    ) as numeric:
        code = "import random, sys\nprint('numpy' in sys.modules, random.random(), __import__('numpy').random.rand())"
        results = [await numeric.run(code) for _ in range(4)]
    lines = [result.stdout.split() for result in results]
    assert [line[0] for line in lines] == ["True"] * 4
    assert len({line[1] for line in lines}) == 4
    assert len({line[2] for line in lines}) == 4
