"""What a program sees of UDP sockets that no other host sends to.

local.py HOST: of that host's port 9 comes a refusal.
"""

import array
import errno
import fcntl
import os
import select
import socket
import sys
import termios

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
