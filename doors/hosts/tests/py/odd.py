"""A server that gets frames, and then uses its socket in a way in which frames could be seen. It prints what it gets that no client of counted.py has sent.

odd.py CASE PORT READY

It serves until the file READY is there.
"""

import array
import ctypes
import mmap
import os
import select
import socket
import struct
import sys

case, port, ready = sys.argv[1], int(sys.argv[2]), sys.argv[3]
SO_PEEK_OFF, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 42, 22, 38
MSG_WAITFORONE = 0x10000
LIMIT = 20
ENOUGH = 60
libc = ctypes.CDLL(None, use_errno=True)


class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]


class Msghdr(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.POINTER(Iovec)),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


class Mmsghdr(ctypes.Structure):
    _fields_ = [("hdr", Msghdr), ("len", ctypes.c_uint)]


def judge(data, how=""):
    if not data.startswith(b"number "):
        print("wrong", how, data[:50], flush=True)


def read_many(sock):
    """What comes for a while: a client sends all the time."""
    for _ in range(ENOUGH):
        judge(sock.recv(2000), case)
    print("read", flush=True)


def odd_arguments(sock):
    fd, garbage = sock.fileno(), ctypes.c_void_p(16)
    buffer = ctypes.create_string_buffer(2000)
    iov = (Iovec * 1)(Iovec(ctypes.addressof(buffer), 2000))

    def check(how, n):
        if n < 0:
            print("wrong", how, os.strerror(ctypes.get_errno()), flush=True)
        judge(buffer.raw[: max(n, 0)], how)

    def message(name=None, control=None):
        return Msghdr(name, 0, iov, 1, control, 0, 0)

    libc.preadv2.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_int]
    for _ in range(5):
        check("control", libc.recvmsg(fd, ctypes.byref(message(control=16)), 0))
        check("name", libc.recvmsg(fd, ctypes.byref(message(name=16)), 0))
        check("length", libc.recvfrom(fd, buffer, 2000, 0, None, garbage))
        check("name of no length", libc.recvfrom(fd, buffer, 2000, 0, garbage, ctypes.byref(ctypes.c_uint32(0))))
        check("preadv2", libc.preadv2(fd, iov, 1, -1, 0))
        for count in (1024, 2000):
            many = (Mmsghdr * 1024)()
            for one in many:
                one.hdr = message()
            n = libc.recvmmsg(fd, many, count, MSG_WAITFORONE, None)
            check("recvmmsg", many[0].len if n > 0 else -1)
        # A list that ends before its last element.
        page = mmap.mmap(-1, 8192)
        base = ctypes.addressof(ctypes.c_char.from_buffer(page))
        libc.mprotect(ctypes.c_void_p(base + 4096), 4096, 0)
        one = Mmsghdr.from_address(base + 4096 - ctypes.sizeof(Mmsghdr))
        one.hdr = message()
        n = libc.recvmmsg(fd, ctypes.byref(one), 3, 0, None)
        check("recvmmsg of a short list", one.len if n == 1 else -1)
        libc.mprotect(ctypes.c_void_p(base + 4096), 4096, 3)
    # What the kernel refuses after it has taken a datagram.
    for name, length in [(garbage, ctypes.byref(ctypes.c_uint32(16))), (ctypes.create_string_buffer(16), garbage)]:
        n = libc.recvfrom(fd, buffer, 2000, 0, name, length)
        print("refused", n, os.strerror(ctypes.get_errno()), flush=True)


def execute(sock):
    """The program that is executed in a child knows the socket as a number only."""
    script = "import socket, sys; sock = socket.socket(fileno=int(sys.argv[1]))\nfor _ in range(%d): print('exec', sock.recv(2000), flush=True)" % ENOUGH
    os.set_inheritable(sock.fileno(), True)
    child = os.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", script, str(sock.fileno())])
    os.waitpid(child, 0)


def pass_on(sock):
    """A child passes the socket to another process, here itself: it has one more, of which weft knows nothing."""
    child = os.fork()
    if child == 0:
        near, far = socket.socketpair()
        near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [sock.fileno()]))])
        _, control, _, _ = far.recvmsg(1, 64)
        read_many(socket.socket(fileno=struct.unpack("i", control[0][2][:4])[0]))
        os._exit(0)
    os.waitpid(child, 0)


def beside(sock):
    """Another socket of the port gets the client's datagrams, and goes to another process, here itself, before it has received any."""
    _, addr = sock.recvfrom(2000)
    other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", LIMIT, 0))
    other.bind(("", port))
    other.connect(addr)
    near, far = socket.socketpair()
    near.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [other.fileno()]))])
    _, control, _, _ = far.recvmsg(1, 64)
    read_many(socket.socket(fileno=struct.unpack("i", control[0][2][:4])[0]))


def sandbox(sock):
    """A filter that allows everything."""
    select.select([sock], [], [])
    allow = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(allow)))
    print("no privileges", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    print("filter", libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0), flush=True)
    read_many(sock)


def peek_offset(sock):
    select.select([sock], [], [])
    sock.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 0)
    for _ in range(ENOUGH):
        data = sock.recv(4, socket.MSG_PEEK) + sock.recv(3, socket.MSG_PEEK)
        judge(data, "peek")
        judge(sock.recv(2000), "after peek")
        sock.setsockopt(socket.SOL_SOCKET, SO_PEEK_OFF, 0)
    print("read", flush=True)


sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
sock.bind(("", port))
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", LIMIT, 0))
print("bound", flush=True)
while not os.path.exists(ready):
    data, addr = sock.recvfrom(2000)
    judge(data)
    sock.sendto(data, addr)
print("framed", flush=True)
{"arguments": odd_arguments, "exec": execute, "rights": pass_on, "beside": beside, "seccomp": sandbox, "peek": peek_offset}[case](sock)
print("done", flush=True)
