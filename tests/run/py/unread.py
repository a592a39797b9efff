"""Reads a part of what has come, and becomes another program, which goes on with the socket: `unread: N bytes` is what that gets."""
import os
import socket
import sys
import time

REST = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
try:
    got = sock.recv(2000)
except ConnectionResetError:
    got = b""
assert not got.startswith(b"y"), "the stream goes on behind what was not read"
print(f"unread: {len(got)} bytes")
"""

listener = socket.create_server(("127.0.0.1", 0))
if os.fork() == 0:
    sock = socket.create_connection(listener.getsockname())
    for _ in range(300):
        sock.sendall(sock.recv(10))
    sock.sendall(b"x" * 1000)
    sock.recv(1)
    time.sleep(0.2)
    try:
        sock.sendall(b"y" * 500)
    except OSError:
        pass
    os._exit(0)
sock, _ = listener.accept()
for n in range(300):
    sock.sendall(b"%010d" % n)
    assert sock.recv(10) == b"%010d" % n
got = b""
while len(got) < 10:
    got += sock.recv(10 - len(got))
sock.sendall(b"!")
os.set_inheritable(sock.fileno(), True)
os.execv(sys.executable, [sys.executable, "-c", REST, str(sock.fileno())])
