"""A UDP server and client of asyncio: every message comes back, asked for again when it is lost."""
import asyncio
import random
import sys


class Server(asyncio.DatagramProtocol):
    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, address):
        self.transport.sendto(data, address)


class Client(asyncio.DatagramProtocol):
    def __init__(self):
        self.waiting = {}

    def datagram_received(self, data, address):
        future = self.waiting.get(data[:4])
        if future and not future.done():
            future.set_result(data)


async def server(port):
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(Server, local_addr=("127.0.0.1", port))
    await asyncio.Event().wait()


async def client(port):
    loop = asyncio.get_running_loop()
    rng = random.Random(7)
    transport, protocol = await loop.create_datagram_endpoint(Client, remote_addr=("127.0.0.1", port))
    for number in range(400):
        message = number.to_bytes(4, "big") + rng.randbytes(rng.choice((0, 10, 1400, 9000)))
        answer = None
        for _ in range(20):
            protocol.waiting[message[:4]] = loop.create_future()
            transport.sendto(message)
            try:
                answer = await asyncio.wait_for(protocol.waiting[message[:4]], 2)
                break
            except asyncio.TimeoutError:
                pass
        assert answer == message, number
    transport.close()
    print("all messages came back")


try:
    asyncio.run({"server": server, "client": client}[sys.argv[1]](int(sys.argv[2])))
except KeyboardInterrupt:
    pass
