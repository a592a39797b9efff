"""What programs do with sockets beside reading and writing, in one process with both ends: each is checked as plain TCP has it.

Prints `shapes: N checks` at the end."""
import array
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

checks = 0


def check(what, message=""):
    global checks
    checks += 1
    assert what, message


def pair():
    listener = socket.create_server(("127.0.0.1", 0))
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    listener.close()
    a.settimeout(20)
    b.settimeout(20)
    for s in (a, b):
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return a, b


def warm(a, b):
    """Moves enough that both directions are on the rings, when they can be."""
    for n in range(12):
        for x, y in ((a, b), (b, a)):
            message = b"%d" % n * 50
            x.sendall(message)
            got = b""
            while len(got) < len(message):
                got += y.recv(1000)
            check(got == message)


def blocking(s):
    s.settimeout(None)


def peek_and_fionread():
    a, b = pair()
    warm(a, b)
    a.sendall(b"hello")
    check(b.recv(3, socket.MSG_PEEK) == b"hel")
    buf = array.array("i", [0])
    for _ in range(1000):
        fcntl.ioctl(b, termios.FIONREAD, buf)
        if buf[0] == 5:
            break
        time.sleep(0.01)
    check(buf[0] == 5, buf[0])
    check(b.recv(100) == b"hello")
    fcntl.ioctl(b, termios.FIONREAD, buf)
    check(buf[0] == 0)
    blocking(b)
    try:
        b.recv(1, socket.MSG_DONTWAIT)
        check(False)
    except BlockingIOError:
        check(True)


def waitall():
    a, b = pair()
    warm(a, b)
    blocking(b)
    t = threading.Thread(target=lambda: (a.sendall(b"x" * 1000), time.sleep(0.05), a.sendall(b"y" * 1000)))
    t.start()
    check(b.recv(2000, socket.MSG_WAITALL) == b"x" * 1000 + b"y" * 1000)
    t.join()
    a.sendall(b"rest")
    a.shutdown(socket.SHUT_WR)
    check(b.recv(2000, socket.MSG_WAITALL) == b"rest")
    check(b.recv(1) == b"")
    b.sendall(b"half close")
    check(a.recv(100) == b"half close")


def vectors():
    a, b = pair()
    warm(a, b)
    check(a.sendmsg([b"one", b"", b"two", b"three"]) == 11)
    one, two = bytearray(4), bytearray(100)
    n, ancillary, flags, address = b.recvmsg_into([one, two])
    check((n, bytes(one), bytes(two[: n - 4]), ancillary) == (11, b"onet", b"wothree", []))


def poll_and_select():
    a, b = pair()
    warm(a, b)
    check(select.select([b], [b], [b], 0) == ([], [b], []))
    a.sendall(b"x")
    check(select.select([b], [], [], 20)[0] == [b])
    p = select.poll()
    p.register(b, select.POLLIN | select.POLLOUT)
    check(p.poll(20000) == [(b.fileno(), select.POLLIN | select.POLLOUT)])
    check(b.recv(1) == b"x")
    check(p.poll(0) == [(b.fileno(), select.POLLOUT)])
    # Full: not writable until the other end reads.
    a.setblocking(False)
    sent = 0
    try:
        while True:
            sent += a.send(b"f" * 65536)
    except BlockingIOError:
        pass
    check(select.select([], [a], [], 0)[1] == [])
    got = 0
    while got < sent:
        got += len(b.recv(1 << 20))
    check(select.select([], [a], [], 20)[1] == [a])
    a.close()
    check(select.select([b], [], [], 20)[0] == [b])
    check(b.recv(1) == b"")


