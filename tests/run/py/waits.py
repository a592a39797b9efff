"""Makes calls on a connection, and says the last error, and the longest call and all together in milliseconds. Every message that begins the connection is answered, so that
the ends meet; the two last bytes of the beginning are G and what to do."""
import errno
import select
import signal
import socket
import struct
import time

# A call that does not return ends the test.
signal.alarm(20)
listener = socket.create_server(("127.0.0.1", 0))
print("port", listener.getsockname()[1], flush=True)


def calls(sock, what):
    """Each call of a kind."""
    if what == b"L":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 300_000))
        yield lambda: sock.recv(10)
        return
    sock.setblocking(False)
    polled = select.epoll()
    if what == b"E":
        polled.register(sock, select.EPOLLIN)
    for _ in range(2000 if what == b"S" else 200):
        if what == b"E":
            polled.poll(0.005)
        else:
            time.sleep(0.005)
        yield (lambda: sock.send(b"hello")) if what == b"S" else lambda: sock.recv(10)


sock, _ = listener.accept()
while (data := sock.recv(1)) != b"G":
    sock.sendall(data)
longest, total, end = 0, 0, "none"
what = sock.recv(1)
for call in calls(sock, what):
    begun = time.monotonic()
    try:
        call()
    except OSError as error:
        end = errno.errorcode[error.errno]
    took = time.monotonic() - begun
    longest, total = max(longest, took), total + took
    if end == "ECONNRESET" or end != "none" and what == b"S":
        break
print(end, round(longest * 1000), round(total * 1000), flush=True)
