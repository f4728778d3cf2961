"""Attacks on the kernel: system calls that no honest program needs are refused, whatever their arguments (E22)."""

from __future__ import annotations

from .record import QUICK, SYSCALLS, Attack


def calls(name: str, code: str, point: str = "E22") -> Attack:
    return Attack(name=name, point=point, code=SYSCALLS + code, limits=QUICK)


MACHINE_CODE = (
    SYSCALLS
    + """
import mmap
def run(code):
    page = mmap.mmap(-1, 4096, prot=7)
    page.write(bytes.fromhex(code))
    return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
"""
)

ATTACKS = (
    calls(
        "tracing",
        """
refused('PTRACE_TRACEME', 101, 117, 0, 0, 0, 0)
pid = os.fork()
if pid == 0:
    import time; time.sleep(60)
refused('PTRACE_ATTACH', 101, 117, 16, pid, 0, 0)
refused('PTRACE_SEIZE', 101, 117, 0x4206, pid, 0, 0)
os.kill(pid, 9)
""",
    ),
    calls(
        "memory_of_other_processes",
        """
buffer = ctypes.create_string_buffer(64)
iov = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 64)
for pid in (1, os.getpid()):
    refused('process_vm_readv', 310, 270, pid, iov, 1, iov, 1, 0)
    refused('process_vm_writev', 311, 271, pid, iov, 1, iov, 1, 0)
refused('process_madvise', 440, 440, 0, iov, 1, 4, 0)
refused('kcmp', 312, 272, os.getpid(), os.getpid(), 0, 0, 1)
refused('process_mrelease', 448, 448, 0, 0)
""",
    ),
    calls(
        "descriptors_of_other_processes",
        """
for pid in (1, os.getppid(), os.getpid()):
    fd = call(434, pid, 0)
    if fd >= 0: refused(f'pidfd_getfd of {pid}', 438, 438, fd, 0, 0); os.close(fd)
refused('pidfd_getfd', 438, 438, 0, 0, 0)
""",
    ),
    calls(
        "signals_through_descriptors",
        """
for pid in range(1, os.getpid()):
    fd = call(434, pid, 0)
    if fd >= 0:
        for number in (9, 19): call(424, fd, number, None, 0)
""",
    ),
    calls(
        "keyrings",
        """
for ring in range(-8, 0): refused(f'keyctl {ring}', 250, 219, 0, ring, 1)
name = ctypes.c_char_p(b'rocstar_attack')
refused('add_key', 248, 217, ctypes.c_char_p(b'user'), name, ctypes.c_char_p(b'secret'), 6, -4)
refused('request_key', 249, 218, ctypes.c_char_p(b'user'), name, None, -4)
refused('join session', 250, 219, 1, name)
""",
        "B9",
    ),
    calls(
        "system_v_shared_memory",
        """
refused('shmget', 29, 194, 0x5eed, 4096, 0o1666)
refused('shmget private', 29, 194, 0, 4096, 0o1600)
refused('shmat', 30, 196, 0, 0, 0)
refused('shmctl', 31, 195, 0, 2, ctypes.create_string_buffer(256))
""",
        "B9",
    ),
    calls(
        "system_v_semaphores_and_messages",
        """
refused('semget', 64, 190, 0x5eed, 1, 0o1666)
refused('semop', 65, 193, 0, ctypes.create_string_buffer(6), 1)
refused('msgget', 68, 186, 0x5eed, 0o1666)
refused('msgsnd', 69, 189, 0, ctypes.create_string_buffer(64), 8, 0o4000)
refused('msgrcv', 70, 188, 0, ctypes.create_string_buffer(64), 8, 0, 0o4000)
""",
        "B9",
    ),
    calls(
        "posix_message_queues",
        """
refused('mq_open', 240, 180, ctypes.c_char_p(b'rocstar_attack'), 0o102, 0o666, None)
refused('mq_unlink', 241, 181, ctypes.c_char_p(b'rocstar_attack'))
""",
        "B9",
    ),
    calls(
        "bpf",
        """
attributes = ctypes.create_string_buffer((2).to_bytes(4, 'little') + (4).to_bytes(4, 'little') * 3 + bytes(112))
refused('map', 321, 280, 0, attributes, 120)
refused('program', 321, 280, 5, attributes, 120)
refused('ids', 321, 280, 11, attributes, 120)
""",
    ),
    calls(
        "performance_counters",
        """
attributes = ctypes.create_string_buffer((1).to_bytes(4, 'little') + (112).to_bytes(4, 'little') + bytes(120))
refused('own', 298, 241, attributes, 0, -1, -1, 0)
refused('all', 298, 241, attributes, -1, 0, -1, 0)
""",
    ),
    calls(
        "user_page_faults",
        "refused('userfaultfd', 323, 282, 0o2000000)\nrefused('user mode', 323, 282, 0o2000001)\n",
    ),
    calls(
        "io_uring",
        """
parameters = ctypes.create_string_buffer(256)
refused('setup', 425, 425, 8, parameters)
refused('enter', 426, 426, 0, 1, 0, 0, 0, 0)
refused('register', 427, 427, 0, 0, 0, 0)
""",
    ),
    calls(
        "asynchronous_io",
        """
context = ctypes.c_ulong(0)
refused('io_setup', 206, 0, 128, ctypes.byref(context))
""",
    ),
    calls(
        "mount_by_the_old_calls",
        """
text = lambda s: ctypes.c_char_p(s)
refused('tmpfs', 165, 40, text(b'x'), text(b'/tmp'), text(b'tmpfs'), 0, None)
refused('bind', 165, 40, text(b'/'), text(b'/tmp'), None, 4096, None)
refused('remount', 165, 40, text(b'none'), text(b'/'), None, 32, None)
refused('proc', 165, 40, text(b'proc'), text(b'/tmp'), text(b'proc'), 0, None)
refused('umount', 166, 39, text(b'/tmp'), 2)
refused('pivot_root', 155, 41, text(b'/tmp'), text(b'/tmp'))
refused('chroot', 161, 51, text(b'/tmp'))
""",
    ),
    calls(
        "mount_by_the_new_calls",
        """
fs = call(430, ctypes.c_char_p(b'tmpfs'), 0)
if fs >= 0: print('fsopen')
refused('fsconfig', 431, 431, 0, 6, 0, 0, 0)
refused('fsmount', 432, 432, 0, 0, 0)
refused('fspick', 433, 433, -100, ctypes.c_char_p(b'/'), 0)
refused('open_tree', 428, 428, -100, ctypes.c_char_p(b'/tmp'), 1)
refused('move_mount', 429, 429, -100, ctypes.c_char_p(b'/tmp'), -100, ctypes.c_char_p(b'/dev'), 0)
refused('mount_setattr', 442, 442, -100, ctypes.c_char_p(b'/tmp'), 0, ctypes.create_string_buffer(32), 32)
""",
    ),
    calls(
        "mounts_listed",
        """
request = (ctypes.c_uint64 * 8)(24, 0xFFFFFFFFFFFFFFFF, 1)
refused('listmount', 458, 458, request, ctypes.create_string_buffer(4096), 128, 0)
refused('statmount', 457, 457, request, ctypes.create_string_buffer(4096), 4096, 0)
""",
    ),
    calls(
        "namespaces_by_unshare",
        """
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x80, 0x10020000):
    refused(f'unshare {flag:#x}', 272, 97, flag)
""",
    ),
    calls(
        "namespaces_by_clone",
        """
for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x10020000):
    pid = call(56 if x86 else 220, flag | 17, 0, 0, 0, 0)
    if pid == 0: os._exit(0)
    if pid > 0: print(f'clone {flag:#x}')
arguments = (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17)
if (pid := call(435, arguments, 88)) == 0: os._exit(0)
if pid > 0: print('clone3')
""",
    ),
    calls(
        "namespaces_joined",
        """
for pid in (1, os.getpid()):
    fd = call(434, pid, 0)
    for flag in (0, 0x20000, 0x10000000, 0x20000000, 0x40000000):
        refused(f'setns {flag:#x}', 308, 268, max(fd, 0), flag)
""",
    ),
    calls(
        "personality",
        """
for persona in (0x0040000, 0x0400000, 0x0100000, 0x0008, 0x4000000):
    refused(f'personality {persona:#x}', 135, 92, persona)
""",
    ),
    calls(
        "files_by_handle",
        """
handle = ctypes.create_string_buffer((128).to_bytes(4, 'little') + bytes(256))
mount = ctypes.c_int(0)
refused('name_to_handle_at', 303, 264, -100, ctypes.c_char_p(b'/'), handle, ctypes.byref(mount), 0)
refused('open_by_handle_at', 304, 265, 0, handle, 0)
""",
    ),
    calls(
        "notification_of_all_files",
        "refused('fanotify_init', 300, 262, 0, 0)\nrefused('unprivileged', 300, 262, 0x200, 0)\n",
    ),
    calls(
        "anonymous_executables",
        """
refused('memfd_create', 319, 279, ctypes.c_char_p(b'x'), 0)
refused('memfd_create sealed', 319, 279, ctypes.c_char_p(b'x'), 3)
refused('memfd_secret', 447, 447, 0)
""",
    ),
    calls(
        "memory_policy",
        """
nodes = ctypes.c_ulong(1)
refused('mbind', 237, 235, 0, 4096, 1, ctypes.byref(nodes), 64, 0)
refused('set_mempolicy', 238, 237, 1, ctypes.byref(nodes), 64)
refused('migrate_pages', 256, 238, 0, 64, ctypes.byref(nodes), ctypes.byref(nodes))
refused('move_pages', 279, 239, 0, 0, 0, 0, 0, 0)
""",
    ),
    calls(
        "priority_of_input_and_output",
        "refused('real time', 251, 30, 1, 0, 0x2000)\nrefused('idle, of a group', 251, 30, 2, 0, 0x6000)\n",
    ),
    calls(
        "deadline_scheduling",
        """
attributes = ctypes.create_string_buffer(48)
ctypes.memmove(attributes, (48).to_bytes(4, 'little') + (6).to_bytes(4, 'little') + bytes(16)
               + b''.join(n.to_bytes(8, 'little') for n in (10 ** 7, 3 * 10 ** 7, 3 * 10 ** 7)), 48)
refused('deadline', 314, 274, 0, attributes, 0)
parameter = ctypes.c_int(1)
refused('fifo', 144, 119, 0, 1, ctypes.byref(parameter))
refused('of another', 144, 119, 1, 0, ctypes.byref(ctypes.c_int(0)))
""",
    ),
    calls(
        "old_doors",
        """
refused('modify_ldt', 154, None, 0, ctypes.create_string_buffer(64), 64)
refused('remap_file_pages', 216, 234, 0, 0, 0, 0, 0)
refused('vmsplice', 278, 75, 1, 0, 0, 0)
refused('lookup_dcookie', 212, 18, 0, 0, 0)
refused('uselib', 134, None, ctypes.c_char_p(b'/x'))
refused('ustat', 136, None, 0, ctypes.create_string_buffer(64))
refused('sysfs', 139, None, 3)
""",
    ),
    calls(
        "new_doors",
        """
refused('lsm_list_modules', 461, 461, ctypes.create_string_buffer(256), ctypes.byref(ctypes.c_uint32(256)), 0)
refused('landlock', 444, 444, None, 0, 1)
refused('quotactl_fd', 443, 443, 0, 0, 0, 0)
refused('cachestat', 451, 451, 0, ctypes.create_string_buffer(64), ctypes.create_string_buffer(64), 0)
refused('futex_waitv', 449, 449, 0, 0, 0, 0, 0)
""",
    ),
    calls(
        "filters_that_listen",
        """
import struct
body = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 1, ctypes.addressof(body)))
refused('listener', 317, 277, 1, 8, program)
""",
    ),
    calls(
        "own_filter_that_allows_all",
        """
import struct
body = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7FFF0000))
program = ctypes.create_string_buffer(struct.pack('HxxxxxxQ', 1, ctypes.addressof(body)))
libc.prctl(22, ctypes.c_ulong(2), program, 0, 0)
refused('unshare', 272, 97, 0x10000000)
refused('ptrace', 101, 117, 0, 0, 0, 0)
refused('mount', 165, 40, ctypes.c_char_p(b'x'), ctypes.c_char_p(b'/tmp'), ctypes.c_char_p(b'tmpfs'), 0, None)
""",
    ),
    calls(
        "switches_of_the_process",
        """
libc.prctl(4, 1, 0, 0, 0)  # dumpable
libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # anybody may trace
for what, arguments in (('memory map', (35, 8, 4096, 0, 0)), ('exe file', (35, 13, 0, 0, 0)),
                        ('securebits', (28, 0x2F, 0, 0, 0)),
                        ('bounding set', (24, 21, 0, 0, 0)), ('seccomp off', (22, 0, 0, 0, 0)),
                        ('core scheduling', (62, 1, 1, 0, 0))):
    if libc.prctl(*[ctypes.c_ulong(a) for a in arguments]) == 0: print(what)
refused('ptrace', 101, 117, 0, 0, 0, 0)
""",
    ),
    Attack(
        name="calls_of_32_bits",
        point="E22",
        # mov eax, 20 (getpid); int 0x80; ret
        code=MACHINE_CODE + "if x86 and run('b814000000cd80c3') > 0: print('int 0x80', flush=True)\n",
        outcomes=("ok", "killed"),
    ),
    Attack(
        name="ptrace_by_32_bits",
        point="E22",
        # mov eax, 26 (ptrace); xor ebx, ebx; int 0x80; ret - rbx is saved
        code=MACHINE_CODE + "if x86 and run('53b81a00000031dbcd805bc3') >= 0: print('traced', flush=True)\n",
        outcomes=("ok", "killed"),
    ),
    Attack(
        name="calls_of_x32",
        point="E22",
        code=SYSCALLS
        + """
if x86:
    for number in (39, 521, 539, 101):
        if call(0x40000000 | number, 0, 0, 0, 0) > 0: print('x32', number, flush=True)
""",
        outcomes=("ok", "killed"),
    ),
    Attack(
        name="the_page_at_zero",
        point="E22",
        code=SYSCALLS
        + """
libc.mmap.restype = ctypes.c_void_p
if libc.mmap(None, ctypes.c_size_t(4096), 3, 0x32, -1, 0) in (0, None): print('mapped')
""",
    ),
)