def level_and_edge():
    for when in ("before", "after"):
        a, b = pair()
        a.setblocking(False)
        level, edge, outer = select.epoll(), select.epoll(), select.epoll()
        if when == "after":
            warm(a, b)
        level.register(b, select.EPOLLIN)
        edge.register(b, select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET)
        outer.register(level.fileno(), select.EPOLLIN)
        if when == "before":
            a.settimeout(20)
            warm(a, b)
        edge.poll(0)
        check(level.poll(0) == [], "nothing is there")
        a.send(b"x")
        check(level.poll(20) == [(b.fileno(), select.EPOLLIN)])
        check(level.poll(20) == [(b.fileno(), select.EPOLLIN)], "level: again")
        check(outer.poll(20) == [(level.fileno(), select.EPOLLIN)])
        check(edge.poll(20) == [(b.fileno(), select.EPOLLIN)])
        check(edge.poll(0) == [], "edge: once")
        check(b.recv(10) == b"x")
        check(level.poll(0) == [])
        check(outer.poll(0) == [])
        a.send(b"y")
        check(edge.poll(20) == [(b.fileno(), select.EPOLLIN)])
        check(b.recv(10) == b"y")
        level.modify(b, select.EPOLLIN | select.EPOLLOUT)
        check(level.poll(20) == [(b.fileno(), select.EPOLLOUT)])
        level.modify(b, select.EPOLLIN)
        check(level.poll(0) == [])
        level.unregister(b)
        a.send(b"z")
        check(level.poll(0) == [])
        level.register(b, select.EPOLLIN)
        check(level.poll(20) == [(b.fileno(), select.EPOLLIN)])
        a.close()
        check(b.recv(10) == b"z")
        check(b.recv(10) == b"")


def both_send_first():
    """More than a ring holds and less than TCP's buffers, on both ends before either reads, in one thread."""
    for nonblocking in (False, True):
        a, b = pair()
        warm(a, b)
        for s in (a, b):
            s.setblocking(not nonblocking)
        data = os.urandom(600000)
        for s in (a, b):
            left = memoryview(data)
            while left:
                if nonblocking:
                    assert select.select([], [s], [], 20)[1] == [s]
                    try:
                        left = left[s.send(left):]
                    except BlockingIOError:
                        pass
                else:
                    left = left[s.send(left):]
        for s in (a, b):
            s.setblocking(True)
            check(s.recv(len(data), socket.MSG_WAITALL) == data)
        e = select.epoll()
        e.register(b, select.EPOLLIN | select.EPOLLET)
        a.sendall(b"more")
        check(e.poll(20) == [(b.fileno(), select.EPOLLIN)])
        check(b.recv(10) == b"more")


def duplicates():
    a, b = pair()
    warm(a, b)
    c = b.dup()
    fd = os.dup2(b.fileno(), 200)
    b.close()
    a.sendall(b"abc")
    check(c.recv(1) == b"a")
    check(os.read(fd, 1) == b"b")
    c.close()
    check(os.read(fd, 5) == b"c")
    os.write(fd, b"back")
    check(a.recv(10) == b"back")
    os.close(fd)
    check(a.recv(10) == b"")


def time_outs():
    a, b = pair()
    warm(a, b)
    blocking(b)
    b.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 50000))
    try:
        b.recv(1)
        check(False)
    except BlockingIOError:
        check(True)
    a.sendall(b"x")
    check(b.recv(1) == b"x")


def signals():
    a, b = pair()
    warm(a, b)
    blocking(b)

    class Woken(Exception):
        pass

    def handler(*_):
        raise Woken

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        b.recv(1)
        check(False)
    except Woken:
        check(True)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    t = threading.Timer(0.2, lambda: a.sendall(b"x"))
    t.start()
    check(b.recv(1) == b"x", "restarted")
    t.join()


def broken_pipe():
    a, b = pair()
    warm(a, b)
    b.close()
    for _ in range(1000):
        try:
            a.sendall(b"x" * 1000)
            time.sleep(0.005)
        except (BrokenPipeError, ConnectionResetError):
            check(True)
            return
    check(False)


def reset():
    a, b = pair()
    warm(a, b)
    a.sendall(b"unread")
    time.sleep(0.05)
    b.close()
    try:
        # Unread bytes make it a reset.
        data = a.recv(10)
        check(False, data)
    except ConnectionResetError:
        check(True)


