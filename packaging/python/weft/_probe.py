"""Opens every device of the libibverbs that this process finds and prints what it has, as JSON. The pytest plugin runs it as
a program of its own, so that what it finds is what other programs will find."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from ipaddress import IPv6Address


def devices() -> dict[str, list[str]]:
    """The GIDs of each device."""
    verbs = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    verbs.ibv_open_device.restype = ctypes.c_void_p
    verbs.ibv_open_device.argtypes = [ctypes.c_void_p]
    verbs.ibv_query_gid.argtypes = [ctypes.c_void_p, ctypes.c_uint8, ctypes.c_int, ctypes.c_char_p]
    verbs.ibv_close_device.argtypes = [ctypes.c_void_p]
    verbs.ibv_free_device_list.argtypes = [ctypes.POINTER(ctypes.c_void_p)]

    count = ctypes.c_int()
    every = verbs.ibv_get_device_list(ctypes.byref(count))
    if not every:
        raise OSError(ctypes.get_errno(), "ibv_get_device_list: " + os.strerror(ctypes.get_errno()))
    found = {}
    for index in range(count.value):
        name = verbs.ibv_get_device_name(every[index]).decode()
        context = verbs.ibv_open_device(every[index])
        if not context:
            raise OSError(ctypes.get_errno(), f"ibv_open_device of {name}: " + os.strerror(ctypes.get_errno()))
        gids = []
        gid = ctypes.create_string_buffer(16)
        for entry in range(256):
            if verbs.ibv_query_gid(context, 1, entry, gid) != 0:
                break
            if any(gid.raw):
                gids.append(str(IPv6Address(gid.raw)))
        verbs.ibv_close_device(context)
        found[name] = gids
    verbs.ibv_free_device_list(every)
    return found


if __name__ == "__main__":
    try:
        json.dump(devices(), sys.stdout)
    except OSError as problem:
        sys.exit(f"no soft device: {problem.strerror or problem}")
