"""Two ends of one TCP connection that end it, or send it back to TCP, after the first messages, and print what the client is told.

ends.py server PORT HOW FILE | client HOST PORT HOW FILE

FILE carries one word from the client or the test to the server.
"""

import array
import contextlib
import fcntl
import select
import socket
import sys
import termios
import time

ROUNDS = 40
# After more calls without the broker's answer a connection stays on TCP.
FEW = 6
ZEROCOPY = 60


def wait_for_bytes(sock, n):
    left = array.array("i", [0])
    while left[0] < n:
        fcntl.ioctl(sock.fileno(), termios.FIONREAD, left)
        time.sleep(0.01)


def receive(sock):
    try:
        return f"{len(sock.recv(100))} bytes"
    except OSError as error:
        return type(error).__name__


def server(port, how):
    with socket.create_server(("", port)) as listener:
        sock, _ = listener.accept()
    for _ in range(FEW if how == "half" else ROUNDS):
        sock.sendall(sock.recv(100))
    if how == "close":
        wait_for_bytes(sock, 1000)
        sock.close()
        return
    if how == "pass":
        wait_for_bytes(sock, 1000)
        near, far = socket.socketpair()
        socket.send_fds(near, [b"x"], [sock.fileno()])
        _, (fd,), _, _ = socket.recv_fds(far, 10, 1)
        sock.close()
        taken = socket.socket(fileno=fd)
        print("taken:", receive(taken), "then", receive(taken))
        return
    if how == "held":
        # The sender's host does not answer any more.
        read_word()
        near, far = socket.socketpair()
        began = time.monotonic()
        socket.send_fds(near, [b"x"], [sock.fileno()])
        print(f"passed after {time.monotonic() - began:.1f} s")
        _, (fd,), _, _ = socket.recv_fds(far, 10, 1)
        sock.close()
        taken = socket.socket(fileno=fd)
        print("taken:", receive(taken), "then", receive(taken))
        return
    if how == "waits":
        return serve_waits(sock)
    if how == "half":
        # No other calls on the socket, which would hear the broker's answer.
        sock.sendall(b"h" * 300)
        read_word()
        sock.shutdown(socket.SHUT_WR)
        while read_word() != "done":
            time.sleep(0.01)
        return
    total = 0
    while data := sock.recv(100):
        total += len(data)
        if how != "shut":
            sock.sendall(data)
    print("echoed", total)


def read_word():
    while True:
        with contextlib.suppress(FileNotFoundError), open(sys.argv[-1], encoding="ascii") as file:
            if (word := file.read()).endswith("\n"):
                return word.strip()
        time.sleep(0.01)


def write_word(word):
    with open(sys.argv[-1], "w", encoding="ascii") as file:
        print(word, file=file)


def serve_waits(sock):
    """Does what the client asks for, by one byte each, and by the file while the connection is full."""
    for _ in range(2):
        assert sock.recv(1) == b"?"
        time.sleep(0.2)
        sock.sendall(b"later")
    left = int(read_word())
    while left > 0:
        left -= len(sock.recv(1 << 20))
    sock.sendall(b"all")
    assert sock.recv(1) == b"."
    sock.close()


def waits(sock):
    """Prints what `poll` and `select` tell of each state of the connection."""
    poll = select.poll()

    def tell(what, ms, events=select.POLLIN | select.POLLPRI | select.POLLOUT | select.POLLRDHUP):
        poll.register(sock, events)
        print(what, [hex(event) for _, event in poll.poll(ms)])

    tell("idle", 0)
    tell("idle, to read", 0, select.POLLIN)
    print("idle, select", [len(ready) for ready in select.select([sock], [sock], [sock], 0)])
    sock.sendall(b"?")
    tell("later", 20_000, select.POLLIN | select.POLLRDHUP)
    tell("later, all", 0)
    print(sock.recv(100))
    sock.sendall(b"?")
    print("later, select", [len(ready) for ready in select.select([sock], [], [sock], 20)])
    print(sock.recv(100))
    sock.setblocking(False)
    poll.register(sock, select.POLLOUT)
    total = 0
    while poll.poll(500):
        total += sock.send(bytes(1 << 16))
    tell("full", 0)
    print("full, select", [len(ready) for ready in select.select([sock], [sock], [sock], 0)])
    write_word(total)
    tell("room", 20_000, select.POLLOUT)
    tell("all read", 20_000, select.POLLIN)
    print(sock.recv(100))
    tell("room again", 0)
    sock.sendall(b".")
    tell("closed", 20_000, select.POLLIN | select.POLLRDHUP)
    print("closed, select", [len(ready) for ready in select.select([sock], [sock], [sock], 0)])
    print(receive(sock))


def shut_for_reading(sock, events):
    sock.shutdown(socket.SHUT_RD)
    print("shut:", [hex(event) for _, event in events.poll(20)], receive(sock))
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLOUT | select.POLLRDHUP)
    print("polled:", [hex(event) for _, event in poll.poll(0)])
    print("selected:", [len(ready) for ready in select.select([sock], [sock], [sock], 0)])
    sock.sendall(b"z" * 17)
    sock.shutdown(socket.SHUT_WR)


def client(host, port, how):
    sock = socket.create_connection((host, port))
    events = select.epoll()
    events.register(sock, select.EPOLLIN | select.EPOLLRDHUP)
    for _ in range(FEW if how == "half" else ROUNDS):
        sock.sendall(b"x" * 17)
        time.sleep(0.02)
        assert len(sock.recv(17)) == 17
    if how in ("close", "pass"):
        sock.sendall(b"y" * 1000)
        told = events.poll(20)
        print("told:", [hex(event) for _, event in told])
        print("client:", receive(sock), "then", receive(sock))
        return
    if how == "waits":
        return waits(sock)
    if how == "shut":
        return shut_for_reading(sock, events)
    if how == "half":
        print("over", flush=True)
        # The broker of this end has the answer after a moment, and is asked at some of these calls.
        for _ in range(20):
            time.sleep(0.2)
            assert sock.recv(15, socket.MSG_WAITALL) == b"h" * 15
        write_word("end")
        sock.settimeout(10)
        print("end:", receive(sock))
        return write_word("done")
    if how == "held":
        print("over", flush=True)
        read_word()
        return
    if how == "lowat":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 5)
    elif how == "zerocopy":
        sock.setsockopt(socket.SOL_SOCKET, ZEROCOPY, 1)
    else:
        sock.send(b"!", socket.MSG_OOB)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        for _, event in events.poll(0.05):
            print(f"wrong event {event:#x}")
            return
    sock.sendall(b"z" * 17)
    print("event:", [hex(event) for _, event in events.poll(20)], receive(sock))


print(flush=True)
if sys.argv[1] == "server":
    server(int(sys.argv[2]), sys.argv[3])
else:
    client(sys.argv[2], int(sys.argv[3]), sys.argv[4])
