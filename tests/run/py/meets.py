"""Echoes each byte of a connection, while its peer tests how the two ends meet. Some bytes do something before: D takes all low numbers of descriptors, F starts a child that
closes the connection and ends, E and R change the effective user and back, ? says whether the numbers of D are open still.
K starts a child that closes the connection and ends with standard input, and P leaves the connection to one.
C closes the connection: as after its end, the next one follows. Z closes standard input, and N says
which low numbers are new since then, and whether the program can close them."""
import os
import signal
import socket

# A call that does not return ends the test.
signal.alarm(60)
listener = socket.create_server(("127.0.0.1", 0))
print("port", listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
taken = [fd for fd in range(3, 64) if fd not in (listener.fileno(), sock.fileno())]


def is_open(fd):
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False


def closes(fd):
    try:
        os.close(fd)
        return True
    except OSError:
        return False


is_child = False
while True:
    byte = sock.recv(1)
    if byte == b"" and is_child:
        os._exit(0)
    if byte in (b"", b"C"):
        sock.close()
        sock, _ = listener.accept()
        continue
    if byte == b"D":
        for fd in taken:
            os.dup2(2, fd)
    elif byte == b"F":
        child = os.fork()
        if child == 0:
            sock.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    elif byte in (b"K", b"P"):
        out, into = os.pipe()
        is_child = os.fork() == 0
        if is_child:
            signal.alarm(60)
        if is_child == (byte == b"K"):
            sock.close()
            os.write(into, b"!")
            # The test ends this.
            os.read(0, 1)
            os._exit(0)
        os.read(out, 1)
    elif byte == b"E":
        os.seteuid(12345)
    elif byte == b"R":
        os.seteuid(0)
    elif byte == b"Z":
        os.close(0)
        before = [fd for fd in range(64) if is_open(fd)]
    elif byte == b"N":
        new = [fd for fd in range(64) if is_open(fd) and fd not in before]
        low = sum(fd < 3 for fd in new)
        print(f"{len(new)} new, {low} of them low, {sum(map(closes, new))} can be closed", flush=True)
    elif byte == b"?":
        for fd in taken:
            os.fstat(fd)
        print("all are open", flush=True)
    sock.sendall(byte)
