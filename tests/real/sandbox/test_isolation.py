"""What guest code must not be able to see, reach, or leave behind."""

from __future__ import annotations

import asyncio

import pytest

from sandbox import Limits, Sandbox
from tests.support.sandbox_level import needs_own_ids

pytestmark = pytest.mark.asyncio(loop_scope="module")

SYSCALL = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(name, *arguments):
    if getattr(libc, name)(*arguments) >= 0:
        print(name, 'worked')
    elif ctypes.get_errno() != errno.EPERM:
        print(name, errno.errorcode[ctypes.get_errno()])
"""


async def silent(box: Sandbox, code: str, limits: Limits | None = None) -> None:
    """Run `code`, which prints what it should not have been able to do."""
    result = await box.run(code, limits=limits)
    assert (result.stdout, result.stderr, result.outcome) == ("", "", "ok")


async def test_descriptors_are_exactly_the_standard_ones(box: Sandbox) -> None:
    code = "import os\nfor fd in range(4096):\n    try: os.fstat(fd); print(fd)\n    except OSError: pass"
    assert (await box.run(code, stdin="x")).stdout == "0\n1\n2\n"
    assert (await box.run(code)).stdout == "0\n1\n2\n"


async def test_no_network(box: Sandbox) -> None:
    code = """
import socket
def tried(*arguments):
    try:
        s = socket.socket(*arguments)
        s.settimeout(1)
        for what in (lambda: s.connect(('127.0.0.1', 80)), lambda: s.connect(('1.1.1.1', 53)),
                     lambda: s.bind(('', 0)), lambda: s.sendto(b'x', ('1.1.1.1', 53))):
            try: what(); print('worked')
            except OSError: pass
    except OSError: pass
tried(); tried(socket.AF_INET, socket.SOCK_DGRAM)
for family in (socket.AF_UNIX, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK):
    try: socket.socket(family, socket.SOCK_DGRAM); print(family)
    except OSError: pass
a, b = socket.socketpair()  # asyncio needs it
a.send(b'x'); assert b.recv(1) == b'x'
"""
    await silent(box, code)


async def test_host_files_are_absent_and_the_tree_is_read_only(box: Sandbox) -> None:
    code = """
import os, sys
for path in ('/etc', '/proc', '/sys', '/home', '/var', '/root/.ssh', '/run', '/dev/shm/..//etc', '/usr/share'):
    if os.path.exists(path): print(path)
for path in ('/', '/usr', '/dev', '/opt', os.path.dirname(os.__file__)):
    try: open(os.path.join(path, 'x'), 'w'); print('wrote', path)
    except OSError: pass
known = {'HOME', 'LANG', 'PATH', 'PYTHONDONTWRITEBYTECODE', 'PYTHONHASHSEED', 'LC_CTYPE',
         'OPENBLAS_NUM_THREADS', 'OMP_NUM_THREADS'}
if set(os.environ) - known: print(os.environ)
"""
    await silent(box, code)


@needs_own_ids
async def test_no_capabilities_and_no_way_to_gain_any(box: Sandbox) -> None:
    code = (
        SYSCALL
        + """
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
if any(data): print(list(data))
if libc.prctl(39, 0, 0, 0, 0) != 1: print('no_new_privs is off')
if libc.prctl(21, 0, 0, 0, 0) != 2: print('seccomp is off')
if 0 in os.getresuid() + os.getresgid(): print(os.getresuid(), os.getresgid())
refused('setresuid', 0, 0, 0)
refused('ptrace', 0, 0, 0, 0)
refused('mount', b'x', b'/tmp', b'tmpfs', 0, None)
refused('umount2', b'/tmp', 2)
for flag in (0x20000, 0x10000000, 0x20000000, 0x40000000):
    refused('unshare', flag)
refused('setns', 0, 0)
refused('chroot', b'/tmp')
refused('memfd_create', b'x', 0)
refused('process_vm_readv', 1, None, 0, None, 0, 0)
refused('syscall', 425, 1, None)  # io_uring_setup
refused('syscall', 438, 0, 0, 0)  # pidfd_getfd
refused('syscall', 321, 0, None, 0) if os.uname().machine == 'x86_64' else None  # bpf
refused('shmget', 0, 4096, 0o1600)
if libc.syscall(435, None, 0) >= 0 or ctypes.get_errno() != errno.ENOSYS: print('clone3')
"""
    )
    await silent(box, code)


async def test_threads_processes_and_temporary_files_work(box: Sandbox) -> None:
    code = """
