"""Seeded random socket calls on both ends of many connections, in one process. Prints a line for each call with what it returned or raised:
run on plain TCP and under weft, the lines have to be the same.

Calls are chosen so that TCP's answer does not depend on time: a receive asks for what has surely arrived (each send is small against any
buffer, and its arrival is waited for by poll), readiness is asked for when it is settled.

`stress.py SEED SECONDS`: rounds until the time is up; `stress.py SEED =ROUNDS`: so many rounds.
"""
import array
import errno
import fcntl
import os
import random
import select
import socket
import sys
import termios
import time


class End:
    """One end of a connection, its peer, and what it can still expect."""

    def __init__(self, sock):
        self.sock = sock
        self.peer = None
        self.inbox = 0  # bytes sent to it and not received
        self.shut = False
        self.dups = []

    def arrived(self):
        """Waits until all bytes that were sent to this end can be received: FIONREAD says how many."""
        buf = array.array("i", [0])
        for _ in range(30000):
            fcntl.ioctl(self.sock, termios.FIONREAD, buf)
            if buf[0] >= self.inbox:
                return buf[0]
            time.sleep(0.001)
        raise SystemExit(f"{buf[0]} bytes of {self.inbox} have arrived")


def name(error):
    return errno.errorcode.get(error.errno, str(error))


def outcome(call):
    try:
        return call()
    except OSError as error:
        return name(error)


def digest(data):
    return f"{len(data)}:{sum(data) % 65521}"


