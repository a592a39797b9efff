"""A client that sends numbered datagrams until it is killed, and a server that prints and returns them.

counted.py server PORT [INTERFACE] | client HOST PORT [OWN-PORT]

With an interface ("any": all of them) the server shares its port with others.
With a port of its own the client looks for the longest packet that gets there (IP_PMTUDISC_PROBE).
"""

import socket
import sys
import time

IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3

sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if sys.argv[1] == "server":
    if len(sys.argv) > 3:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.argv[3] != "any":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, sys.argv[3].encode())
    sock.bind(("", int(sys.argv[2])))
    print("bound", flush=True)
    while True:
        data, addr = sock.recvfrom(70000)
        print("got", data, addr[0], flush=True)
        sock.sendto(data, addr)
if len(sys.argv) > 4:
    sock.bind(("", int(sys.argv[4])))
    sock.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
to, n = (sys.argv[2], int(sys.argv[3])), 0
while True:
    n += 1
    sock.sendto(b"number %d" % n, to)
    time.sleep(0.005)
    try:
        while True:
            data = sock.recv(70000, socket.MSG_DONTWAIT)
            if not data.startswith(b"number "):
                print("wrong", data, flush=True)
    except (BlockingIOError, ConnectionRefusedError):
        pass
