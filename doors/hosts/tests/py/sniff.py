"""Writes the UDP datagrams of a port that pass an interface to a file, and makes a file once frames of datagram-iWARP have passed in both directions.

sniff.py PORT LOG READY
"""

import ipaddress
import socket
import struct
import sys

SO_RCVBUFFORCE = 33

port, log, ready = int(sys.argv[1]), open(sys.argv[2], "w"), sys.argv[3]
sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.ntohs(3))
sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 32 << 20)
sock.bind(("weft0", 0))
print("sniffs", flush=True)
framed = set()
while True:
    packet = sock.recv(70000)
    if packet[0] >> 4 == 4:
        start, proto = (packet[0] & 15) * 4, packet[9]
        fragment = struct.unpack("!H", packet[6:8])[0] & 0x1FFF
        ends = packet[12:16], packet[16:20]
    else:
        start, proto, fragment, ends = 40, packet[6], 0, (packet[8:24], packet[24:40])
    if proto != 17 or fragment:
        continue
    ports = struct.unpack("!HH", packet[start : start + 4])
    if port not in ports:
        continue
    length = struct.unpack("!H", packet[start + 4 : start + 6])[0]
    payload = packet[start + 8 : start + length]
    names = [str(ipaddress.ip_address(end)) for end in ends]
    print(names[0], ports[0], names[1], ports[1], payload.hex() or "-", file=log, flush=True)
    if payload[:1] == b"W" and payload[1:2] in (b"\x10", b"\x20"):
        framed.add(ports)
        if len(framed) == 2 and ready:
            open(ready, "w").close()
            ready = None
