"""Two processes that write to and read from each other's memory by NIXL (the wheel nixl-cu12) on its UCX plugin.

transfer.py MIB: starts its peer itself, talks to it by a pipe, and says how fast the transfers were.
"""

import multiprocessing
import os
import sys
import time

import numpy as np
from nixl_cu12 import _api as nixl


def agent(name, size):
    one = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(size, dtype=np.uint8)
    place = (memory.ctypes.data, size, 0)
    held = one.register_memory([(*place, "")], "DRAM")
    return one, memory, place, held


def target(line, size):
    one, memory, place, held = agent("target", size)
    line.send((one.get_agent_metadata(), place))
    # Progress is the plugin's own thread's.
    line.recv()
    line.send(memory.tobytes() == pattern(size, 1).tobytes())
    line.recv()
    memory[:] = pattern(size, 2)
    line.send(True)
    line.recv()
    one.deregister_memory(held)
    leave(0)


def leave(status):
    """Ends without Python's end: on UCX's own TCP the wheel's plugin crashes in it."""
    sys.stdout.flush()
    os._exit(status)


def pattern(size, seed):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def move(one, what, mine, theirs, peer):
    handle = one.initialize_xfer(what, mine, theirs, peer)
    began = time.monotonic()
    state = one.transfer(handle)
    while state != "DONE":
        assert state != "ERR", what
        state = one.check_xfer_state(handle)
    took = time.monotonic() - began
    one.release_xfer_handle(handle)
    return took


def main():
    mib = int(sys.argv[1])
    size = mib << 20
    line, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(other, size))
    process.start()
    one, memory, place, held = agent("initiator", size)
    metadata, there = line.recv()
    peer = one.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    mine, theirs = one.get_xfer_descs([place], "DRAM"), one.get_xfer_descs([there], "DRAM")
    memory[:] = pattern(size, 1)
    wrote = min(move(one, "WRITE", mine, theirs, peer) for _ in range(3))
    line.send("look")
    assert line.recv(), "the target has other bytes"
    line.send("fill")
    line.recv()
    read = min(move(one, "READ", mine, theirs, peer) for _ in range(3))
    assert (memory == pattern(size, 2)).all(), "other bytes were read"
    line.send("end")
    process.join()
    one.remove_remote_agent(peer)
    one.deregister_memory(held)
    print(f"nixl: {mib} MiB written at {mib / wrote:.0f} MiB/s, read at {mib / read:.0f} MiB/s, all bytes right")
    leave(process.exitcode)


if __name__ == "__main__":
    main()
