"""The steps in which a connection goes over to shared memory, disturbed: an end is stopped or killed somewhere among them, and addresses are used again at once.

`steps.py stop|kill|reuse SEED ROUNDS`. Prints `steps: N rounds` when every byte was that of the stream. An end that is killed may take the end of its stream
with it, but no more: what the other end gets is a beginning of it, and then the end or a reset."""
import os
import random
import signal
import socket
import struct
import sys
import time

PATIENCE = 30
MESSAGES = 60


def message(n):
    return b"%06d" % n * (1 + n % 50)


def exactly(sock, n):
    got = b""
    while len(got) < n:
        piece = sock.recv(n - len(got))
        if not piece:
            break
        got += piece
    return got


def answer(sock):
    """Gives each message back, with a mark before it. How many came."""
    for n in range(MESSAGES):
        try:
            got = exactly(sock, len(message(n)))
            assert message(n).startswith(got), (n, got)
            if got != message(n):
                return n
            sock.sendall(b">" + got)
        except (ConnectionResetError, BrokenPipeError):
            return n
    return MESSAGES


def ask(sock):
    """How many answers came."""
    for n in range(MESSAGES):
        try:
            sock.sendall(message(n))
            got = exactly(sock, 1 + len(message(n)))
        except (ConnectionResetError, BrokenPipeError):
            return n
        whole = b">" + message(n)
        assert whole.startswith(got), (n, got)
        if got != whole:
            return n
    return MESSAGES


def in_child(run):
    pid = os.fork()
    if pid:
        return pid
    try:
        run()
        os._exit(0)
    except BaseException as error:
        print(f"in a child: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def disturbed(rng, how):
    """One connection; after a moment that is some way into its dialogue, one of its ends is stopped for a while, or killed."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        # The caller may have been killed before.
        listener.settimeout(0.3 if how == "kill" else PATIENCE)
        try:
            sock, _ = listener.accept()
        except TimeoutError:
            return
        sock.settimeout(PATIENCE)
        n = answer(sock)
        assert n == MESSAGES or how == "kill", n

    def call():
        address = listener.getsockname()
        listener.close()
        try:
            sock = socket.create_connection(address)
        except ConnectionError:
            assert how == "kill"
            return
        sock.settimeout(PATIENCE)
        n = ask(sock)
        assert n == MESSAGES or how == "kill", n

    children = [in_child(serve), in_child(call)]
    listener.close()
    victim = rng.choice(children)
    time.sleep(rng.uniform(0, 0.004))
    os.kill(victim, signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    if how == "stop":
        time.sleep(rng.choice((0.001, 0.02, 0.2)))
        os.kill(victim, signal.SIGCONT)
    began = time.monotonic()
    for child in children:
        status = os.waitpid(child, 0)[1]
        assert status == 0 or (how == "kill" and child == victim and status in (signal.SIGKILL, 256)), (child == victim, status)
    took = time.monotonic() - began
    assert took < PATIENCE, (took, "an end waited in vain", child == victim, victim == children[0])


def used_again(rounds):
    """One pair of addresses, for one connection after the other: none gets bytes of another."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        for n in range(rounds):
            sock, _ = listener.accept()
            sock.settimeout(PATIENCE)
            mark = sock.recv(4)
            assert mark == struct.pack("!I", n), (n, mark)
            for _ in range(8):
                sock.sendall(mark)
                assert exactly(sock, 4) == mark
            sock.close()

    child = in_child(serve)
    port = 0
    for n in range(rounds):
        sock = socket.socket()
        sock.settimeout(PATIENCE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Closing resets: the addresses are free at once.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.bind(("127.0.0.1", port))
        port = sock.getsockname()[1]
        sock.connect(listener.getsockname())
        mark = struct.pack("!I", n)
        sock.sendall(mark)
        for _ in range(8):
            assert exactly(sock, 4) == mark, n
            sock.sendall(mark)
        # The server's end has read all before the reset comes.
        assert sock.recv(1) == b""
        sock.close()
    assert os.waitpid(child, 0)[1] == 0


what, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if what == "reuse":
    used_again(rounds)
else:
    rng = random.Random(seed)
    for _ in range(rounds):
        disturbed(rng, what)
print(f"steps: {rounds} rounds")
