"""FIONREAD and MSG_PEEK of a socket with several senders name the datagram that the next receive takes: `udp_named.py SEED`."""
import array
import fcntl
import random
import socket
import sys
import termios

rng = random.Random(int(sys.argv[1]))
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("127.0.0.1", 0))
receiver.setblocking(False)
senders = []
for _ in range(5):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.connect(receiver.getsockname())
    sock.setblocking(False)
    senders.append(sock)

number, taken = 0, 0


def send():
    global number
    number += 1
    # The longest do not fit a ring and go over the kernel.
    size = 65100 if rng.random() < 0.03 else rng.randint(9, 1200)
    try:
        rng.choice(senders).send(number.to_bytes(8, "big") + bytes(size))
    except BlockingIOError:
        pass


def waiting():
    buffer = array.array("i", [0])
    fcntl.ioctl(receiver, termios.FIONREAD, buffer)
    return buffer[0]


def named():
    what, got = rng.random(), []
    for _ in range(rng.randint(0, 2)):
        if what < 0.5:
            length = waiting()
            if length:
                got.append(("length", length))
        else:
            try:
                got.append(("bytes", receiver.recvfrom(70000, socket.MSG_PEEK)))
            except BlockingIOError:
                pass
        # Datagrams that come meanwhile change nothing.
        for _ in range(rng.randint(0, 2)):
            send()
    return got


for _ in range(30000):
    for _ in range(rng.randint(0, 2)):
        send()
    told = named()
    try:
        datagram = receiver.recvfrom(70000)
    except BlockingIOError:
        assert not told, told
        continue
    taken += 1
    for kind, value in told:
        if kind == "length":
            assert value == len(datagram[0]), (taken, value, len(datagram[0]))
        else:
            assert value == datagram, (taken, value[0][:8], datagram[0][:8])
print("named:", "thousands taken" if taken > 5000 else taken)
