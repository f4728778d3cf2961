"""Puts a program into a situation that a machine may have: `python sandbox_situations.py SITUATION program ...`

drop:21,...  capabilities by number, or drop:all
filter       a seccomp filter as container engines have it by default: no new namespaces, no mounts
limits       less memory to lock, fewer waiting signals and descriptors than a call is given
inherited    a umask that gives others nothing, and dead children that nobody waits for
closed       neither standard input nor error
full-userns  no further user namespaces (a limit on their number, in a namespace of its own)
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from pathlib import Path

PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 24, 22, 38
CLONE_NEWUSER = 0x10000000
LOAD, EQUAL, ANY_BIT, GIVE = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE, NO_SUCH_CALL = 0x7FFF0000, 0x50001, 0x50026  # EPERM, ENOSYS
REFUSED = {"x86_64": (272, 308, 165, 166, 56), "aarch64": (97, 268, 40, 39, 220)}  # unshare setns mount umount2, clone
ANY_NAMESPACE = 0x7E020000

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def drop(names: str) -> None:
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for number in range(last + 1) if names == "all" else map(int, names.split(",")):
        checked(libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0))


def install_filter() -> None:
    *calls, clone = REFUSED[os.uname().machine]
    code = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, 435), (GIVE, 0, 0, NO_SUCH_CALL)]  # clone3
    for number in calls:
        code += [(EQUAL, 0, 1, number), (GIVE, 0, 0, REFUSE)]
    code += [(EQUAL, 0, 3, clone), (LOAD, 0, 0, 16), (ANY_BIT, 0, 1, ANY_NAMESPACE), (GIVE, 0, 0, REFUSE)]
    code += [(GIVE, 0, 0, ALLOW)]
    body = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(code), ctypes.addressof(body)))
    checked(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


def fill_user_namespaces() -> None:
    uid, gid = os.geteuid(), os.getegid()
    checked(libc.unshare(CLONE_NEWUSER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


def main() -> None:
    situation, *program = sys.argv[1:]
    kind, _, what = situation.partition(":")
    if kind == "drop":
        drop(what)
    elif kind == "filter":
        install_filter()
    elif kind == "limits":
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (32768, 32768))
        resource.setrlimit(resource.RLIMIT_SIGPENDING, (500, 500))
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
    elif kind == "inherited":
        os.umask(0o077)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    elif kind == "closed":
        os.close(0)
        os.close(2)
    elif kind == "full-userns":
        fill_user_namespaces()
    else:
        sys.exit(f"no such situation: {situation}")
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
