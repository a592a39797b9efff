"""Two ends of one TCP connection that end it, or send it back to TCP, after the first messages, and print what the client is told.

ends.py server PORT HOW | client HOST PORT HOW
"""

import array
import fcntl
import select
import socket
import sys
import termios
import time

ROUNDS = 40
ZEROCOPY = 60


def wait_for_bytes(sock, n):
    left = array.array("i", [0])
    while left[0] < n:
        fcntl.ioctl(sock.fileno(), termios.FIONREAD, left)
        time.sleep(0.01)


def receive(sock):
    try:
        return f"{len(sock.recv(100))} bytes"
    except OSError as error:
        return type(error).__name__


def server(port, how):
    with socket.create_server(("", port)) as listener:
        sock, _ = listener.accept()
    for _ in range(ROUNDS):
        sock.sendall(sock.recv(100))
    if how == "close":
        wait_for_bytes(sock, 1000)
        sock.close()
        return
    if how == "pass":
        wait_for_bytes(sock, 1000)
        near, far = socket.socketpair()
        socket.send_fds(near, [b"x"], [sock.fileno()])
        _, (fd,), _, _ = socket.recv_fds(far, 10, 1)
        sock.close()
        taken = socket.socket(fileno=fd)
        print("taken:", receive(taken), "then", receive(taken))
        return
    while data := sock.recv(100):
        sock.sendall(data)


def client(host, port, how):
    sock = socket.create_connection((host, port))
    events = select.epoll()
    events.register(sock, select.EPOLLIN | select.EPOLLRDHUP)
    for _ in range(ROUNDS):
        sock.sendall(b"x" * 17)
        time.sleep(0.02)
        assert len(sock.recv(100)) == 17
    if how in ("close", "pass"):
        sock.sendall(b"y" * 1000)
        told = events.poll(20)
        print("told:", [hex(event) for _, event in told])
        print("client:", receive(sock), "then", receive(sock))
        return
    if how == "lowat":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 5)
    elif how == "zerocopy":
        sock.setsockopt(socket.SOL_SOCKET, ZEROCOPY, 1)
    else:
        sock.send(b"!", socket.MSG_OOB)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        for _, event in events.poll(0.05):
            print(f"wrong event {event:#x}")
            return
    sock.sendall(b"z" * 17)
    print("event:", [hex(event) for _, event in events.poll(20)], receive(sock))


print(flush=True)
if sys.argv[1] == "server":
    server(int(sys.argv[2]), sys.argv[3])
else:
    client(sys.argv[2], int(sys.argv[3]), sys.argv[4])
