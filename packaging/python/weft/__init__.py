"""RDMA on any machine: weft's program and libraries, for Python.

``python -m weft ARG...`` is the program ``weft`` itself. Programs and tests that were written for RDMA hardware run on the
libraries of this package without hardware, kernel module or root::

    python -m weft verbs -- pytest

The functions here say where the files are and what has to stand in the environment of a program that uses them. The pytest
plugin of this package (fixture ``rdma``, mark ``rdma_faults``) stands on them.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

__all__ = ["__version__", "Error", "environment", "libraries", "load", "program"]
__version__ = "@VERSION@"

_FILES = Path(__file__).resolve().parent / "_files"
_loaded: list[ctypes.CDLL] = []


class Error(RuntimeError):
    """weft cannot do what it was asked for; the text says why and what to do."""


def program() -> str:
    """The path of the program ``weft``."""
    return str(_FILES / "bin" / "weft")


def libraries() -> str:
    """The folder of ``libibverbs.so.1``, ``librdmacm.so.1`` and the preload libraries."""
    return str(_FILES / "lib")


def environment(
    *,
    devices: str | None = None,
    faults: str | os.PathLike[str] | None = None,
    log: str | None = None,
    local: str | None = None,
    sysfs: str | None = None,
) -> dict[str, str]:
    """What has to stand in the environment of a program, beside what stands in this one's, so that it runs on weft.

    The arguments are the options of ``weft verbs`` of the same names: ``devices`` a list with commas, ``faults`` the file of a
    script, ``log`` a level, ``local`` ``off``, ``auto`` or ``require``, ``sysfs`` ``preload`` or ``off``. Raises ``Error`` with
    weft's own words, for instance for a script of faults that means nothing.
    """
    command = [program(), "verbs", "--print-env", f"--lib={libraries()}"]
    options = {"devices": devices, "faults": faults, "log": log, "local": local, "sysfs": sysfs}
    command += [f"--{name}={os.fspath(value)}" for name, value in options.items() if value is not None]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Error(done.stderr.strip() or f"weft verbs --print-env ended with {done.returncode}")
    # lines `export NAME='VALUE'`, as a shell reads them
    words = (word for word in shlex.split(done.stdout) if word != "export")
    return dict(word.split("=", 1) for word in words)


def load() -> None:
    """Loads weft's libraries into this process, in place of the distribution's.

    Extension modules that are linked to ``libibverbs.so.1`` or ``librdmacm.so.1`` (pyverbs) and are imported afterwards use
    these. Raises ``Error`` when another ``libibverbs.so.1`` is in the process already. ``/sys`` and ``/dev`` show the devices only
    to programs that are started with ``environment()``.
    """
    if _loaded:
        return
    for name in ("libibverbs.so.1", "librdmacm.so.1"):
        path = str(Path(libraries()) / name)
        _other(name, path)
        _loaded.append(ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL))


def _other(name: str, ours: str) -> None:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            files = {line.split(None, 5)[5].strip() for line in maps if len(line.split(None, 5)) == 6}
    except OSError:
        return
    for file in files:
        if os.path.basename(file).startswith(name) and not file.startswith(os.path.dirname(ours)):
            raise Error(
                f"{file} is loaded already: call weft.load() before the first import that needs it, "
                "or start with `python -m weft verbs -- python ...`"
            )
