"""What UDP promises where rings and the kernel's socket meet: checked, not compared.

`udp_calls.py`
"""
import fcntl
import os
import signal
import socket
import struct
import termios
import threading
import time


def bound():
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    return sock


def linked(receiver, *senders):
    """Sends until there is a ring from each."""
    for sender in senders:
        for n in range(40):
            sender.sendto(b"%d" % n, receiver.getsockname())
            assert receiver.recv(100) == b"%d" % n


def long_time_limit():
    receiver, sender = bound(), bound()
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", 2**62, 999_999))
    linked(receiver, sender)
    later = threading.Timer(0.2, sender.sendto, (b"late", receiver.getsockname()))
    later.start()
    assert receiver.recv(100) == b"late"
    later.join()


def signals():
    for by_ioctl in (False, True):
        receiver, sender = bound(), bound()
        linked(receiver, sender)
        came = threading.Event()
        signal.signal(signal.SIGIO, lambda *_: came.set())
        fcntl.fcntl(receiver, fcntl.F_SETOWN, os.getpid())
        if by_ioctl:
            fcntl.ioctl(receiver, termios.FIOASYNC, struct.pack("i", 1))
        else:
            fcntl.fcntl(receiver, fcntl.F_SETFL, fcntl.fcntl(receiver, fcntl.F_GETFL) | os.O_ASYNC)
        came.clear()
        sender.sendto(b"signal", receiver.getsockname())
        begun = time.monotonic()
        while not came.is_set():
            assert time.monotonic() - begun < 10, "no signal"
            time.sleep(0.01)
        assert receiver.recv(100) == b"signal"


def another_socket():
    """A later socket of the port that is connected to the sender gets what it sends from then on."""
    receiver, sender, own = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(3))
    for sock in (receiver, own):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    receiver.bind(("127.0.0.1", 0))
    sender.bind(("127.0.0.1", 0))
    linked(receiver, sender)
    own.bind(receiver.getsockname())
    own.connect(sender.getsockname())
    own.settimeout(10)
    for n in range(40):
        sender.sendto(b"%d" % n, receiver.getsockname())
        assert own.recv(100) == b"%d" % n


long_time_limit()
signals()
another_socket()
print("udp calls: good")
