"""Seeded random socket calls on both ends of connections between two processes, with large sends whose buffer is written to at once afterwards. Prints a
line for each call with what it returned or raised, behind "> ": run on plain TCP and under weft, the lines have to be the same.

`lend_stress.py SEED =ROUNDS`
"""
import array
import errno
import fcntl
import mmap
import os
import random
import select
import socket
import sys
import termios
import time

SIZE = 1 << 20


class End:
    """What one process does with its end when it is told to."""

    def __init__(self, sock, seed):
        self.sock = sock
        self.rng = random.Random(seed)
        # How many receives there are is a matter of time.
        self.chunks = random.Random(seed)
        kind = self.rng.choice((mmap.MAP_PRIVATE, mmap.MAP_SHARED))
        self.buf = mmap.mmap(-1, SIZE, flags=kind | mmap.MAP_ANONYMOUS)
        self.into = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def send(self, n, offset, way, after):
        """Sends n bytes from the buffer, and writes to it behind the library's back."""
        view = memoryview(self.buf)[offset : offset + n]
        view[:] = self.rng.randbytes(n)
        sum_ = sum(view)
        sent = 0
        while sent < n:
            if way == 0:
                sent += self.sock.send(view[sent:])
            elif way == 1:
                sent += os.write(self.sock.fileno(), view[sent:])
            else:
                middle = sent + (n - sent) // 2
                sent += self.sock.sendmsg([view[sent:middle], b"", view[middle:]])
        if after == 0:
            view[:] = bytes(n)
        elif after == 1:
            view[n // 2] ^= 1
        elif after == 2:
            # A system call that writes there.
            with open("/dev/zero", "rb", buffering=0) as zero:
                assert zero.readinto(view) == n
        return n, sum_

    def receive(self, n, way, most):
        """Receives n bytes."""
        total, got = 0, 0
        view = memoryview(self.into)
        while got < n:
            want = min(n - got, 1 + self.chunks.randrange(most))
            if way == 0:
                k = self.sock.recv_into(view[:want])
            elif way == 1:
                k = self.sock.recv_into(view[:want], want, socket.MSG_WAITALL)
            elif way == 2:
                k = self.sock.recv_into(view[:want], want, socket.MSG_PEEK)
                before = sum(view[:k])
                assert self.sock.recv_into(view[5 : 5 + k], k, socket.MSG_WAITALL) == k
                assert sum(view[5 : 5 + k]) == before
                view[:k] = bytes(view[5 : 5 + k])
            else:
                k = self.sock.recvmsg_into([view[: want // 3], view[want // 3 : want]])[0]
            if k == 0:
                return got, "end"
            total += sum(view[:k])
            got += k
        return got, total

    def fionread(self, n):
        """Waits for n bytes to be there, and says how many there are."""
        buf = array.array("i", [0])
        for _ in range(20000):
            fcntl.ioctl(self.sock, termios.FIONREAD, buf)
            if buf[0] >= n:
                break
            time.sleep(0.001)
        return buf[0]

    def poll(self):
        p = select.poll()
        # Writability depends on the buffers' sizes, so it is not compared.
        p.register(self.sock, select.POLLIN | select.POLLPRI)
        return [e for _, e in p.poll(0)]

    def dontwait(self):
        return len(self.sock.recv(10, socket.MSG_DONTWAIT))

    def blocking(self, on):
        self.sock.setblocking(on)

    def shutdown(self):
        self.sock.shutdown(socket.SHUT_WR)

    def fork(self):
        pid = os.fork()
        if pid == 0:
            self.buf[:] = bytes(SIZE)
            os._exit(0)
        return os.waitpid(pid, 0)[1]


def outcome(end, words):
    try:
        return getattr(end, words[0])(*words[1:])
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))


class Far:
    """The end of the other process."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def begin(self, words):
        self.writer.write(repr(words) + "\n")
        self.writer.flush()

    def finish(self):
        return eval(self.reader.readline())


class Near:
    def __init__(self, end):
        self.end = end

    def begin(self, words):
        self.words = words

    def finish(self):
        return outcome(self.end, self.words)


def one_round(rng, say):
    listener = socket.create_server(("127.0.0.1", 0))
    to_child, from_parent = os.pipe(), os.pipe()
    seed = rng.randrange(1 << 30)
    sys.stdout.flush()
    port = listener.getsockname()[1]
    listener_fd = listener.fileno()
    pid = os.fork()
    if pid == 0:
        os.close(listener_fd)
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end = End(sock, seed)
        with os.fdopen(to_child[0]) as reader, os.fdopen(from_parent[1], "w") as writer:
            os.close(to_child[1])
            while line := reader.readline():
                writer.write(repr(outcome(end, eval(line))) + "\n")
                writer.flush()
        sock.close()
        sys.exit(0)
    os.close(to_child[0])
    os.close(from_parent[1])
    sock, _ = listener.accept()
    listener.close()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    near = Near(End(sock, seed + 1))
    far = Far(os.fdopen(from_parent[0]), os.fdopen(to_child[1], "w"))
    ends = [near, far]
    inbox = [0, 0]
    shut = [False, False]

    def do(k, *words):
        ends[k].begin(words)
        result = ends[k].finish()
        say(k, *words, "->", result)
        return result

    for _ in range(6):
        for k in (0, 1):
            do(k, "send", 10, 0, 0, 3)
            do(1 - k, "receive", 10, 0, 10)
    for step in range(rng.randint(20, 60)):
        k = rng.randint(0, 1)
        what = rng.choice(["move"] * 6 + ["send"] * 4 + ["receive"] * 4 + ["fionread", "poll", "dontwait", "fork", "shutdown"])
        if what == "move" and not shut[k] and inbox[1 - k] == 0:
            # Both at once: the local call waits for the remote one.
            n = rng.choice((5000, 40000, 100000, 300000, 900000))
            send = ("send", n, rng.choice((0, 0, 100, 4096)), rng.randint(0, 2), rng.randint(0, 3))
            receive = ("receive", n, rng.randint(0, 3), rng.choice((3000, 70000, SIZE // 2)))
            first, second = (send, receive) if k == 1 else (receive, send)
            far.begin(first)
            near.begin(second)
            results = near.finish(), far.finish()
            say(step, k, send, receive, *results)
        elif what == "send" and not shut[k]:
            n = rng.choice((1, 100, 5000, 60000))
            # TCP's buffers may not hold more.
            if inbox[1 - k] + n > 100000:
                continue
            do(k, "send", n, rng.choice((0, 77)), rng.randint(0, 2), rng.randint(0, 3))
            inbox[1 - k] += n
        elif what == "receive" and inbox[k]:
            n = rng.choice((1, inbox[k] // 2, inbox[k]))
            do(k, "receive", n, rng.randint(0, 3), SIZE // 2)
            inbox[k] -= n
        elif what == "fionread":
            do(k, "fionread", inbox[k])
        elif what == "poll" and not any(shut):
            do(k, "fionread", inbox[k])
            do(k, "poll")
        elif what == "dontwait" and inbox[k] == 0 and not shut[1 - k]:
            do(k, "dontwait")
        elif what == "fork" and rng.random() < 0.2:
            do(k, "fork")
        elif what == "shutdown" and rng.random() < 0.1 and not shut[k]:
            do(k, "shutdown")
            shut[k] = True
    for k in (0, 1):
        if not shut[k]:
            do(k, "shutdown")
    for k in (0, 1):
        do(k, "receive", inbox[k] + 1, 0, SIZE // 2)
    far.writer.close()
    far.reader.close()
    say("child", os.waitpid(pid, 0)[1])
    sock.close()


def main():
    rng = random.Random(int(sys.argv[1]))
    rounds = int(sys.argv[2].lstrip("="))
    for at in range(rounds):
        print(">", "round", at)
        one_round(rng, lambda *words: print(">", *words))
    print(f"> stress: {rounds} rounds", flush=True)


main()
