"""Seeded random calls on UDP sockets of one process. Prints a line for each call with what it returned or raised: run on plain UDP and under
weft, the lines have to be the same.

Calls are chosen so that UDP's answer does not depend on time: a receive waits until the datagram has surely arrived, no buffer is filled, and
a socket holds datagrams of one sender at a time, because UDP promises no order between senders.

`udp_stress.py SEED ROUNDS`
"""
import array
import errno
import fcntl
import os
import random
import select
import socket
import struct
import sys
import termios

IP_PKTINFO = 8
IPV6_RECVPKTINFO = 49


class End:
    def __init__(self, number, sock, address):
        self.number = number
        self.sock = sock
        self.address = address
        self.inbox = []  # (sender, data)
        self.peer = None  # when it is connected
        self.dups = []


def outcome(call):
    try:
        return call()
    except OSError as error:
        return errno.errorcode.get(error.errno, type(error).__name__)


def digest(data):
    return f"{len(data)}:{sum(data) % 65521}"


def make(rng, number, family, say):
    sock = socket.socket(family, socket.SOCK_DGRAM)
    host = "127.0.0.1" if family == socket.AF_INET else "::1"
    everywhere = "0.0.0.0" if family == socket.AF_INET else "::"
    sock.bind((rng.choice((host, everywhere)), 0))
    if rng.random() < 0.3:
        option = (socket.IPPROTO_IP, IP_PKTINFO) if family == socket.AF_INET else (socket.IPPROTO_IPV6, IPV6_RECVPKTINFO)
        sock.setsockopt(*option, 1)
    if rng.random() < 0.3:
        sock.setblocking(False)
    return End(number, sock, (host, sock.getsockname()[1]))


def name(ends, address):
    if address is None:
        return None
    for end in ends:
        if address[:2] == end.address:
            return end.number
    return "?" + address[0]


def info(messages):
    return [(level, kind, data.hex()) for level, kind, data in messages]


def await_one(end):
    if not select.select([end.sock], [], [], 30)[0]:
        raise SystemExit(f"a datagram to {end.number} was lost")


def send(rng, ends, end, what, say):
    to = rng.choice([other for other in ends if other is not end])
    if end.peer is not None and (what != "sendto" or rng.random() < 0.5):
        to = end.peer
    elif what in ("send", "write"):
        return say(end.number, what, "unconnected", outcome(lambda: end.sock.send(b"x")))
    takes = to.peer is None or to.peer is end
    if not takes and end.peer is not None:
        # It would be refused, and a later call would say so, at a time that is not certain.
        return
    if takes and (len(to.inbox) > 12 or any(sender is not end for sender, _ in to.inbox)):
        return
    data = rng.randbytes(rng.choice((0, 1, 10, 500, 1472, 3000, 9000)))
    cut = rng.randint(0, len(data))
    explicit = end.peer is None or (to is not end.peer or rng.random() < 0.5)
    if what == "sendto":
        call = (lambda: end.sock.sendto(data, to.address)) if explicit else (lambda: end.sock.send(data))
    elif what == "send":
        call = lambda: end.sock.send(data, rng.choice((0, socket.MSG_DONTWAIT)))
    elif what == "write":
        call = lambda: os.write(end.sock.fileno(), data)
    else:
        address = [to.address] if explicit else []
        call = lambda: end.sock.sendmsg([data[:cut], b"", data[cut:]], [], 0, *address)
    if not data and what == "write":
        return
    n = outcome(call)
    say(end.number, what, to.number, n)
    if isinstance(n, int) and takes:
        to.inbox.append((end, data))


