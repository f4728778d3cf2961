"""System calls that guest code may make: an allow list, by name and number. Standard library only: used in the jail.

Invariants
- A call that is not listed fails with EPERM; one that is newer than this list with ENOSYS, so that libraries fall back.
- No descriptor is sent through a socket: in a circle of them it would outlive the call, with all that is queued there.
- Files are opened by openat, whose flags the outer policy sees.
- In addition the outer policy (policy.kafel) refuses by name, and some listed calls by their arguments.
"""

from __future__ import annotations

import errno
import os

# name: number on x86_64, number on aarch64; None: that architecture does not have the call
_ALLOWED: dict[str, tuple[int | None, int | None]] = {
    # reading and writing
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "preadv": (295, 69),
    "pwritev": (296, 70),
    "preadv2": (327, 286),
    "pwritev2": (328, 287),
    "lseek": (8, 62),
    "copy_file_range": (326, 285),
    "sendfile": (40, 71),
    "splice": (275, 76),
    "tee": (276, 77),
    "fallocate": (285, 47),
    "fadvise64": (221, 223),
    "readahead": (187, 213),
    "sync_file_range": (277, 84),
    "fsync": (74, 82),
    "fdatasync": (75, 83),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    # open files
    "openat": (257, 56),
    "creat": (85, None),
    "close": (3, 57),
    "close_range": (436, 436),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "fcntl": (72, 25),
    "flock": (73, 32),
    "ioctl": (16, 29),
    # files and folders
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "newfstatat": (262, 79),
    "statx": (332, 291),
    "statfs": (137, 43),
    "fstatfs": (138, 44),
    "access": (21, None),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getcwd": (79, 17),
    "chdir": (80, 49),
    "fchdir": (81, 50),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "link": (86, None),
    "linkat": (265, 37),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "umask": (95, 166),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "fgetxattr": (193, 10),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "flistxattr": (196, 13),
    # memory
    "mmap": (9, 222),
    "munmap": (11, 215),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "msync": (26, 227),
    "mincore": (27, 232),
    "madvise": (28, 233),
    "brk": (12, 214),
    "mlock": (149, 228),
    "mlock2": (325, 284),
    "munlock": (150, 229),
    "membarrier": (324, 283),
    # waiting for descriptors
    "select": (23, None),
    "pselect6": (270, 72),
    "poll": (7, None),
    "ppoll": (271, 73),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "eventfd": (284, None),
    "eventfd2": (290, 19),
    "signalfd": (282, None),
    "signalfd4": (289, 74),
    "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86),
    "timerfd_gettime": (287, 87),
    # socket pairs; there are no other sockets
    "socketpair": (53, 199),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "recvmmsg": (299, 243),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "setsockopt": (54, 208),
    "getsockopt": (55, 209),
    # processes and threads
    "clone": (56, 220),
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "kill": (62, 129),
    "tgkill": (234, 131),
    "pidfd_open": (434, 434),
    "prctl": (157, 167),
    "arch_prctl": (158, None),
    "set_tid_address": (218, 96),
    "set_robust_list": (273, 99),
    "get_robust_list": (274, 100),
    "rseq": (334, 293),
    "futex": (202, 98),
    # signals
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137),
    "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132),
    "pause": (34, None),
    "restart_syscall": (219, 128),
    # time
    "nanosleep": (35, 101),
    "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "gettimeofday": (96, 169),
    "time": (201, None),
    "times": (100, 153),
    "alarm": (37, None),
    "getitimer": (36, 102),
    "setitimer": (38, 103),
    # ids and process groups
    "getpid": (39, 172),
    "getppid": (110, 173),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getegid": (108, 177),
    "getresuid": (118, 148),
    "getresgid": (120, 150),
    "getgroups": (115, 158),
    "getpgrp": (111, None),
    "getpgid": (121, 155),
    "getsid": (124, 156),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "capget": (125, 90),
    # the system, limits and scheduling
    "getrandom": (318, 278),
    "uname": (63, 160),
    "sysinfo": (99, 179),
    "getcpu": (309, 168),
    "getrlimit": (97, 163),
    "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    "getrusage": (98, 165),
    "getpriority": (140, 141),
    "setpriority": (141, 140),
    "sched_yield": (24, 124),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
}
CLONE3 = 435  # the same number on every architecture
NEWEST = 461  # numbers above it did not exist when this list was made


def actions(*, session: bool) -> list[tuple[int, int]]:
    """Returns the number line cut into segments: (first number of the segment, what linux.Filter does), ascending.

    session: nobody but its init may wake what is stopped.
    """
    column = 0 if os.uname().machine == "x86_64" else 1
    numbers = {name: numbers[column] for name, numbers in _ALLOWED.items()}
    allowed = set(numbers.values())
    errors = [0 if number in allowed else errno.EPERM for number in range(NEWEST + 1)] + [errno.ENOSYS]
    errors[CLONE3] = errno.ENOSYS  # glibc would not fall back to clone on EPERM
    if session:
        for name, argument in (("kill", 1), ("tgkill", 2)):  # the argument that is the signal
            number = numbers[name]
            assert number is not None
            errors[number] = -argument
    return [(n, error) for n, error in enumerate(errors) if n == 0 or error != errors[n - 1]]
