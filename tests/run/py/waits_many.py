"""Receives, without waiting, on as many connections as it is told: `waits_many.py CONNECTIONS`. Says the longest call and all together in milliseconds."""
import errno
import signal
import socket
import sys
import time

signal.alarm(30)
listener = socket.create_server(("127.0.0.1", 0))
print("port", listener.getsockname()[1], flush=True)
socks = []
for _ in range(int(sys.argv[1])):
    sock, _ = listener.accept()
    while (data := sock.recv(1)) != b"G":
        sock.sendall(data)
    sock.setblocking(False)
    socks.append(sock)
print("ready", flush=True)
sys.stdin.readline()
longest, total = 0, 0
for _ in range(20):
    for sock in socks:
        begun = time.monotonic()
        try:
            sock.recv(10)
        except OSError as error:
            assert error.errno == errno.EAGAIN, error
        took = time.monotonic() - begun
        longest, total = max(longest, took), total + took
print(round(longest * 1000), round(total * 1000), flush=True)
