"""Attacks on the verdict: status, exit code, duration, memory, and what reaches the judges (A1, A2, A5, A7)."""

from __future__ import annotations

from sandbox import Limits

from .record import MIB, SMALL, SYSCALLS, Attack

ATTACKS = (
    Attack(
        name="reports_written_to_every_descriptor",
        point="A1",
        code="""
import os, socket, struct
for fd in range(1024):
    for report in (struct.pack('qqddq', 0, 0, 0, 0, 0), b'ready', bytes(8)):
        try: os.write(fd, report) if fd not in (1, 2) else None
        except OSError: pass
        try: socket.socket(fileno=os.dup(fd)).send(report)
        except OSError: pass
os._exit(9)
""",
        outcomes=("error",),
        exit_code=9,
        stdout=None,
    ),
    Attack(
        name="descriptors_at_birth",
        point="A2",
        code="import os\nfor fd in range(4096):\n    try: os.fstat(fd); print(fd)\n    except OSError: pass",
        stdout="0\n1\n2\n",
    ),
    Attack(
        name="descriptors_through_exec",
        point="A2",
        code="""
import subprocess, sys
look = 'import os\\nfor fd in range(3, 4096):\\n    try: os.fstat(fd); print(fd)\\n    except OSError: pass'
print(subprocess.run([sys.executable, '-c', look], close_fds=False, capture_output=True, text=True).stdout, end='')
""",
    ),
    Attack(
        name="standard_descriptors_are_no_sockets",
        point="A2",
        code="""
import os, stat
for fd in range(3):
    if stat.S_ISSOCK(os.fstat(fd).st_mode): print(fd, 'is a socket')
    if os.ttyname(fd) if os.isatty(fd) else None: print(fd, 'is a terminal')
""",
    ),
    Attack(
        name="empty_stdin_is_at_its_end",
        point="A2",
        code="""
import select, sys
ready, _, _ = select.select([0], [], [], 2)
if not ready: print('stdin hangs')
elif sys.stdin.read(): print('stdin of somebody else')
""",
    ),
    Attack(
        name="standard_streams_replaced",
        point="A5",
        code="""
import io, sys
print('real')
sys.stdout.flush()
sys.stdout, sys.stderr, sys.stdin = io.StringIO(), io.StringIO(), None
sys.__stdout__ = sys.__stderr__ = None
print('lost')
1 / 0
""",
        outcomes=("error",),
        exit_code=1,
        stdout="real\n",
    ),
    Attack(
        name="clocks_patched",
        point="A7",
        code="""
import time
sleep = time.sleep
for name in ('time', 'monotonic', 'perf_counter', 'process_time', 'time_ns', 'monotonic_ns', 'sleep'):
    setattr(time, name, lambda *_: 0)
sleep(0.3)
""",
        check=lambda r: r.wall_s >= 0.3,
    ),
    Attack(
        name="processor_time_of_children",
        point="A7",
        code="""
import os, time
if os.fork() == 0:
    while time.process_time() < 0.3: pass
    os._exit(0)
os.wait()
""",
        check=lambda r: r.cpu_s >= 0.3,
    ),
    Attack(
        name="memory_given_back_before_the_end",
        point="A7",
        code="x = bytearray(b'x') * (200 << 20)\ndel x",
        check=lambda r: r.peak_memory_bytes >= 200 * MIB,
    ),
    Attack(
        name="timeout_pretended_by_signal",
        point="A1",
        code="import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)\nsignal.pause()",
        outcomes=("killed",),
    ),
    Attack(
        name="output_limit_pretended_by_signal",
        point="A1",
        code="import os, signal\nsignal.signal(25, 0)\nos.kill(os.getpid(), signal.SIGXFSZ)\nsignal.pause()",
        outcomes=("killed",),
    ),
    Attack(
        name="memory_limit_pretended_by_sigkill",
        point="A1",
        code="import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()",
        outcomes=("killed",),
    ),
    Attack(
        name="a_real_time_signal_is_never_ok",
        point="A1",
        code="import os, signal\nos.kill(os.getpid(), signal.SIGRTMAX)\nsignal.pause()",
        outcomes=("killed", "memory"),
    ),
    Attack(
        name="timeout_hidden_as_success",
        point="A1",
        limits=Limits(wall_s=30, cpu_s=1, disk_bytes=8 * MIB),
        code="""
import os, signal, time
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while time.process_time() < 1.1: pass
os._exit(0)
""",
        outcomes=("timeout",),
        exit_code=0,
    ),
    Attack(
        name="exit_code_of_many_bits", point="A1", code="import os\nos._exit(256 + 7)", outcomes=("error",), exit_code=7
    ),
    Attack(
        name="exit_patched_away",
        point="A5",
        limits=Limits(wall_s=1, cpu_s=1),
        code="import os, sys\nprint('x', flush=True)\nos._exit = sys.exit = os.abort = os.kill = lambda *_: None",
        outcomes=("ok", "error", "killed", "timeout"),
        stdout=None,
        check=lambda r: r.stdout.startswith("x\n"),
    ),
    Attack(
        name="modules_and_builtins_patched",
        point="A5",
        code="""
import atexit, builtins, gc, os, signal, sys, threading, traceback, types
atexit._run_exitfuncs = threading._shutdown = lambda: print('called by the sandbox')
traceback.print_exception = lambda *_, **__: os._exit(0)
builtins.BaseException = builtins.isinstance = builtins.len = None
sys.modules.clear()
class Hook:
    def __getattr__(self, name): os._exit(0)
sys.modules['os'] = sys.modules['traceback'] = Hook()
raise KeyError('not hidden')
""",
        outcomes=("ok", "error", "killed"),  # its own exit code, whatever it is: but the kernel's word
        stdout=None,
        check=lambda r: (r.outcome == "ok") == (r.exit_code == 0),
    ),
    Attack(
        name="always_equal",
        point="A5",
        code="""
class Equal(int):
    __eq__ = __lt__ = __gt__ = lambda *_: True
    __hash__ = lambda _: 0
raise SystemExit(Equal(5))
""",
        outcomes=("error",),
        exit_code=5,
    ),
    Attack(
        name="the_verdict_in_a_process_that_replaced_us",
        point="A1",
        code="import os, sys\nos.execv(sys.executable, ['nsjail', '-I', '-S', '-c', 'import os; os._exit(3)'])",
        outcomes=("error",),
        exit_code=3,
    ),
    Attack(
        name="control_structures_in_the_frames",
        point="A2",
        code="""
import gc, os, socket, sys
gc.unfreeze()
frame = sys._getframe()
while frame is not None:
    if 'sandbox' in frame.f_globals.get('__name__', ''):
        for value in list(frame.f_locals.values()) + [getattr(frame.f_locals.get('self'), '_control', None)]:
            if isinstance(value, socket.socket) and value.fileno() > 2:
                try: os.fstat(value.fileno()); print('usable', value)
                except OSError: pass
    frame = frame.f_back
for thing in gc.get_objects():
    if isinstance(thing, socket.socket) and thing.fileno() >= 0:
        try: os.fstat(thing.fileno()); print('usable', thing)
        except OSError: pass
""",
    ),
    Attack(
        name="a_leader_that_left_its_threads",
        point="A1",
        code=SYSCALLS
        + """
import threading, time
def late():
    time.sleep(0.2)
    os._exit(6)
threading.Thread(target=late).start()
call(60 if x86 else 93, 0)  # ends this thread only
""",
        outcomes=("error",),
        exit_code=6,
    ),
    Attack(
        name="an_exit_code_from_a_thread",
        point="A1",
        code="import os, threading\nthreading.Thread(target=os._exit, args=(5,)).start()\nwhile True: pass",
        outcomes=("error",),
        exit_code=5,
    ),
    Attack(
        name="an_error_after_the_limit_of_the_file_is_no_success",
        point="A1",
        limits=SMALL,
        code="""
import os, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
try:
    while True: os.write(1, b'x' * 65536)
except OSError: os._exit(1)
""",
        outcomes=("output",),
        stdout="x" * 4096,
        check=lambda r: r.truncated,
    ),
)
