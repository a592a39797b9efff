"""Receives on connection after connection, and says how each ended. Every message that begins a connection is answered, so that the ends meet."""
import errno
import socket

listener = socket.create_server(("127.0.0.1", 0))
print("port", listener.getsockname()[1], flush=True)
while True:
    sock, _ = listener.accept()
    sock.settimeout(20)
    got = 0
    try:
        while (data := sock.recv(1)) not in (b"", b"G"):
            sock.sendall(data)
        while data := sock.recv(1 << 20):
            got += len(data)
            if data == b"bye":
                raise SystemExit
        print("end after", got, flush=True)
    except OSError as error:
        print(errno.errorcode.get(error.errno, str(error)), "after", got, flush=True)
    sock.close()
