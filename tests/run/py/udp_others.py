"""A receiver that never finds its ring empty hears of its other descriptors, too: `udp_others.py`. Prints what it found."""
import os
import select
import socket

# More than the kernel is asked after: 64 answers or 1 ms.
ENOUGH = 1000


def send_for_ever(address, gone):
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(address)
    while not select.select([gone], [], [], 0)[0]:
        for _ in range(100):
            try:
                sock.send(bytes(100))
            except ConnectionRefusedError:
                return


gone, leave = os.pipe()
with_address, address_out = os.pipe()
if os.fork() == 0:
    os.close(leave)
    address = ("127.0.0.1", int(os.read(with_address, 16)))
    send_for_ever(address, gone)
    os._exit(0)
os.close(gone)
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.bind(("127.0.0.1", 0))
os.write(address_out, str(receiver.getsockname()[1]).encode())
for _ in range(5000):
    receiver.recv(200)
for wait in ("select", "poll"):
    other, bell = os.pipe()
    poll = select.poll()
    poll.register(receiver, select.POLLIN)
    poll.register(other, select.POLLIN)

    def ready():
        if wait == "select":
            return [s if isinstance(s, int) else s.fileno() for s in select.select([receiver, other], [], [], 10)[0]]
        return [fd for fd, _ in poll.poll(10_000)]

    os.write(bell, b"x")
    rounds = 0
    while other not in (found := ready()):
        assert found == [receiver.fileno()], f"{wait}: {found}"
        receiver.recv(200)
        rounds += 1
        assert rounds < ENOUGH, f"{wait} has not told of the pipe"
    # A call that does not wait reports everything.
    found = set(select.select([receiver, other], [], [], 0)[0])
    assert other in found, found
    os.close(other)
    os.close(bell)
os.close(leave)
os.wait()
print("others: heard")
