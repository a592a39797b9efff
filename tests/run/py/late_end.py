"""The end of a stream that comes late: the loopback interface is down while one end shuts down, so that the FIN is sent again later. In a network namespace
of its own. An end that is told that it can read reads the end then, and not "try again"."""
import select
import socket
import subprocess
import threading
import time


def lo(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


lo("up")
with socket.create_server(("127.0.0.1", 0)) as listener:
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
for end in (a, b):
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for n in range(30):
    for one, other in ((a, b), (b, a)):
        one.sendall(b"%010d" % n)
        assert other.recv(10) == b"%010d" % n
b.setblocking(False)
poller = select.epoll()
poller.register(b, select.EPOLLIN | select.EPOLLET)
lo("down")
a.shutdown(socket.SHUT_WR)


def later():
    time.sleep(0.1)
    lo("up")


threading.Thread(target=later).start()
events = []
while not any(event & select.EPOLLIN for _, event in events):
    events = poller.poll(30)
    assert events, "nobody says that it has ended"
print("end:", b.recv(10))
