"""Opens many connections to an echo server, and exchanges messages on each in turn: `many.py PORT CONNECTIONS`."""
import socket
import sys

port, many = int(sys.argv[1]), int(sys.argv[2])
socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(many)]
for n in range(20):
    for at, sock in enumerate(socks):
        message = b"%d of %d" % (n, at)
        sock.sendall(message)
        got = b""
        while len(got) < len(message):
            got += sock.recv(100)
        assert got == message
print("all of", many, "are answered")
