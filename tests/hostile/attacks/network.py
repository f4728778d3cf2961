"""Attacks through sockets: out of the machine, to the machine, to other calls, to the kernel's protocols (D20)."""

from __future__ import annotations

from .record import SYSCALLS, Attack

ATTACKS = (
    Attack(
        name="sockets_by_pairs",
        point="D20",
        code=SYSCALLS
        + """
two = (ctypes.c_int * 2)()
for family in set(range(64)) - {1}: refused(f'pair of family {family}', 53, 199, family, 2, 0, two)
""",
    ),
    Attack(
        name="tcp_out",
        point="D20",
        code="""
import socket
for family, address in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET, '1.1.1.1'), (socket.AF_INET, '169.254.169.254'),
                        (socket.AF_INET, '10.0.0.1'), (socket.AF_INET6, '::1'), (socket.AF_INET6, '2606:4700::1111')):
    for port in (22, 80, 443):
        try:
            s = socket.socket(family); s.settimeout(0.5); s.connect((address, port)); print('connected', address)
        except OSError: pass
""",
    ),
    Attack(
        name="tcp_in",
        point="D20",
        code="""
import socket
for family in (socket.AF_INET, socket.AF_INET6):
    for what in (lambda s: s.bind(('', 0)), lambda s: s.bind(('127.0.0.1', 8080)), lambda s: s.listen()):
        try: what(socket.socket(family)); print('listens')
        except OSError: pass
""",
    ),
    Attack(
        name="datagrams",
        point="D20",
        code="""
import socket
for family, address in ((socket.AF_INET, '1.1.1.1'), (socket.AF_INET, '127.0.0.1'), (socket.AF_INET, '255.255.255.255'),
                        (socket.AF_INET, '224.0.0.1'), (socket.AF_INET6, '::1'), (socket.AF_INET6, 'ff02::1')):
    try:
        s = socket.socket(family, socket.SOCK_DGRAM)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        s.sendto(b'x', (address, 53)); print('sent', address)
    except OSError: pass
    try: s.sendmsg([b'x'], [], 0, (address, 53)); print('sent', address)
    except (OSError, NameError): pass
""",
    ),
    Attack(
        name="names_resolved",
        point="D20",
        code="""
import socket, time
start = time.monotonic()
for name in ('example.com', 'metadata.google.internal'):
    try: print(socket.getaddrinfo(name, 80))
    except OSError: pass
if time.monotonic() - start > 2: print('slow to fail')
""",
    ),
    Attack(
        name="raw_sockets",
        point="D20",
        code="""
import socket
for family, kind, protocol in ((socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_INET, socket.SOCK_DGRAM, 1),
                               (socket.AF_INET, socket.SOCK_RAW, 255), (socket.AF_INET6, socket.SOCK_RAW, 58),
                               (socket.AF_PACKET, socket.SOCK_RAW, 0x300),
                               (socket.AF_PACKET, socket.SOCK_DGRAM, 0x300)):
    try: socket.socket(family, kind, protocol); print(family, kind, protocol)
    except OSError: pass
""",
    ),
    Attack(
        name="netlink",
        point="D20",
        code="""
import socket
for protocol in range(23):
    try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol); print('netlink', protocol)
    except OSError: pass
try: print(socket.if_nameindex())
except OSError: pass
""",
    ),
    Attack(
        name="odd_families",
        point="E22",
        code="""
import socket
# a family that a kernel does not have is refused by any means
for family in sorted(set(range(46)) - {1, 2, 10}):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        try: socket.socket(family, kind); print('family', family, kind)
        except OSError: pass
""",
    ),
    Attack(
        name="odd_protocols",
        point="E22",
        code="""
import socket
for kind, protocol in ((socket.SOCK_STREAM, 132), (socket.SOCK_SEQPACKET, 132), (socket.SOCK_STREAM, 262),
                       (socket.SOCK_DGRAM, 136), (6, 33), (socket.SOCK_STREAM, 256)):  # sctp mptcp udplite dccp smc
    try: socket.socket(socket.AF_INET, kind, protocol); print(kind, protocol)
    except OSError: pass
""",
    ),
    Attack(
        name="unix_sockets_of_the_machine",
        point="D20",
        code="""
import os, socket
for path in ('/run/docker.sock', '/var/run/docker.sock', '/run/dbus/system_bus_socket', '/dev/log', '/tmp/.X11-unix/X0',
             '/run/systemd/private', '\\0/tmp/.X11-unix/X0', '\\0docker'):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        try: socket.socket(socket.AF_UNIX, kind).connect(path); print('connected', path)
        except OSError: pass
""",
    ),
    Attack(
        # in a circle they outlive the call, until the kernel looks for such: what is queued in them is counted against
        # the next call's memory, and they among those that it may send
        name="descriptors_sent_to_ourselves",
        point="B9",
        code=SYSCALLS
        + """
import array, socket
a, b = socket.socketpair()
def send(kind, what):
    try: a.sendmsg([b'x'], [(socket.SOL_SOCKET, kind, array.array('i', what))]); print('sent', what)
    except OSError: pass
send(socket.SCM_RIGHTS, [b.fileno()])
send(socket.SCM_RIGHTS, [0, 1, 2])
for pid in (1, 2, 0): send(2, [pid, 0, 0])  # credentials of another process
message = (ctypes.c_uint64 * 8)()
refused('sendmsg', 46, 211, a.fileno(), message, 0)
refused('sendmmsg', 307, 269, a.fileno(), message, 1, 0)
""",
    ),
    Attack(
        name="interfaces_set_up",
        point="D20",
        code="""
import fcntl, socket, struct
try: s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
except OSError: s, _ = socket.socketpair()
for request in (0x8914, 0x8916, 0x890B, 0x89A0, 0x8924):  # flags, address, route, bridge, hardware address
    try: fcntl.ioctl(s, request, struct.pack('16sH22x', b'lo', 1)); print(hex(request))
    except OSError: pass
""",
    ),
    Attack(
        name="packet_filters_of_the_kernel",
        point="E22",
        code=SYSCALLS
        + """
import socket
for family in (socket.AF_INET, socket.AF_INET6):
    try: s = socket.socket(family, socket.SOCK_DGRAM)
    except OSError: continue
    for level, name in ((0, 64), (0, 65), (41, 64), (0, 200), (6, 31)):  # iptables and relatives
        try: s.setsockopt(level, name, bytes(1024)); print('set', level, name)
        except OSError: pass
""",
    ),
    Attack(
        name="sockets_bound_for_the_next_call",
        point="B9",
        code="""
import os, socket, time
for family, address in ((socket.AF_INET, ('127.0.0.1', 5555)), (socket.AF_UNIX, '/tmp/s'), (socket.AF_UNIX, '\\0s')):
    try:
        s = socket.socket(family); s.bind(address); s.listen(); print('listens', address)
    except OSError: pass
if os.fork() == 0: time.sleep(60)
""",
    ),
)
