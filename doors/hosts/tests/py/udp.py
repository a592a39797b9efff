"""Two ends that use a UDP socket in every way, and print what they see: the same whatever carries the datagrams.

udp.py server PORT READY | client HOST PORT READY

They exchange datagrams until the file READY is there, and print nothing of these.
"""

import array
import errno
import fcntl
import hashlib
import os
import select
import socket
import struct
import sys
import termios

SIZES = [0, 1, 2, 14, 500, 1400, 1436, 1437, 1452, 1472, 1473, 4096, 4097, 9000, 30000, 65000, 65408, 65409, 65487]
LIMIT = 20
# Names that Python does not have.
IP_PKTINFO, IP_RECVTTL, SO_TIMESTAMP = 8, 12, 29


def content(n):
    return (hashlib.sha256(b"%d" % n).digest() * (n // 32 + 1))[:n]


def digest(data):
    return hashlib.sha256(data).hexdigest()[:12]


def wait_at_most(sock, seconds):
    """The kernel's time limit: with Python's own one the socket would not block."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def name(kind):
    return errno.errorcode.get(kind, kind)


def about(ancillary):
    """Control data: the destination of the datagram, and the kind and length of the rest."""
    out = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO):
            out.append(("pktinfo", socket.inet_ntoa(data[8:12]), data[:4].hex()))
        elif (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
            out.append(("pktinfo", data.hex()))
        elif (level, kind) in ((socket.IPPROTO_IP, socket.IP_TTL), (socket.IPPROTO_IPV6, socket.IPV6_HOPLIMIT)):
            out.append(("hops", data.hex()))
        else:
            out.append((level, kind, len(data)))
    return sorted(out, key=str)


def server(port, ready):
    sock = socket.socket(socket.AF_INET6 if ready.endswith("6") else socket.AF_INET, socket.SOCK_DGRAM)
    wait_at_most(sock, LIMIT)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1)
    else:
        sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        sock.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)
    sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMP, 1)
    sock.bind(("", port))
    print("bound", flush=True)
    while True:
        data, ancillary, flags, addr = sock.recvmsg(70000, 512)
        if data in (b"warm", b"warmed"):
            sock.sendto(data, addr)
            continue
        print("server", len(data), digest(data), hex(flags), about(ancillary), addr[:2], flush=True)
        if data == b"fork":
            # The child answers the next one.
            child = os.fork()
            if child == 0:
                data, addr = sock.recvfrom(100)
                sock.sendto(b"child: " + data, addr)
                os._exit(0)
            sock.sendto(b"forked", addr)
            os.waitpid(child, 0)
        elif data.startswith(b"short "):
            sock.sendto(b"next", addr)
            n = int(data.split()[1])
            data, ancillary, flags, _ = sock.recvmsg(n, 512)
            print("short", len(data), digest(data), hex(flags), about(ancillary), flush=True)
            sock.sendto(b"%d" % len(data), addr)
        elif data == b"burst":
            sock.sendto(b"go", addr)
            print("burst", [sock.recv(100).split(b" ")[0] for _ in range(40)], flush=True)
            sock.sendto(b"done", addr)
        elif data == b"gather":
            sock.sendmsg([b"ga", b"", b"the", b"r" * 3000], [], 0, addr)
        elif data == b"many":
            for at in range(6):
                sock.sendto(b"%d " % at + content(at * 300), addr)
        elif data == b"close":
            sock.sendto(b"closing", addr)
            sock.close()
            return
        else:
            sock.sendto(data, addr)


def waiting(sock):
    n = array.array("i", [0])
    fcntl.ioctl(sock, termios.FIONREAD, n)
    return n[0]


def client(host, port, ready):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_DGRAM)
    wait_at_most(sock, LIMIT)
    sock.bind(("", port + 1))
    to = (host, port)

    def ask(data, room=70000):
        sock.sendto(data, to)
        return sock.recvfrom(room)[0]

    while not os.path.exists(ready):
        sock.sendto(b"warm", to)
        select.select([sock], [], [], 0.2)
        while select.select([sock], [], [], 0.005)[0]:
            sock.recv(100)
    # Nothing of it is left behind this one.
    sock.sendto(b"warmed", to)
    while sock.recv(100) != b"warmed":
        pass
    print("ready", flush=True)

    for n in SIZES:
        data, addr = None, None
        sock.sendto(content(n), to)
        data, addr = sock.recvfrom(70000)
        print("echo", n, data == content(n), addr[:2])
    for n in [65508 if family == socket.AF_INET else 65528, 70000]:
        try:
            sock.sendto(content(n), to)
            print("sent", n)
        except OSError as e:
            print("too long", n, name(e.errno))

    # A buffer that is too short, and one that is longer: nothing behind the datagram is written.
    for n, room in [(100, 10), (100, 0), (5000, 4000), (4097, 4096), (1, 1)]:
        print("short", n, room, ask(b"short %d" % room), end=" ")
        print(ask(content(n)))
    for n in [0, 5, 300, 5000]:
        memory = bytearray(b"\xaa" * 6000)
        sock.sendto(content(n), to)
        got = sock.recv_into(memory)
        print("behind", n, got, memory[:got] == content(n), set(memory[got:]) == {0xAA})
    for n, room in [(400, 100), (5000, 1), (30, 30)]:
        sock.sendto(content(n), to)
        sock.recv(room, socket.MSG_PEEK)
        print("peek", n, len(sock.recv(room, socket.MSG_PEEK | socket.MSG_TRUNC) or b""), end=" ")
        data, _, flags, _ = sock.recvmsg(room)
        print(len(data), data == content(n)[:room], hex(flags))

    # How much waits, and readiness.
    poll, epoll = select.poll(), select.epoll()
    poll.register(sock, select.POLLIN)
    epoll.register(sock, select.EPOLLIN | select.EPOLLET)
    print("empty", waiting(sock), select.select([sock], [], [], 0)[0], poll.poll(0))
    epoll.poll(0)
    sock.sendto(b"many", to)
    seen = []
    while len(seen) < 6:
        if not epoll.poll(LIMIT):
            print("no edge")
        select.select([sock], [], [], LIMIT)
        while True:
            first = waiting(sock)
            try:
                data = sock.recv(5000, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            seen.append((first, len(data), data[:1], digest(data)))
    print("many", seen)

    # Gathered and scattered.
    sock.sendto(b"gather", to)
    parts = [bytearray(3), bytearray(1), bytearray(4000)]
    print("scatter", sock.recvmsg_into(parts)[0], bytes(parts[0]), bytes(parts[1]), digest(bytes(parts[2])))
    sock.sendmsg([b"one", b" ", b"datagram" * 700], [], 0, to)
    print("gathered", digest(sock.recv(10000)))

    # Order.
    print(ask(b"burst"))
    for at in range(40):
        sock.sendto(b"%d %s" % (at, content(40 + at)), to)
    print(sock.recv(100))

    # Time limits.
    for how in ["nonblocking", "timeout"]:
        if how == "nonblocking":
            sock.setblocking(False)
        else:
            sock.setblocking(True)
            wait_at_most(sock, 0.05)
        try:
            sock.recv(10)
        except OSError as e:
            print(how, name(e.errno))
    wait_at_most(sock, LIMIT)

    # A child takes frames too.
    print(ask(b"fork"))
    print(ask(b"to the child"))

    # Connected: only the peer's datagrams, and its end is an error.
    sock.connect(to)
    print("peer", sock.getpeername()[:2], sock.getsockname()[1])
    for n in [3, 2000, 6000]:
        sock.send(content(n))
        print("connected", n, sock.recv(70000) == content(n))
    os.write(sock.fileno(), b"written")
    print(os.read(sock.fileno(), 3))
    print(sock.recv(100) if waiting(sock) else "nothing is left")
    # Part of a datagram is held back.
    sock.send(b"first half, ", socket.MSG_MORE)
    sock.send(b"second half")
    print("corked", sock.recv(100))
    sock.send(b"close")
    print(sock.recv(100))
    told = None
    for _ in range(LIMIT * 50):
        try:
            sock.send(b"anybody?")
            sock.recv(100, socket.MSG_DONTWAIT)
        except BlockingIOError:
            select.select([sock], [], [], 0.02)
        except OSError as e:
            told = name(e.errno)
            break
    print("refused", told, flush=True)


if sys.argv[1] == "server":
    server(int(sys.argv[2]), sys.argv[3])
else:
    client(sys.argv[2], int(sys.argv[3]), sys.argv[4])
