"""A client that has ended its direction is killed with bytes unread: `half_end.py ADDRESS OTHER`, two addresses. Says what the server's next receive gives."""
import errno
import os
import signal
import socket
import sys
import time

place = (sys.argv[1], 8000)
if len(sys.argv) > 3:
    sock = socket.create_connection(place, source_address=(sys.argv[2], 0))
    sock.sendall(b"x" * 16)
    sock.shutdown(socket.SHUT_WR)
    for _ in range(40):
        assert sock.recv(1) == b"y"
        os.write(1, b".")
    signal.pause()
listener = socket.create_server(place)
out, into = os.pipe()
pid = os.posix_spawn(sys.executable, [sys.executable, *sys.argv, "client"], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, into, 1)])
sock, _ = listener.accept()
assert sock.recv(16, socket.MSG_WAITALL) == b"x" * 16
for _ in range(40):
    sock.sendall(b"y")
    os.read(out, 1)
assert sock.recv(1) == b""
sock.sendall(b"not read")
os.kill(pid, signal.SIGKILL)
os.waitpid(pid, 0)
time.sleep(0.2)
try:
    print("then", sock.recv(1), flush=True)
except OSError as error:
    print("then", errno.errorcode[error.errno], flush=True)