def one_round(rng, say):
    listener = socket.create_server(("127.0.0.1", 0))
    a = socket.socket()
    nonblocking = rng.random() < 0.5
    a.connect(listener.getsockname())
    b, _ = listener.accept()
    listener.close()
    ends = [End(a), End(b)]
    ends[0].peer, ends[1].peer = ends[1], ends[0]
    sets = [select.epoll() for _ in range(2)]
    registered = {}
    for end in ends:
        end.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.sock.setblocking(not nonblocking)
    for step in range(rng.randint(20, 120)):
        k = rng.randint(0, 1)
        end = ends[k]
        peer = end.peer
        what = rng.choice(
            ["send"] * 6 + ["recv"] * 6 + ["sendmsg", "recvmsg", "peek", "fionread", "poll", "select", "epoll", "register", "modify",
             "unregister", "dontwait", "waitall", "write", "read", "dup", "sendfile", "blocking", "trunc", "shutdown", "fork"]
        )
        if what in ("send", "sendmsg", "write", "sendfile"):
            if end.shut:
                say(step, k, what, "after shutdown", outcome(lambda: end.sock.send(b"x", socket.MSG_NOSIGNAL)))
                continue
            if peer.inbox > 60000:
                continue
            data = rng.randbytes(rng.choice((1, 10, 100, 1000, 7000)))
            if what == "send":
                n = outcome(lambda: end.sock.send(data))
            elif what == "write":
                n = outcome(lambda: os.write(end.sock.fileno(), data))
            elif what == "sendfile":
                fd = os.memfd_create("x")
                os.write(fd, data)
                n = outcome(lambda: os.sendfile(end.sock.fileno(), fd, 0, len(data)))
                os.close(fd)
            else:
                cut = rng.randint(0, len(data))
                n = outcome(lambda: end.sock.sendmsg([data[:cut], b"", data[cut:]]))
            say(step, k, what, n)
            if isinstance(n, int):
                peer.inbox += n
        elif what in ("recv", "recvmsg", "read", "peek", "waitall", "trunc"):
            if end.inbox == 0:
                if peer.shut:
                    # The end of the stream; it may still be on its way.
                    select.select([end.sock], [], [], 30)
                    say(step, k, what, "end", outcome(lambda: end.sock.recv(10)))
                continue
            end.arrived()
            n = rng.choice((1, 10, 500, 5000, 100000))
            if what == "recv":
                got = outcome(lambda: end.sock.recv(n))
            elif what == "read":
                got = outcome(lambda: os.read(end.sock.fileno(), n))
            elif what == "peek":
                got = outcome(lambda: end.sock.recv(n, socket.MSG_PEEK))
                say(step, k, what, got if isinstance(got, str) else digest(got))
                continue
            elif what == "waitall":
                n = min(n, end.inbox)
                got = outcome(lambda: end.sock.recv(n, socket.MSG_WAITALL))
            elif what == "trunc":
                # Thrown away; the buffer's bytes are not TCP's promise.
                got = outcome(lambda: end.sock.recv(n, socket.MSG_TRUNC))
                say(step, k, what, got if isinstance(got, str) else len(got))
                end.inbox -= len(got)
                continue
            else:
                one, two = bytearray(n // 2), bytearray(n - n // 2)
                r = outcome(lambda: end.sock.recvmsg_into([one, two]))
                got = r if isinstance(r, str) else bytes(one + two)[: r[0]]
                if not isinstance(r, str):
                    say(step, k, "flags", r[1:3])
            say(step, k, what, got if isinstance(got, str) else digest(got))
            if not isinstance(got, str):
                end.inbox -= len(got)
        elif what == "fionread":
            say(step, k, what, end.arrived())
        elif what == "dontwait":
            if end.inbox == 0 and not peer.shut:
                say(step, k, what, outcome(lambda: end.sock.recv(10, socket.MSG_DONTWAIT)))
        elif what in ("poll", "select", "epoll"):
            end.arrived()
            if peer.shut or end.shut:
                continue
            if what == "poll":
                p = select.poll()
                p.register(end.sock, select.POLLIN | select.POLLOUT | select.POLLPRI)
                say(step, k, what, [e for _, e in p.poll(0)])
            elif what == "select":
                r = select.select([end.sock], [end.sock], [end.sock], 0)
                say(step, k, what, [len(x) for x in r])
            else:
                for n, s in enumerate(sets):
                    events = s.poll(0)
                    if any((n, j) in registered and registered[(n, j)] & select.EPOLLET for j in (0, 1)):
                        # The kernel decides how often it reports an edge; the end shows that none is lost.
                        continue
                    say(step, n, what, sorted((0 if fd == ends[0].sock.fileno() else 1, e) for fd, e in events))
        elif what in ("register", "modify", "unregister"):
            n = rng.randint(0, 1)
            events = rng.choice((select.EPOLLIN, select.EPOLLIN | select.EPOLLOUT, select.EPOLLOUT,
                                 select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET))
            for other in ends:
                other.arrived()
            if what == "register":
                r = outcome(lambda: sets[n].register(end.sock, events))
            elif what == "modify":
                r = outcome(lambda: sets[n].modify(end.sock, events))
            else:
                r = outcome(lambda: sets[n].unregister(end.sock))
            say(step, n, k, what, r)
            if r is None:
                if what == "unregister":
                    del registered[(n, k)]
                else:
                    registered[(n, k)] = events
        elif what == "dup":
            end.dups.append(end.sock.dup())
            if len(end.dups) > 2:
                end.dups.pop(0).close()
        elif what == "blocking":
            nonblocking = rng.random() < 0.5
            for other in ends:
                other.sock.setblocking(not nonblocking)
        elif what == "shutdown" and rng.random() < 0.15:
            say(step, k, what, outcome(lambda: end.sock.shutdown(socket.SHUT_WR)))
            end.shut = True
        elif what == "fork" and rng.random() < 0.1 and not end.shut and peer.inbox < 60000:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                sent = end.sock.send(b"from a child")
                os._exit(0 if sent == 12 else 1)
            say(step, k, what, os.waitpid(pid, 0)[1])
            peer.inbox += 12
    # All that is under way arrives, and then the end.
    for end in ends:
        end.sock.setblocking(True)
    for k, end in enumerate(ends):
        if not end.shut:
            end.sock.shutdown(socket.SHUT_WR)
    for k, end in enumerate(ends):
        got = 0
        while data := end.sock.recv(100000):
            got += len(data)
        say("rest", k, got, end.inbox)
        assert got == end.inbox
    for end in ends:
        end.sock.close()
        for d in end.dups:
            d.close()
    for s in sets:
        s.close()


def main():
    rng = random.Random(int(sys.argv[1]))
    out = sys.stdout
    limit = sys.argv[2]
    until = None if limit.startswith("=") else time.monotonic() + float(limit)
    rounds = 0
    while rounds < int(limit[1:]) if until is None else time.monotonic() < until:
        rounds += 1
        out.write(f"round {rounds}\n")
        one_round(rng, lambda *words: out.write(" ".join(map(str, words)) + "\n"))
    out.write(f"stress: {rounds} rounds\n")


main()
