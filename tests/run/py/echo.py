"""An asyncio echo server and a client that checks each byte: `echo.py server PORT`, `echo.py client PORT`."""
import asyncio
import random
import sys


async def serve(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def server(port):
    async with await asyncio.start_server(serve, "127.0.0.1", port) as s:
        await s.serve_forever()


async def one(port, seed):
    rng = random.Random(seed)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(200):
        message = rng.randbytes(rng.randint(1, 5000))
        writer.write(message)
        assert await reader.readexactly(len(message)) == message
    # More than any buffer holds, both ways at once.
    message = rng.randbytes(3 << 20)
    writer.write(message)
    assert await reader.readexactly(len(message)) == message
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


async def client(port):
    await asyncio.gather(*(one(port, seed) for seed in range(8)))
    print("all bytes came back")


try:
    asyncio.run({"server": server, "client": client}[sys.argv[1]](int(sys.argv[2])))
except KeyboardInterrupt:
    pass
