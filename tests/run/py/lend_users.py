"""Sends large buffers that a sender may lend: `lend_users.py server|client PORT MODE`. The client checks them."""
import mmap
import socket
import sys

LEN, ROUNDS = 1 << 20, 40
side, port = sys.argv[1], int(sys.argv[2])
if side == "server":
    sock, _ = socket.create_server(("127.0.0.1", port)).accept()
    memory = mmap.mmap(-1, LEN, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for n in range(ROUNDS):
        memory[:] = bytes([n]) * LEN
        sock.sendall(memory)
        assert sock.recv(1) == b"."
else:
    sock = socket.create_connection(("127.0.0.1", port))
    for n in range(ROUNDS):
        got = bytearray()
        while len(got) < LEN:
            got += sock.recv(LEN - len(got))
        assert got == bytes([n]) * LEN, n
        sock.sendall(b".")
sock.close()
