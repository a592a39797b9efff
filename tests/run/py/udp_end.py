"""A client of an echo of datagrams that shuts its socket down for reading while a thread waits for a datagram, and before another wait."""
import socket
import sys
import threading
import time

client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.connect(("127.0.0.1", int(sys.argv[1])))
client.settimeout(5)
for number in range(40):
    message = number.to_bytes(4, "big")
    client.send(message)
    assert client.recv(100) == message
client.settimeout(None)

ends = []
reader = threading.Thread(target=lambda: ends.append(client.recv(100)), daemon=True)
reader.start()
time.sleep(0.1)
client.shutdown(socket.SHUT_RD)
reader.join(10)
assert ends == [b""], "the thread still waits"
assert client.recv(100) == b""
print("both waits ended")
