"""What a program sees of UDP sockets that no other host sends to.

local.py HOST: of that host's port 9 comes a refusal.
"""

import array
import ctypes
import errno
import fcntl
import os
import select
import socket
import sys
import termios
import threading

IP_RECVTTL = 12

# Programs that are started, while sockets which they inherit have datagrams that wait.
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
# What it sends goes through the kernel.
sender.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)


def fork():
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os.execv("/bin/true", ["true"])
        os.waitpid(child, 0)
    return 0


for start in lambda: os.system("true"), fork:
    socks = []
    for at in range(40):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        os.set_inheritable(sock.fileno(), True)
        for n in range(5):
            sender.sendto(b"first", sock.getsockname())
            sock.recv(100)
        sender.sendto(b"waits", sock.getsockname())
        socks.append(sock)
    print("started", start())
    print("left", sum(1 for sock in socks if select.select([sock], [], [], 0)[0] and sock.recv(100) == b"waits"))

# An error that waits stays one, whatever the program asks.
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.connect((sys.argv[1], 9))
sock.send(b"anybody?")
poll = select.poll()
poll.register(sock, 0)
print("poll", poll.poll(20000)[0][1] == select.POLLERR)
n = array.array("i", [7])
fcntl.ioctl(sock, termios.FIONREAD, n)
print("waiting", n[0])
try:
    print("received", sock.recv(100, socket.MSG_DONTWAIT))
except OSError as e:
    print("error", errno.errorcode[e.errno])

# So does one that ends a receive of several datagrams.
class Message(ctypes.Structure):
    _fields_ = [("header", ctypes.c_size_t * 7), ("len", ctypes.c_uint)]


near, far = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
for sock in near, far:
    sock.setsockopt(socket.IPPROTO_IP, IP_RECVTTL, 1)
    sock.bind(("127.0.0.1", 0))
near.connect(far.getsockname())
far.sendto(b"one", near.getsockname())
far.close()


def refuse():
    while select.select([near], [], [], 0)[0]:
        pass
    near.send(b"anybody?")


buffer = ctypes.create_string_buffer(100)
piece = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 100)
many = (Message * 4)(*(Message((0, 0, ctypes.addressof(piece), 1, 0, 0, 0)) for _ in range(4)))
thread = threading.Thread(target=refuse)
thread.start()
print("received", ctypes.CDLL(None).recvmmsg(near.fileno(), many, 4, 0, None), many[0].len)
thread.join()
poll = select.poll()
poll.register(near, 0)
print("poll", poll.poll(20000)[0][1] == select.POLLERR)
print("error", errno.errorcode.get(near.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))
