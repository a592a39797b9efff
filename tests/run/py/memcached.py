"""Sets and gets values of many sizes on four connections: `memcached.py PORT`."""
import random
import socket
import sys

rng = random.Random(1)
count = 0
connections = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(4)]
files = [(c, c.makefile("rb")) for c in connections]
for n in range(100):
    for k, (c, f) in enumerate(files):
        value = rng.randbytes(rng.choice((1, 100, 5000, 200000)))
        c.sendall(b"set k%d.%d 0 0 %d\r\n%s\r\n" % (k, n, len(value), value))
        assert f.readline() == b"STORED\r\n"
        c.sendall(b"get k%d.%d\r\n" % (k, n))
        assert f.readline() == b"VALUE k%d.%d 0 %d\r\n" % (k, n, len(value))
        assert f.read(len(value) + 2) == value + b"\r\n"
        assert f.readline() == b"END\r\n"
        count += 1
print(f"memcached: {count} values")
