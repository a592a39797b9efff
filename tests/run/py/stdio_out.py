"""A stream of the C library writes to a connection in which bytes wait: `stdio_out.py server|client PORT`."""
import ctypes
import os
import select
import socket
import sys

side, port = sys.argv[1], int(sys.argv[2])
if side == "server":
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    sock, _ = socket.create_server(("127.0.0.1", port)).accept()
    for _ in range(40):
        sock.sendall(sock.recv(1))
    select.select([sock], [], [])
    stream = ctypes.c_void_p(libc.fdopen(os.dup(sock.fileno()), b"w"))
    assert libc.fwrite(b"answer", 1, 6, stream) == 6
    assert libc.fclose(stream) == 0
    assert sock.recv(100) == b"a question"
else:
    sock = socket.create_connection(("127.0.0.1", port))
    for _ in range(40):
        sock.sendall(b"x")
        assert sock.recv(1) == b"x"
    sock.sendall(b"a question")
    assert sock.recv(6, socket.MSG_WAITALL) == b"answer"
    assert sock.recv(1) == b""
    print("all bytes came back")
sock.close()