def urgent():
    a, b = pair()
    warm(a, b)
    a.sendall(b"abc")
    a.send(b"!", socket.MSG_OOB)
    a.sendall(b"def")
    blocking(b)
    check(select.select([], [], [b], 20)[2] == [b])
    check(b.recv(1, socket.MSG_OOB) == b"!")
    got = b""
    while len(got) < 6:
        got += b.recv(10)
    check(got == b"abcdef", got)


def forks():
    a, b = pair()
    warm(a, b)
    pid = os.fork()
    if pid == 0:
        a.close()
        b.sendall(b"from the child")
        os._exit(0 if b.recv(10) == b"to both" else 1)
    check(a.recv(100) == b"from the child")
    a.sendall(b"to both")
    check(os.waitpid(pid, 0)[1] == 0)
    b.sendall(b"from the parent")
    check(a.recv(100) == b"from the parent")


def other_programs():
    a, b = pair()
    warm(a, b)
    # A program that has the socket as its standard output.
    subprocess.run(["/bin/echo", "said by echo"], stdout=b.fileno(), check=True)
    check(a.recv(100) == b"said by echo\n")
    a.sendall(b"to cat\n")
    a.shutdown(socket.SHUT_WR)
    out = subprocess.run(["/bin/cat"], stdin=b.fileno(), stdout=subprocess.PIPE, check=True).stdout
    check(out == b"to cat\n", out)


def executed_by_list():
    a, b = pair()
    warm(a, b)
    pid = os.fork()
    if pid == 0:
        libc = ctypes.CDLL(None)
        os.dup2(b.fileno(), 1)
        words = [b"/bin/echo", b"echo"] + [b"%d" % n for n in range(12)] + [None]
        libc.execl(*map(ctypes.c_char_p, words))
        os._exit(9)
    check(os.waitpid(pid, 0)[1] == 0)
    check(a.recv(100) == b" ".join(b"%d" % n for n in range(12)) + b"\n")


def standard_output():
    """What the C library writes to stdout by itself."""
    a, b = pair()
    warm(a, b)
    pid = os.fork()
    if pid == 0:
        libc = ctypes.CDLL(None)
        os.dup2(b.fileno(), 1)
        libc.puts(b"by stdio")
        libc.fflush(None)
        os._exit(0)
    check(os.waitpid(pid, 0)[1] == 0)
    check(a.recv(100) == b"by stdio\n")
    b.sendall(b"and then")
    check(a.recv(100) == b"and then")


def passed():
    a, b = pair()
    warm(a, b)
    left, right = socket.socketpair()
    socket.send_fds(left, [b"s"], [b.fileno()])
    _, fds, _, _ = socket.recv_fds(right, 10, 1)
    b.close()
    c = socket.socket(fileno=fds[0])
    a.sendall(b"over")
    check(c.recv(10) == b"over")
    c.sendall(b"and back")
    check(a.recv(10) == b"and back")
    c.close()
    check(a.recv(10) == b"")


def files():
    a, b = pair()
    warm(a, b)
    data = os.urandom(700000)
    with open(os.memfd_create("x"), "wb+") as f:
        f.write(data)
        f.flush()
        f.seek(0)
        t = threading.Thread(target=a.sendfile, args=(f,))
        t.start()
        got = bytearray()
        while len(got) < len(data):
            got += b.recv(1 << 16)
        t.join()
    check(bytes(got) == data)


def closes_everything():
    a, b = pair()
    warm(a, b)
    keep = {a.fileno(), b.fileno()}
    for fd in range(3, 4096):
        if fd not in keep:
            try:
                os.close(fd)
            except OSError:
                pass
    os.closerange(max(keep) + 1, 5000)
    a.sendall(b"still")
    check(b.recv(10) == b"still")


for shape in (
    peek_and_fionread, waitall, vectors, poll_and_select, level_and_edge, both_send_first, duplicates, time_outs, signals, broken_pipe, reset,
    urgent, forks, other_programs, executed_by_list, standard_output, passed, files, closes_everything,
):
    try:
        shape()
    except BaseException:
        print("in", shape.__name__, file=sys.stderr)
        raise
print(f"shapes: {checks} checks")