import asyncio, concurrent.futures, multiprocessing, subprocess, sys, tempfile
with concurrent.futures.ThreadPoolExecutor(4) as pool: assert sum(pool.map(abs, range(-3, 3))) == 9
with multiprocessing.Pool(2) as pool: assert pool.map(abs, [-1, 2]) == [1, 2]
async def main(): await asyncio.sleep(0)
asyncio.run(main())
assert subprocess.run([sys.executable, '-c', 'print(5)'], capture_output=True, text=True).stdout == '5\\n'
with tempfile.TemporaryFile() as f: f.write(b'x')
"""
    await silent(box, code)


async def test_nothing_of_an_earlier_call_is_left(box: Sandbox) -> None:
    leave = """
import builtins, os, random, sys
builtins.print_ = 1; sys.modules['json'] = None; random.random = lambda: 0; os.environ['X'] = 'y'
for path in ('/tmp/x', 'y', '/dev/shm/z', os.path.expanduser('~/w')): open(path, 'w').write('secret')
os.umask(0o777); os.mkdir('locked'); os.chmod('.', 0)
"""
    look = """
import builtins, os, random, json
if hasattr(builtins, 'print_') or random.random() == 0 or 'X' in os.environ: print('state')
found = {*os.listdir('.'), *os.listdir('/tmp'), *os.listdir('/dev/shm')}
if found != {'main.py'}: print(found)
"""
    async with asyncio.TaskGroup() as group:
        for i in range(16):
            group.create_task(box.run(leave), name=f"leave-{i}")
    for _ in range(16):
        await silent(box, look)


async def test_other_processes_cannot_be_seen_or_signalled(box: Sandbox) -> None:
    attack = """
import os
for pid in (-1, 1) * 50:
    try: os.kill(pid, 9)
    except OSError: pass
"""
    async with asyncio.TaskGroup() as group:
        for i in range(20):
            group.create_task(box.run(attack), name=f"attack-{i}")
        victims = [
            group.create_task(box.run(f"s = sum(range(100000))\nprint({i}, s)"), name=f"v-{i}") for i in range(40)
        ]
    assert [task.result().stdout for task in victims] == [f"{i} 4999950000\n" for i in range(40)]
    assert (await box.run("import os; print(os.getpid() < 10, os.getppid())")).stdout == "True 0\n"


async def test_a_daemon_does_not_outlive_its_call(box: Sandbox) -> None:
    code = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(0.2)
        print('late', flush=True)
    os._exit(0)
print('early')
"""
    results = [await box.run(code) for _ in range(4)]
    await asyncio.sleep(0.3)
    results += [await box.run("print('next')") for _ in range(4)]
    assert [r.stdout for r in results] == ["early\n"] * 4 + ["next\n"] * 4


async def test_a_fork_bomb_and_a_full_disk_stay_in_their_call(box: Sandbox) -> None:
    bomb = box.run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", limits=Limits(wall_s=0.5))
    disk = box.run(
        "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20)); f.flush()", limits=Limits(disk_bytes=4 << 20)
    )
    bombed, filled, honest = await asyncio.gather(bomb, disk, box.run("print('fine')"))
    assert bombed.outcome == "timeout"
    assert filled.outcome == "error"
    assert "OSError" in filled.stderr
    assert honest.stdout == "fine\n"
    assert (await box.run("print('after')")).stdout == "after\n"


@needs_own_ids
async def test_processes_limit(box: Sandbox) -> None:
    code = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0: time.sleep(60)
        n += 1
except OSError: print(n)
"""
    assert (await box.run(code, limits=Limits(processes=5))).stdout == "4\n"


async def test_output_cannot_forge_a_verdict(box: Sandbox) -> None:
    code = """
import os, struct
for fd in range(256):
    try: os.write(fd, struct.pack('qqddq', 0, 0, 0, 0, 0))
    except OSError: pass
os._exit(9)
"""
    result = await box.run(code)
    assert (result.outcome, result.exit_code) == ("error", 9)