def receive(rng, ends, end, what, say):
    if not end.inbox:
        if what == "recv" and end.sock.getblocking():
            end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 2000))
            say(end.number, "times out", outcome(lambda: end.sock.recv(10)))
            end.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        else:
            say(end.number, "empty", outcome(lambda: end.sock.recv(10, socket.MSG_DONTWAIT)))
        return
    if rng.random() < 0.5 or not end.sock.getblocking():
        await_one(end)
    n = rng.choice((0, 1, 10, 500, 1472, 65536))
    if what == "peek":
        return say(end.number, what, digest(end.sock.recv(n, socket.MSG_PEEK)))
    sender, data = end.inbox.pop(0)
    if what in ("recv", "read") and n == 0:
        # Python's recv(0) and a read of zero bytes consume nothing.
        end.inbox.insert(0, (sender, data))
    if what == "recv":
        got = end.sock.recv(n)
        say(end.number, what, digest(got))
        assert got == data[:n], (got[:20], data[:20], n)
    elif what == "read":
        got = os.read(end.sock.fileno(), n)
        say(end.number, what, digest(got))
    elif what == "trunc":
        buffer = bytearray(n or 1)
        got = end.sock.recv_into(buffer, 0, socket.MSG_TRUNC)
        say(end.number, what, got, sum(buffer))
    elif what == "recvfrom":
        got, address = end.sock.recvfrom(n)
        say(end.number, what, digest(got), name(ends, address))
    else:
        buffers = [bytearray(n // 2), bytearray(n - n // 2)]
        got, messages, flags, address = end.sock.recvmsg_into(buffers, rng.choice((0, 20, 200)))
        say(end.number, what, got, flags, name(ends, address), info(messages), digest(buffers[0] + buffers[1]))


def settled(ends):
    """What was sent has arrived: the last of each inbox cannot be seen, but the first, and loopback keeps order."""
    for end in ends:
        if end.inbox:
            await_one(end)


def ready(rng, ends, end, what, sets, registered, say):
    settled(ends)
    if what == "poll":
        p = select.poll()
        p.register(end.sock, select.POLLIN | select.POLLOUT | select.POLLPRI)
        say(end.number, what, [e for _, e in p.poll(0)])
    elif what == "select":
        say(end.number, what, [len(x) for x in select.select([end.sock], [end.sock], [end.sock], 0)])
    elif what == "fionread":
        buffer = array.array("i", [0])
        fcntl.ioctl(end.sock, termios.FIONREAD, buffer)
        say(end.number, what, buffer[0])
    elif what == "epoll":
        for number, one in enumerate(sets):
            if any(events & select.EPOLLET for (at, _), events in registered.items() if at == number):
                # The kernel decides how often it reports an edge; other tests check that none is lost.
                continue
            numbers = {other.sock.fileno(): other.number for other in ends}
            say(number, what, sorted((numbers[fd], e) for fd, e in one.poll(0)))
    else:
        number = rng.randint(0, 1)
        key = (number, end.number)
        events = rng.choice((select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT, select.EPOLLOUT, select.EPOLLIN | select.EPOLLET))
        if what == "register":
            result = outcome(lambda: sets[number].register(end.sock, events))
        elif what == "modify":
            result = outcome(lambda: sets[number].modify(end.sock, events))
        else:
            result = outcome(lambda: sets[number].unregister(end.sock))
        say(number, end.number, what, result)
        if result is None:
            registered[key] = events
            if what == "unregister":
                del registered[key]


def change(rng, ends, end, what, say):
    if what == "connect":
        to = rng.choice([other for other in ends if other is not end])
        # Datagrams of others stay; the model could not distinguish them from refused ones.
        if not any(other.inbox for other in ends):
            say(end.number, what, to.number, outcome(lambda: end.sock.connect(to.address)))
            end.peer = to
    elif what == "dup":
        end.dups.append(end.sock.dup())
        if len(end.dups) > 2:
            end.dups.pop(0).close()
    elif what == "blocking":
        end.sock.setblocking(rng.random() < 0.5)
    elif what == "fork" and rng.random() < 0.1 and not any(other.inbox for other in ends):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)


def refused(say, family, host):
    """A receiver that closes: the datagram after the next is refused."""
    a, b = socket.socket(family, socket.SOCK_DGRAM), socket.socket(family, socket.SOCK_DGRAM)
    b.bind((host, 0))
    a.connect(b.getsockname())
    for n in range(20):
        a.send(b"%d" % n)
        assert b.recv(10) == b"%d" % n
    b.close()
    say("closed", outcome(lambda: a.send(b"x")))
    select.select([a], [], [], 30)
    say("closed", outcome(lambda: a.send(b"x")), outcome(lambda: a.recv(1, socket.MSG_DONTWAIT)))
    a.close()


def one_round(rng, say):
    family = rng.choice((socket.AF_INET, socket.AF_INET6))
    ends = [make(rng, number, family, say) for number in range(3)]
    sets = [select.epoll() for _ in range(2)]
    registered = {}
    for step in range(rng.randint(40, 160)):
        end = rng.choice(ends)
        what = rng.choice(
            ["sendto"] * 8 + ["send", "sendmsg", "write"] * 2 + ["recv", "recvfrom", "recvmsg"] * 5 + ["read", "trunc", "peek"]
            + ["poll", "select", "epoll", "fionread", "register", "modify", "unregister", "dup", "blocking", "fork"] + ["connect"] * (step > 30)
        )
        if what in ("sendto", "send", "sendmsg", "write"):
            send(rng, ends, end, what, say)
        elif what in ("recv", "recvfrom", "recvmsg", "read", "trunc", "peek"):
            receive(rng, ends, end, what, say)
        elif what in ("poll", "select", "epoll", "fionread", "register", "modify", "unregister"):
            ready(rng, ends, end, what, sets, registered, say)
        else:
            change(rng, ends, end, what, say)
    # Everything that was sent comes.
    for end in ends:
        end.sock.setblocking(True)
        while end.inbox:
            await_one(end)
            sender, data = end.inbox.pop(0)
            got, address = end.sock.recvfrom(65536)
            assert got == data and name(ends, address) == sender.number, (end.number, len(got), len(data))
        say(end.number, "end", outcome(lambda: end.sock.recv(1, socket.MSG_DONTWAIT)))
        end.sock.close()
        for other in end.dups:
            other.close()
    refused(say, family, "127.0.0.1" if family == socket.AF_INET else "::1")


def main():
    seed, rounds = int(sys.argv[1]), int(sys.argv[2])
    rng = random.Random(seed)
    for number in range(rounds):
        one_round(rng, lambda *words: print(number, *words, flush=True))
    print(f"stress: {rounds} rounds")


main()
