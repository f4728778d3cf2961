"""Attacks on what a call printed: its bytes, its end, its descriptors, the mark of a cut (A4, A6, A8).

Everything a program says on its own stdout is its own business; it is kept, up to the limit, and marked if cut.
"""

from __future__ import annotations

from sandbox import ToolResult, wire

from .record import SMALL, Attack

FRAME = wire.encode(wire.Results([wire.CallResult(n, ToolResult(outcome="ok", stdout="forged")) for n in range(9)]))


def cut_is_marked(result: ToolResult) -> bool:
    return result.truncated and len(result.stdout.encode()) == SMALL.output_bytes


def whole_or_marked(result: ToolResult) -> bool:
    return len(result.stdout) == SMALL.output_bytes if result.truncated else len(result.stdout) < SMALL.output_bytes


ATTACKS = (
    Attack(
        name="result_frames_on_stdout",
        point="A6",
        code=f"import sys\nsys.stdout.buffer.write({FRAME!r})",
        stdout=FRAME.decode(errors="replace"),
    ),
    Attack(
        name="result_frames_on_stderr_and_a_false_exit",
        point="A6",
        code=f"import os\nos.write(2, {FRAME!r})\nos._exit(4)",
        outcomes=("error",),
        exit_code=4,
        check=lambda r: r.stderr == FRAME.decode(errors="replace"),
    ),
    Attack(
        name="bytes_that_are_no_text",
        point="A6",
        code="import os\nos.write(1, b'\\x00\\xff\\xfe\\xed\\xa0\\x80\\x1b[2J\\r\\n\\xf0\\x9f')",
        stdout=b"\x00\xff\xfe\xed\xa0\x80\x1b[2J\r\n\xf0\x9f".decode(errors="replace"),
    ),
    Attack(
        name="outputs_are_empty_at_birth",
        point="A4",
        code="""
import fcntl, os
for fd in (1, 2):
    if os.fstat(fd).st_size: print('size', fd)
    if fcntl.fcntl(fd, fcntl.F_GETFL) & (os.O_NONBLOCK | os.O_ASYNC): print('flags', fd)
    try:
        if os.lseek(fd, 0, os.SEEK_CUR): print('offset', fd)
        if os.pread(fd, 10, 0): print('bytes of another call', fd)
    except OSError: pass
""",
    ),
    Attack(
        name="flags_and_offset_of_the_outputs",
        point="A4",
        code="""
import fcntl, os
for fd in (0, 1, 2):
    try: fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC | os.O_APPEND)
    except OSError: pass
    try: fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
    except OSError: pass
    try: os.lseek(fd, 1 << 20, 0)
    except OSError: pass
""",
    ),
    Attack(
        name="stdout_sealed",
        point="A4",
        code="""
import fcntl, os
os.write(1, b'before\\n')
for seals in (0x8, 0x4, 0x2, 0x1):  # write, grow, shrink, seal
    try: fcntl.fcntl(1, 1033, seals); os.write(1, b'sealed\\n')
    except OSError: pass
""",
        stdout="before\n",
    ),
    Attack(
        name="stdout_locked",
        point="A4",
        code="""
import fcntl, os
for fd in (1, 2):
    try: fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError: pass
    try: fcntl.lockf(fd, fcntl.LOCK_EX)
    except OSError: pass
print('locked')
""",
        stdout="locked\n",
    ),
    Attack(
        name="megabytes_then_truncated",
        point="A8",
        limits=SMALL,
        code="""
import os
try:
    os.write(1, b'x' * (1 << 20))
    os.ftruncate(1, 0); os.lseek(1, 0, 0)
except OSError: pass
""",
        stdout=None,
        check=whole_or_marked,
    ),
    Attack(
        name="one_byte_far_out",
        point="A8",
        limits=SMALL,
        code="""
import os
try: os.lseek(1, 1 << 20, 0)
except OSError: os.write(1, bytes(1 << 20))
os.write(1, b'x')
""",
        stdout="\0" * SMALL.output_bytes,
        check=cut_is_marked,
    ),
    Attack(
        name="one_byte_too_many",
        point="A8",
        limits=SMALL,
        code="print('y' * 4096)",
        stdout="y" * 4096,
        check=cut_is_marked,
    ),
    Attack(
        name="exactly_the_limit",
        point="A8",
        limits=SMALL,
        code="print('y' * 4095)",
        stdout="y" * 4095 + "\n",
        check=lambda r: not r.truncated,
    ),
    Attack(
        name="a_character_across_the_limit",
        point="A8",
        limits=SMALL,
        code="print('y' * 4095 + '\\N{SNOWMAN}')",
        stdout="y" * 4095,
        check=lambda r: r.truncated,
    ),
    Attack(
        name="cut_stderr_is_marked",
        point="A8",
        limits=SMALL,
        code="import os\nos.write(2, b'e' * 5000)",
        stdout=None,
        check=lambda r: r.truncated and r.stderr == "e" * 4096,
    ),
    Attack(
        name="stdout_written_through_memory",
        point="A4",
        code="""
import mmap, os
os.write(1, b'plain \\n')
try: mmap.mmap(1, 7, mmap.MAP_SHARED)[:5] = b'mmap '
except (OSError, ValueError): pass
""",
        stdout=None,
        check=lambda r: r.stdout in ("plain \n", "mmap  \n"),
    ),
    Attack(
        name="descriptors_exchanged",
        point="A4",
        stdin="given\n",
        code="""
import os
os.write(1, b'kept\\n')
os.dup2(0, 1); os.dup2(2, 0)
for fd in (0, 1):
    try: os.write(fd, b'')
    except OSError: pass
""",
        stdout="kept\n",
    ),
    Attack(
        name="descriptors_closed_and_taken",
        point="A4",
        code="""
import os
for fd in (0, 1, 2): os.close(fd)
for n in range(3): os.open(f'/tmp/{n}', os.O_RDWR | os.O_CREAT)
os.write(1, b'into a file')
os._exit(0)
""",
    ),
)
