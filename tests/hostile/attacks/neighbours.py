"""Attacks on other calls, running now or later: what is left behind, what can be seen, what can be spoiled (B9-B12).

The probes after each attack look for what an earlier call may have left; here is what tries to leave it.
"""

from __future__ import annotations

from .record import HANGS, QUICK, SYSCALLS, Attack

SCAN = (
    SYSCALLS
    + """
import gc, re, sys
PATTERN = re.compile(b'PLANT' + b'ED-[0-9a-f]{16}')
MASK = ~4095
r, w = os.pipe()
def read(address):
    size = libc.write(w, ctypes.c_void_p(address), ctypes.c_size_t(32768))  # stops where memory ends; never faults
    return os.read(r, size) if size > 0 else b''
def scan(start):
    for step in (32768, -32768):
        address, gap = start if step > 0 else start + step, 0
        while gap < 64 and abs(address - start) < 64 << 20 and address > 0:
            if address in seen: break
            seen.add(address)
            data = read(address)
            gap = 0 if data else gap + 1
            for found in PATTERN.findall(data): print(hex(address), found[:12])
            address += step
"""
)

ATTACKS = (
    Attack(
        name="files_left_everywhere",
        point="B9",
        code="""
import os
for path in ('/tmp/x', 'y', '/dev/shm/z', '~/w', '~/.profile', '/tmp/.python_history'):
    try: open(os.path.expanduser(path), 'w').write('left')
    except OSError: pass
""",
    ),
    Attack(
        name="modules_left_where_imports_look",
        point="B9",
        code="""
import os, site, sys
names = ('json', 'random', 'os', 'sitecustomize', 'usercustomize', 'colorsys', '__main__', 'main', 'sandbox')
for folder in ['.', *filter(None, sys.path), site.getusersitepackages()]:
    try: os.makedirs(folder, exist_ok=True)
    except OSError: continue
    for name in names:
        try: open(f'{folder}/{name}.py', 'w').write("raise SystemExit('poisoned')")
        except OSError: pass
    try: open(f'{folder}/x.pth', 'w').write('import os; os._exit(66)')
    except OSError: pass
""",
    ),
    Attack(
        name="interpreter_patched",
        point="B9",
        code="""
import builtins, json, math, os, random, sys, importlib.abc
builtins.print_ = 1
builtins.len = lambda x: 0
json.dumps = math.sqrt = random.random = lambda *_: 0
sys.modules['colorsys'] = None
sys.meta_path.insert(0, importlib.abc.MetaPathFinder())
sys.path_hooks.clear(); sys.path[:] = ['/tmp']; sys.argv = ['hacked']
sys.setrecursionlimit(100000); sys.set_int_max_str_digits(0); sys.setswitchinterval(100)
os.environ.update(PYTHONPATH='/tmp', LD_PRELOAD='/tmp/x.so', HOME='/')
os.putenv('PYTHONSTARTUP', '/tmp/x')
sys.settrace(lambda *_: None)
""",
    ),
    Attack(
        name="shared_objects_changed_in_memory",
        point="B11",
        code="""
import ctypes, json, sys
# whatever memory calls share, a write to it must stay in this call
ctypes.c_uint32.from_address(id(257) + 24)
for number in (5, 7, 250): ctypes.c_uint32.from_address(id(number) + 24).value = 99
text = json.dumps.__code__.co_code
ctypes.memset(id(text) + 32, 0, len(text))
import os; os._exit(0)
""",
    ),
    Attack(
        name="library_code_changed_in_memory",
        point="B11",
        code=SYSCALLS
        + """
address = ctypes.cast(libc.getpid, ctypes.c_void_p).value
if libc.mprotect(ctypes.c_void_p(address & ~4095), ctypes.c_size_t(8192), 7) == 0:
    ctypes.memmove(address, bytes.fromhex('31c0c3') if x86 else bytes.fromhex('00008052c0035fd6'), 3 if x86 else 8)
    assert libc.getpid() == 0
os._exit(0)
""",
    ),
    Attack(
        name="files_of_the_interpreter_changed",
        point="B9",
        code="""
import ctypes, json, mmap, os, sys
for path in (sys.executable, os.__file__, json.__file__, os.path.realpath('/lib64/ld-linux-x86-64.so.2')):
    for how in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
        try: os.close(os.open(path, how)); print('opened', path)
        except OSError: pass
    for what in (os.unlink, lambda p: os.rename(p, p + '.old'), lambda p: os.chmod(p, 0o777), lambda p: os.utime(p),
                 lambda p: os.symlink('/tmp', p + '.link'), lambda p: os.setxattr(p, 'user.x', b'y'),
                 lambda p: os.truncate(p, 0), lambda p: os.chown(p, os.getuid(), -1), lambda p: os.link(p, p + '2')):
        try: what(path); print('changed', path)
        except OSError: pass
""",
    ),
    Attack(name="home_locked", point="B9", code="import os\nos.umask(0o777); os.mkdir('locked'); os.chmod('.', 0)"),
    # a home that no call has touched may be used again: nothing may escape that test
    Attack(name="home_mode_changed_at_once", point="B9", code="import os\nos.chmod('.', 0)"),
    Attack(
        name="home_touched_without_a_trace",
        point="B9",
        code="""
import os
was = os.stat('.')
open('x', 'w').close(); os.unlink('x'); os.mkdir('d'); os.rmdir('d')
try: os.setxattr('.', 'user.left', b'here')
except OSError: pass
os.utime('.', ns=(was.st_atime_ns, was.st_mtime_ns))
""",
    ),
    Attack(
        name="home_used_without_a_name",  # the next call would find the numbers of files used up
        point="B9",
        code=SYSCALLS
        + """
path, flags = ctypes.c_char_p(b'/tmp'), os.O_TMPFILE | os.O_RDWR
for name, number, arguments in (('open', 2, (path, flags, 0o600)),
                                ('openat', 257 if x86 else 56, (-100, path, flags, 0o600)),
                                ('openat2', 437, (-100, path, (ctypes.c_uint64 * 3)(flags, 0o600, 0), 24))):
    if call(number, *arguments) >= 0: print(name)
import tempfile
with tempfile.TemporaryFile() as f: f.write(b'x')  # which does with a name what it cannot without
""",
    ),
    Attack(
        name="home_removed_or_replaced",
        point="B9",
        code="""
import os
for what in (lambda: os.rmdir('/tmp'), lambda: os.rename('/tmp', '/tmp2'), lambda: os.symlink('/', '/tmp'),
             lambda: os.unlink('/dev/shm'), lambda: os.rename('/dev/shm', '/dev/x')):
    try: what(); print('replaced')
    except OSError: pass
""",
    ),
    Attack(
        name="deleted_files_held_by_orphans",
        point="B9",
        code="""
import os, time
f = open('x', 'wb'); os.unlink('x'); f.write(bytes(4 << 20)); f.flush()
if os.fork() == 0:
    os.setsid(); time.sleep(60)
""",
    ),
    Attack(
        name="sources_of_earlier_calls_in_our_memory",
        point="B11",
        code=SCAN
        + """
seen = set()
gc.unfreeze()
starts = {id(thing) & MASK for thing in gc.get_objects()[::50]}
starts |= {ctypes.addressof(ctypes.c_char.in_dll(libc, name)) & MASK for name in ('environ', 'stdout')}
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
starts |= {libc.malloc(ctypes.c_size_t(1 << n)) & MASK for n in range(4, 22, 3)}
starts |= {ctypes.addressof(ctypes.create_string_buffer(16)) & MASK, (libc.sbrk(0) - 65536) & MASK}
for start in sorted(starts): scan(start)
if len(seen) < 50: print('scanned too little')
""",
    ),
    Attack(
        name="sources_of_earlier_calls_in_objects",
        point="B11",
        code="""
import gc, linecache, re, sys
pattern = re.compile('PLANT' + 'ED-[0-9a-f]{16}')
gc.unfreeze()
todo, seen = [*gc.get_objects(), *sys._current_frames().values(), linecache.cache], set()
while todo:
    thing = todo.pop()
    if id(thing) in seen: continue
    seen.add(id(thing))
    if isinstance(thing, (bytes, bytearray)): thing = bytes(thing).decode(errors='replace')
    if isinstance(thing, str):
        if pattern.search(thing): print('found', thing[:100])
    elif len(seen) < 60000:
        todo.extend(gc.get_referents(thing))
""",
    ),
    Attack(
        name="fresh_memory_holds_nothing_old",
        point="B11",
        code="""
import ctypes, mmap, os
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for size in (64, 1024, 65536, 1 << 20):
    for _ in range(20):
        if b'PLANT' + b'ED-' in ctypes.string_at(libc.malloc(ctypes.c_size_t(size)), size): print('found', size)
if mmap.mmap(-1, 1 << 22)[:].strip(b'\\0'): print('dirty pages')
f = open('/tmp/x', 'w+b'); f.truncate(1 << 20)
if f.read().strip(b'\\0'): print('dirty file')
""",
    ),
    Attack(
        name="stdin_beyond_its_end",
        point="B11",
        stdin="mine",
        code="""
import os
try:
    data = os.pread(0, 1 << 20, 0)
    if data != b'mine': print(data)
    if os.fstat(0).st_size != 4: print(os.fstat(0).st_size)
except OSError: pass
try: os.ftruncate(0, 4096); print(os.pread(0, 4096, 4).strip(b'\\0').decode(), end='')
except OSError: pass
""",
    ),
    Attack(
        name="locks_on_files",
        point="B9",
        limits=QUICK,
        code="""
import fcntl, os, sys, time
held = []
for path in (os.__file__, sys.executable, '/dev/null', '/tmp', '.'):
    held.append(os.open(path, os.O_RDONLY))
    try: fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: pass
time.sleep(0.3)
""",
        # locks on the interpreter's own files are seen by all, which share them; nobody's own files are
        beside=(
            """
import fcntl, os, time
end = time.monotonic() + 0.3
open('x', 'w').close()
while time.monotonic() < end:
    for path in ('/tmp/x', '/tmp/y', '/dev/shm/x'):
        with open(path, 'a+') as f: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB); fcntl.lockf(f, 2 | 4)
print('locked')
""",
            "locked\n",
        ),
    ),
    Attack(
        name="watching_what_neighbours_open",
        point="B9",
        code=SYSCALLS
        + """
import time
fd = call(294 if x86 else 26, 0o4000)  # inotify_init1
if fd >= 0 and libc.inotify_add_watch(fd, os.path.dirname(os.__file__).encode(), 0x20) >= 0:
    time.sleep(0.4)
    try: print(os.read(fd, 4096)[:100])
    except BlockingIOError: pass
""",
        beside=(
            """
import os, time
for _ in range(5):
    time.sleep(0.05)
    open(os.__file__).close()
print(1)
""",
            "1\n",
        ),
    ),
    Attack(
        name="names_in_the_abstract_socket_space",
        point="B9",
        code="""
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    try: socket.socket(socket.AF_UNIX, kind).bind('\\0meet'); print('bound')
    except OSError: pass
    try: socket.socket(socket.AF_UNIX, kind).connect('\\0meet'); print('met')
    except OSError: pass
""",
    ),
    Attack(
        name="posix_shared_memory_and_semaphores",
        point="B9",
        code="""
import os
from multiprocessing import shared_memory
block = shared_memory.SharedMemory('rocstar_attack', create=True, size=1 << 20)
block.buf[:4] = b'left'
os._exit(0)  # never unlinked
""",
    ),
    Attack(
        name="priority_of_others_changed",
        point="B10",
        code="""
import os
for which, who in ((os.PRIO_PROCESS, 1), (os.PRIO_PGRP, 1), (os.PRIO_USER, 0)):
    try: os.setpriority(which, who, 19)
    except OSError: pass
try: os.setpriority(os.PRIO_PGRP, 0, 19)
except OSError: pass
""",
    ),
    Attack(
        name="own_priority_raised",
        point="B10",
        code="""
import os
for what in (lambda: os.nice(-5), lambda: os.setpriority(os.PRIO_PROCESS, 0, -20),
             lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
             lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(99))):
    try: what(); print('raised')
    except OSError: pass
""",
    ),
    Attack(
        name="processor_taken_by_many",
        point="B10",
        limits=HANGS,
        code="import os\nfor _ in range(6):\n    try: os.fork()\n    except OSError: pass\nwhile True: pass",
        outcomes=("timeout",),
    ),
    Attack(
        name="other_users_processes_counted_against_us",
        point="B9",
        code="""
import os, signal
pids = []
try:
    for _ in range(8):
        pid = os.fork()
        if pid == 0: signal.pause()
        pids.append(pid)
except OSError as error: print(error, len(pids))
""",
    ),
)
