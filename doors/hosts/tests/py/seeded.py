"""Two ends of one TCP connection that send seeded bytes to each other, in sends and receives of seeded sizes and kinds, and check every byte.

seeded.py server PORT SEED | client HOST PORT SEED
"""

import errno
import hashlib
import random
import select
import socket
import sys
import threading

BROKEN = (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN)


def stream(seed, total):
    """The bytes of a direction."""
    out = bytearray()
    block = 0
    while len(out) < total:
        out += hashlib.sha256(b"%d %d" % (seed, block)).digest() * 128
        block += 1
    return memoryview(bytes(out))[:total]


def send_all(sock, data, rng, pause):
    at = 0
    while at < len(data):
        n = min(len(data) - at, rng.choice([1, 7, 100, 1460, 5000, 40000, 200000]))
        piece = data[at : at + n]
        kind = rng.randrange(4)
        if kind == 0:
            sent = sock.send(piece)
        elif kind == 1:
            half = n // 2
            sent = sock.sendmsg([piece[:half], piece[half:]])
        elif kind == 2:
            sock.sendall(piece)
            sent = n
        else:
            select.select([], [sock], [])
            sent = sock.send(piece)
        at += sent
        if pause and rng.randrange(6) == 0:
            threading.Event().wait(rng.random() / 500)


def recv_all(sock, expected, rng):
    at = 0
    while True:
        n = rng.choice([1, 3, 900, 4096, 70000])
        kind = rng.randrange(4)
        if kind == 0 and len(expected) - at >= n:
            got = sock.recv(n, socket.MSG_WAITALL)
            if len(got) != n:
                raise SystemExit(f"WAITALL gave {len(got)} of {n} at {at}")
        elif kind == 1:
            select.select([sock], [], [])
            got = sock.recv(n, socket.MSG_DONTWAIT)
        elif kind == 2:
            first = sock.recv(n, socket.MSG_PEEK)
            got = sock.recv(n)
            if got[: len(first)] != first[: len(got)]:
                raise SystemExit(f"PEEK differs at {at}")
        else:
            got = sock.recv(n)
        if bytes(expected[at : at + len(got)]) != got:
            raise SystemExit(f"wrong bytes at {at}")
        at += len(got)
        if not got:
            break
    if at != len(expected):
        raise SystemExit(f"the stream ends at {at} of {len(expected)}")


def check(got, word):
    if got and word.startswith(got) and got != word:
        raise ConnectionResetError(errno.ECONNRESET, "in the middle of a word")
    if not got:
        raise ConnectionResetError(errno.ECONNRESET, "the other end is gone")
    if got != word:
        raise SystemExit(f"wrong bytes: {got} for {word}")


def talk(sock, seed, is_client):
    rng = random.Random(seed)
    sizes = [rng.choice([3000, 300000, 1500000]) for _ in range(2)]
    up, down = stream(seed, sizes[0]), stream(seed + 1, sizes[1])
    mine, theirs = (up, down) if is_client else (down, up)
    own = random.Random(seed * 2 + is_client)
    # A dialogue first, so that both ends are awake on TCP when the connection goes over.
    for n in range(40):
        word = b"%08d" % n
        if is_client:
            sock.sendall(word)
            check(sock.recv(8, socket.MSG_WAITALL), word)
            threading.Event().wait(0.002)
        else:
            got = sock.recv(8, socket.MSG_WAITALL)
            check(got, word)
            sock.sendall(got)
    failure = []

    def reader():
        try:
            recv_all(sock, theirs, random.Random(own.random()))
        except BaseException as e:
            failure.append(e)

    thread = threading.Thread(target=reader)
    thread.start()
    broken = None
    try:
        send_all(sock, mine, own, True)
        sock.shutdown(socket.SHUT_WR)
    except OSError as e:
        broken = e
    thread.join()
    broken = broken or (failure and failure[0]) or None
    if isinstance(broken, OSError) and broken.errno in BROKEN:
        print("broken:", broken)
        return
    if broken:
        raise broken
    print(f"all {len(mine)} and {len(theirs)} bytes are right")


def main():
    role = sys.argv[1]
    if role == "server":
        port, seed = int(sys.argv[2]), int(sys.argv[3])
        listener = socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        sock, _ = listener.accept()
    else:
        seed = int(sys.argv[4])
        sock = socket.create_connection((sys.argv[2], int(sys.argv[3])))
    sock.settimeout(None)
    try:
        talk(sock, seed, role == "client")
    except OSError as e:
        if e.errno not in BROKEN:
            raise
        print("broken:", e)


main()
