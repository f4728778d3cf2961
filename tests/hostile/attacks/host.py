"""Attacks on the machine: its files, devices, identity, rights and limits (D18, D19, D21)."""

from __future__ import annotations

import resource

from .record import QUICK, SYSCALLS, Attack

CORE_LIMIT = min(1, resource.getrlimit(resource.RLIMIT_CORE)[1] % (1 << 64))  # 1 where this machine allows it

ATTACKS = (
    Attack(
        name="files_of_the_machine",
        point="D18",
        code="""
import os
for path in ('/etc', '/etc/passwd', '/root/.ssh', '/root/.cache', '/root/.bashrc', '/home',
             '/var', '/run', '/boot', '/srv', '/mnt', '/media',
             '/var/run/docker.sock', '/usr/share', '/.dockerenv', '/lost+found', '/tmp/.X11-unix'):
    if os.path.lexists(path): print(path)
""",
    ),
    Attack(
        name="proc_and_sys",
        point="D18",
        code="""
import os
for path in ('/proc', '/proc/self/mem', '/proc/1/root', '/proc/self/environ', '/proc/kcore', '/sys', '/sys/fs/cgroup',
             '/sys/kernel/debug', '/proc/sysrq-trigger'):
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)): print(path)
""",
    ),
    Attack(
        name="out_by_the_parent_folder",
        point="D18",
        code="""
import os
for _ in range(64): os.chdir('..')
for path in ('etc', '../../../../etc', '/tmp/../../etc', '/dev/shm/../../etc', '/usr/../etc', '/lib/../../etc/passwd'):
    if os.path.exists(path): print(path)
try:
    fd = os.open('/', os.O_PATH)
    for _ in range(8): fd = os.open('..', os.O_PATH, dir_fd=fd)
    os.stat('etc/passwd', dir_fd=fd); print('out')
except OSError: pass
""",
    ),
    Attack(
        name="out_by_chroot",
        point="D18",
        code="""
import os
os.mkdir('jail')
for root in ('jail', '/'):
    try: os.chroot(root); print('chroot', root)
    except OSError: pass
for _ in range(32): os.chdir('..')
try: os.chroot('.'); print('chroot')
except OSError: pass
""",
    ),
    Attack(
        name="secrets_and_graders_among_the_files",
        point="D18",
        code="""
import os
words = ('reward', 'grade', 'answer', '.git', '.ssh', 'shadow', 'id_rsa', '.env',
         'credential', 'token', '.aws', 'secret')
for root, folders, files in os.walk('/'):
    depth = root.count('/')
    folders[:] = [f for f in folders if depth < 3 and f not in ('proc', 'sys')]
    if 'python' in root or 'packages' in root or root.startswith(('/usr/', '/lib', '/bin')): continue  # of the system
    for name in (*folders, *files):
        if any(word in name for word in words): print(root, name)
""",
    ),
    Attack(
        name="the_sandboxs_own_modules",
        point="D18",
        code="""
import sys
for name in ('sandbox', 'engine', 'algo', 'recipes', 'zygote', 'guest', 'slot'):
    try: __import__(name); print('imported', name)
    except ImportError: pass
print(*[name for name in sys.modules if name.partition('.')[0] in ('sandbox', 'zygote', 'guest')], sep='', end='')
""",
    ),
    Attack(
        name="a_tree_that_can_be_written",
        point="D18",
        code="""
import os
for path in ('/', '/usr', '/usr/lib', '/dev', '/opt', '/lib64', '/bin', os.path.dirname(os.__file__)):
    try: open(os.path.join(path, 'attack_was_here'), 'w'); print('wrote', path)
    except OSError: pass
    try: os.mkdir(os.path.join(path, 'attack_was_here')); print('made', path)
    except OSError: pass
for path in ('/tmp/attack_was_here', '/dev/shm/attack_was_here'): open(path, 'w').close()
""",
    ),
    Attack(
        name="devices",
        point="D18",
        code="""
import os
for name in sorted(set(os.listdir('/dev')) - {'null', 'zero', 'full', 'random', 'urandom',
                   'shm', 'fd', 'stdin', 'stdout', 'stderr'}):
    print(name)
for name in ('mem', 'kmsg', 'tty', 'ptmx', 'net/tun', 'fuse', 'kvm', 'loop-control',
             'sda', 'vda', 'vsock', 'vhost-net', 'nvidia0'):
    try: os.open('/dev/' + name, os.O_RDWR); print('opened', name)
    except OSError: pass
""",
    ),
    Attack(
        name="devices_changed",
        point="D18",
        code="""
import fcntl, os
for path in ('/dev/null', '/dev/urandom', '/dev/zero'):
    for what in (lambda p: os.chmod(p, 0), lambda p: os.utime(p, (0, 0)), lambda p: os.unlink(p),
                 lambda p: os.chown(p, os.getuid(), -1), lambda p: os.setxattr(p, 'user.x', b'y'),
                 lambda p: os.rename(p, p + 'x'), lambda p: os.truncate(p, 0)):
        try: what(path); print('changed', path) if what.__code__.co_names[1] != 'truncate' else None
        except OSError: pass
try: fcntl.ioctl(os.open('/dev/urandom', os.O_RDWR), 0x5206); print('entropy cleared')  # RNDCLEARPOOL
except OSError: pass
""",
    ),
    Attack(
        name="device_nodes_made",
        point="D18",
        code="""
import os, stat
for kind, device in ((stat.S_IFCHR, (1, 1)), (stat.S_IFBLK, (8, 0)), (stat.S_IFBLK, (254, 0)), (stat.S_IFCHR, (5, 0))):
    for folder in ('/tmp', '/dev'):
        try: os.mknod(f'{folder}/n', kind | 0o666, os.makedev(*device)); print('made', device)
        except OSError: pass
""",
    ),
    Attack(
        name="environment",
        point="D19",
        code="""
import os
known = {'HOME', 'LANG', 'PATH', 'PYTHONDONTWRITEBYTECODE', 'OPENBLAS_NUM_THREADS', 'OMP_NUM_THREADS', 'LC_CTYPE',
         'PYTHONHASHSEED', 'MKL_NUM_THREADS', 'TMPDIR', 'USER', 'TZ', 'LC_ALL'}
if set(os.environ) - known: print(sorted(set(os.environ) - known))
""",
    ),
    Attack(
        name="environment_below_python",
        point="D19",
        code="""
import ctypes
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')
n = 0
while environ[n]:
    if environ[n].partition(b'=')[0].startswith((b'SSH', b'AWS', b'HF_', b'WANDB', b'PYTEST', b'SUDO', b'PWD', b'OLD')):
        print(environ[n])
    n += 1
""",
    ),
    Attack(
        name="name_of_the_machine",
        point="D19",
        code="import os, socket\nprint(os.uname().nodename, socket.gethostname())",
        stdout="sandbox sandbox\n",
    ),
    Attack(
        name="identity_of_root",
        point="D21",
        code="""
import os
if 0 in os.getresuid() + os.getresgid(): print(os.getresuid(), os.getresgid())
if set(os.getgroups()) & {0, 1, 2, 3, 4, 5, 6}: print(os.getgroups())
for what in (lambda: os.setresuid(0, 0, 0), lambda: os.setuid(0), lambda: os.seteuid(0), lambda: os.setresgid(0, 0, 0),
             lambda: os.setgroups([0]), lambda: os.setreuid(-1, 1), lambda: os.initgroups('root', 0)):
    try: what(); print('became', os.getresuid(), os.getresgid())
    except OSError: pass
""",
    ),
    Attack(
        name="identity_of_another_slot",
        point="B9",
        code="""
import os
own = os.getuid()
for uid in {*range(own - 8, own + 9), 1000, 1001, 65534} - {own}:
    for what in (lambda: os.setuid(uid), lambda: os.setresgid(uid, uid, uid)):
        try: what(); print('became', uid)
        except (OSError, OverflowError): pass
""",
    ),
    Attack(
        name="file_system_ids",
        point="D21",
        code=SYSCALLS
        + """
libc.setfsuid(0); libc.setfsgid(0)
if libc.setfsuid(-1) == 0 or libc.setfsgid(-1) == 0: print('file system id of root')
""",
    ),
    Attack(
        name="capabilities",
        point="D21",
        code=SYSCALLS
        + """
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
if libc.capget(header, data) == 0 and any(data): print(list(data))
full = (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 6)
refused('capset', 126, 91, header, full)
for number in range(41):
    if libc.prctl(47, 1, number, 0, 0) == 1: print('ambient', number)
    if libc.prctl(47, 2, number, 0, 0) == 0: print('raised', number)
if libc.prctl(39, 0, 0, 0, 0) not in (1, -1): print('no_new_privs is off')
if libc.prctl(38, 0, 0, 0, 0) == 0: print('no_new_privs taken back')
if libc.prctl(28, 1, 0, 0, 0) == 0: print('securebits')
""",
    ),
    Attack(
        name="set_user_id_programs",
        point="D21",
        code="""
import os, stat
for folder in ('/bin', '/sbin', '/usr/bin', '/usr/sbin', '/usr/lib', '/lib'):
    for root, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if 'python' not in f and root.count('/') < 4]
        for name in files:
            try: mode = os.lstat(os.path.join(root, name)).st_mode
            except OSError: continue
            if mode & (stat.S_ISUID | stat.S_ISGID) and not os.statvfs(root).f_flag & os.ST_NOSUID: print(root, name)
""",
    ),
    Attack(
        name="a_set_user_id_program_made",
        point="D21",
        code="""
import os, sys
with open(os.path.realpath(sys.executable), 'rb') as source, open('p', 'wb') as p: p.write(source.read(1 << 20))
os.chmod('p', 0o6755)
if not os.statvfs('/tmp').f_flag & os.ST_NOSUID: print('set-user-id counts in /tmp')
if not os.statvfs('/tmp').f_flag & os.ST_NODEV: print('devices count in /tmp')
try:
    os.setxattr('p', 'security.capability', bytes.fromhex('0100000200000020' + 24 * '0'))
    print('file capability')
except OSError: pass
""",
    ),
    Attack(
        name="limits_raised",
        point="D21",
        code="""
import os, resource
for name in [n for n in dir(resource) if n.startswith('RLIMIT_')]:
    kind = getattr(resource, name)
    soft, hard = resource.getrlimit(kind)
    if hard == resource.RLIM_INFINITY: continue
    for new in ((hard + 1, hard + 1), (resource.RLIM_INFINITY,) * 2):
        try: resource.setrlimit(kind, new)
        except (OSError, ValueError): pass
        if resource.getrlimit(kind) != (soft, hard): print('raised', name)
        try: resource.prlimit(1, kind, new); print('raised for others', name)
        except (OSError, ValueError): pass
""",
    ),
    Attack(
        name="limits_that_must_be_there",
        point="D21",
        limits=QUICK,
        code="""
import resource
most = {'CPU': 11, 'FSIZE': 8 << 20, 'NOFILE': 256, 'CORE': 1, 'MEMLOCK': 1 << 16, 'AS': 8 << 30, 'NPROC': 16,
        'SIGPENDING': 1024, 'MSGQUEUE': 0}
for name, value in most.items():
    if not 0 <= resource.getrlimit(getattr(resource, 'RLIMIT_' + name))[1] <= value: print(name)
""",
    ),
    Attack(
        # to a program (systemd-coredump, apport) the kernel gives the dump of each process whose limit is not 1: run
        # as root, outside, on what the process chose to hold
        name="core_dumps",
        point="D18",
        code=f"""
import os, resource
limit = ({CORE_LIMIT}, {CORE_LIMIT})
for new in (limit, (0, 0), (0, 1), (1 << 30, 1 << 30)):
    for change in (lambda: resource.setrlimit(resource.RLIMIT_CORE, new),
                   lambda: resource.prlimit(0, resource.RLIMIT_CORE, new),
                   lambda: resource.prlimit(os.getpid(), resource.RLIMIT_CORE, new)):
        try: change()
        except (OSError, ValueError): pass
        if resource.getrlimit(resource.RLIMIT_CORE) != limit: print(resource.getrlimit(resource.RLIMIT_CORE))
if os.fork() == 0: os.abort()
_, status = os.wait()
if os.WCOREDUMP(status) or os.listdir('.') != ['main.py']: print('dumped')
""",
    ),
    Attack(
        name="the_clock_of_the_machine",
        point="D21",
        code=SYSCALLS
        + """
now = (ctypes.c_long * 2)(1, 0)
refused('settimeofday', 164, 170, now, 0)
refused('clock_settime', 227, 112, 0, now)
tx = ctypes.create_string_buffer(bytes([1]) + bytes(255))
refused('adjtimex', 159, 171, tx)
refused('clock_adjtime', 305, 266, 0, tx)
""",
    ),
    Attack(
        name="the_name_of_the_machine_changed",
        point="D21",
        code=SYSCALLS
        + """
refused('sethostname', 170, 161, ctypes.c_char_p(b'hacked'), 6)
refused('setdomainname', 171, 162, ctypes.c_char_p(b'hacked'), 6)
if os.uname().nodename == 'hacked': print('renamed')
""",
    ),
    Attack(
        name="the_machine_halted",
        point="D21",
        code=SYSCALLS
        + """
refused('reboot', 169, 142, 0xFEE1DEAD, 672274793, 0)  # only switches Ctrl-Alt-Del off, if allowed
refused('swapoff', 168, 225, ctypes.c_char_p(b'/nonesuch'))
refused('swapon', 167, 224, ctypes.c_char_p(b'/nonesuch'), 0)
refused('acct', 163, 89, ctypes.c_char_p(b'/nonesuch'))
refused('quotactl', 179, 60, 0x80000100, 0, 0, 0)
refused('vhangup', 153, 58)
refused('syslog', 103, 116, 10, 0, 0)
""",
    ),
    Attack(
        name="modules_and_kernels_loaded",
        point="D21",
        code=SYSCALLS
        + """
refused('init_module', 175, 105, 0, 0, 0)
refused('finit_module', 313, 273, 0, ctypes.c_char_p(b''), 0)
refused('delete_module', 176, 106, ctypes.c_char_p(b'nonesuch'), 0)
refused('kexec_load', 246, 104, 0, 0, 0, 0)
refused('iopl', 172, None, 3)
refused('ioperm', 173, None, 0x80, 1, 1)
""",
    ),
)
