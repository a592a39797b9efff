"""Two connections from one port, to two servers, with one beginning and messages of the same lengths: `twins.py ADDRESS PORT ADDRESS PORT`."""
import socket
import sys
import time

socks = []
for at in (1, 3):
    until = time.monotonic() + 20
    while True:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", 4000))
        sock.settimeout(20)
        try:
            sock.connect((sys.argv[at], int(sys.argv[at + 1])))
            break
        except OSError:
            assert time.monotonic() < until
            sock.close()
            time.sleep(0.02)
    socks.append(sock)
for n in range(300):
    messages = [b"the same beginning"] * 2 if n < 10 else [b"%06d of %d" % (n, at) for at in (0, 1)]
    for sock, message in zip(socks, messages):
        sock.sendall(message)
    for sock, message in zip(socks, messages):
        got = b""
        while len(got) < len(message):
            got += sock.recv(100)
        assert got == message, (got, message)
for sock in socks:
    sock.close()
print("all bytes came back")
