"""An echo server whose threads share one epoll set, and a client that checks each byte: `once.py server PORT oneshot|exclusive`, `once.py client PORT`.

With `oneshot` no connection may be with two threads at once; each is armed anew when its thread is done with it."""
import random
import select
import socket
import sys
import threading


class Connection:
    def __init__(self, sock):
        self.sock = sock
        self.left = b""
        self.busy = threading.Lock()
        self.ended = False


def serve(port, how):
    once = how == "oneshot"
    listener = socket.create_server(("127.0.0.1", port), backlog=64)
    ep = select.epoll()
    flags = select.EPOLLONESHOT if once else select.EPOLLEXCLUSIVE
    known = {}

    def handle(conn, fd):
        # Returns False at the end of the stream.
        while True:
            if conn.left:
                try:
                    conn.left = conn.left[conn.sock.send(conn.left):]
                except BlockingIOError:
                    return select.EPOLLOUT
                continue
            try:
                data = conn.sock.recv(40000)
            except BlockingIOError:
                return select.EPOLLIN
            if not data:
                return 0
            conn.left = data

    def work():
        while True:
            for fd, _ in ep.poll():
                # An exclusive registration may wake several threads, and one of them has closed it by now.
                conn = known.get(fd)
                if conn is None:
                    continue
                if not conn.busy.acquire(blocking=False):
                    if once:
                        print("two threads have one connection", flush=True)
                    continue
                if conn.ended:
                    conn.busy.release()
                    continue
                wants = handle(conn, fd)
                # An exclusive registration cannot be changed: the rest waits for its turn here.
                while not once and wants == select.EPOLLOUT:
                    select.select([], [conn.sock], [])
                    wants = handle(conn, fd)
                if not wants:
                    conn.ended = True
                    ep.unregister(fd)
                    known.pop(fd)
                    conn.busy.release()
                    conn.sock.close()
                else:
                    conn.busy.release()
                    if once:
                        ep.modify(fd, wants | flags)

    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    while True:
        sock, _ = listener.accept()
        sock.setblocking(False)
        known[sock.fileno()] = Connection(sock)
        ep.register(sock, select.EPOLLIN | flags)


def one(port, seed, done):
    rng = random.Random(seed)
    sock = socket.create_connection(("127.0.0.1", port))
    sock.settimeout(60)
    for n in range(120):
        size = 400000 if n % 40 == 20 else rng.randint(1, 3000)
        message = rng.randbytes(size)
        sender = threading.Thread(target=sock.sendall, args=(message,))
        sender.start()
        got = bytearray()
        while len(got) < size:
            part = sock.recv(size - len(got))
            assert part, "the server has closed"
            got += part
        sender.join()
        assert got == message
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b""
    done.append(seed)


def client(port):
    done = []
    threads = [threading.Thread(target=one, args=(port, seed, done)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 8
    print("once: all bytes came back")


try:
    if sys.argv[1] == "server":
        serve(int(sys.argv[2]), sys.argv[3])
    else:
        client(int(sys.argv[2]))
except KeyboardInterrupt:
    pass
