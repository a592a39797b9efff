"""Sends the datagrams of a file, one in hexadecimal digits on each line, and prints what comes back.

send.py HOST PORT FILE
"""

import socket
import sys

sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
to = (sys.argv[1], int(sys.argv[2]))
for line in open(sys.argv[3]):
    sock.sendto(bytes.fromhex(line), to)
sock.settimeout(20)
# The last one is answered, after all others that are.
while True:
    data = sock.recv(70000)
    print("back", data, flush=True)
    if data == b"the last":
        break
