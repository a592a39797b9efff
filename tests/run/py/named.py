"""One connection between two given ports, with messages both ways: `named.py server|client PORT PORT`."""
import socket
import sys

side, server, client = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if side == "server":
    listener = socket.create_server(("127.0.0.1", server))
    sock, _ = listener.accept()
    while data := sock.recv(100):
        sock.sendall(data)
else:
    sock = socket.create_connection(("127.0.0.1", server), source_address=("127.0.0.1", client))
    sock.settimeout(20)
    for n in range(600):
        message = b"message %d" % n
        sock.sendall(message)
        got = b""
        while len(got) < len(message):
            got += sock.recv(100)
        assert got == message
    print("all bytes came back")
sock.close()
