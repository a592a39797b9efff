"""An echo between containers: `containers.py server ADDRESS PORT CONNECTIONS`, `containers.py client ADDRESS PORT tls|plain CONNECTIONS`. `tls` begins as TLS does."""
import os
import select
import socket
import sys
import time

side, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])


def exchange(sock, message):
    sock.sendall(message)
    got = b""
    while len(got) < len(message):
        got += sock.recv(1 << 16)
    assert got == message


if side == "server":
    listener = socket.create_server((address, port))
    many = int(sys.argv[4])
    polled = select.poll()
    polled.register(listener, select.POLLIN)
    by_fd = {}
    ended = 0
    while ended < many:
        for fd, _ in polled.poll():
            if fd == listener.fileno():
                sock, _ = listener.accept()
                by_fd[sock.fileno()] = sock
                polled.register(sock, select.POLLIN)
                continue
            data = by_fd[fd].recv(1 << 16)
            if data:
                by_fd[fd].sendall(data)
            else:
                polled.unregister(fd)
                by_fd.pop(fd).close()
                ended += 1
else:
    # A record with a ClientHello, and its random bytes.
    hello = b"\x16\x03\x01\x00\x60\x01\x00\x00\x5c\x03\x03"
    until = time.monotonic() + 20
    while True:
        try:
            socks = [socket.create_connection((address, port), timeout=20) for _ in range(int(sys.argv[5]))]
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.02)
    for sock in socks:
        exchange(sock, hello + os.urandom(90) if sys.argv[4] == "tls" else b"the same beginning of all")
    for n in range(200):
        for at, sock in enumerate(socks):
            exchange(sock, b"%d of connection %d" % (n, at) * 20)
    for sock in socks:
        exchange(sock, os.urandom(1 << 16))
        sock.close()
    print("all bytes came back")
