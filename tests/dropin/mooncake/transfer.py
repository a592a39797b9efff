"""64 MiB between two processes of Mooncake's transfer engine, written and read, the bytes checked.

usage: transfer.py rdma|tcp [DEVICE]: starts the other process itself, and prints `write MIB/S read MIB/S`, the medians of five each.
Memory is mapped and touched before, as in a pool.
"""

import ctypes
import json
import mmap
import statistics
import subprocess
import sys
import time

from mooncake.engine import TransferEngine

SIZE = 64 << 20
ROUNDS = 5


def engine(protocol, device):
    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, device) != 0:
        sys.exit("the engine does not start")
    memory = mmap.mmap(-1, SIZE)
    for at in range(0, SIZE, mmap.PAGESIZE):
        memory[at] = 1
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if made.register_memory(address, SIZE) != 0:
        sys.exit("the memory cannot be registered")
    return made, memory, address


def pattern(seed):
    """Every 4 KiB differ, and so do all rounds."""
    return b"".join((seed << 32 | at).to_bytes(8, "little") * 512 for at in range(SIZE // 4096))


def serve(protocol, device):
    """Tells where it is, then fills its memory, or says whether it is as it should be, as it is asked."""
    made, memory, address = engine(protocol, device)
    print(json.dumps([made.get_rpc_port(), address]), flush=True)
    for line in sys.stdin:
        what, seed = line.split()
        if what == "fill":
            memory[:] = pattern(int(seed))
        print(memory[:] == pattern(int(seed)), flush=True)


def main(protocol, device):
    command = [sys.executable, __file__, "serve", protocol, device]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer():
        # The engine prints too.
        for line in other.stdout:
            if line.startswith(("[", "True", "False")) and line.rstrip().endswith(("]", "True", "False")):
                return json.loads(line.lower())
        sys.exit("the other process is gone")

    def ask(what, seed):
        other.stdin.write(f"{what} {seed}\n")
        other.stdin.flush()
        return answer()

    try:
        port, remote = answer()
        made, memory, local = engine(protocol, device)
        target = f"127.0.0.1:{port}"
        rates = {"write": [], "read": []}
        for seed in range(1, ROUNDS + 1):
            memory[:] = pattern(seed)
            begin = time.monotonic()
            assert made.transfer_sync_write(target, local, remote, SIZE) == 0, "the write failed"
            rates["write"].append(SIZE / (time.monotonic() - begin) / (1 << 20))
            assert ask("check", seed), "the other process has other bytes"
            assert ask("fill", seed + 100)
            begin = time.monotonic()
            assert made.transfer_sync_read(target, local, remote, SIZE) == 0, "the read failed"
            rates["read"].append(SIZE / (time.monotonic() - begin) / (1 << 20))
            assert memory[:] == pattern(seed + 100), "other bytes were read"
        print(" ".join(f"{what} {statistics.median(rate):.0f}" for what, rate in rates.items()), flush=True)
    finally:
        other.kill()


if sys.argv[1] == "serve":
    serve(*sys.argv[2:])
else:
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
# The engine's threads do not all end by themselves.
sys.stdout.flush()
import os

os._exit(0)
