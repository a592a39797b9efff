"""pytest plugin: the fixture ``rdma``, and the mark ``rdma_faults`` for faults on purpose.

A test that has the fixture runs with weft's environment: whatever it starts sees the devices ``weft0`` (iWARP) and ``weft_ib0``
(looks like InfiniBand). ::

    def test_ping(rdma):
        server = rdma.popen("rping", "-s", "-a", rdma.address, "-C", "10")
        rdma.run("rping", "-c", "-a", rdma.address, "-C", "10")

    @pytest.mark.rdma_faults("send 5 on 1: die")
    def test_a_peer_that_dies(rdma): ...
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest

import weft

MARK = "rdma_faults(line, ...): faults that weft injects into what the test starts; the lines are those of `weft verbs --faults`"


@dataclass
class Rdma:
    """Soft devices, and how programs come to them."""

    #: what stands in the environment of each program that the test starts, beside the rest of it
    environment: dict[str, str]
    #: the GIDs of each device
    gids: dict[str, list[str]]
    #: the script of faults, if the test has any
    faults: Path | None = None
    _started: list[subprocess.Popen[Any]] = field(default_factory=list)

    @property
    def devices(self) -> list[str]:
        """The names of the devices, in the order in which programs see them."""
        return list(self.gids)

    @property
    def addresses(self) -> list[str]:
        """The addresses of this host that the devices can be reached at, loopback last."""
        found: list[str] = []
        for gid in (IPv6Address(gid) for gids in self.gids.values() for gid in gids):
            address = gid.ipv4_mapped
            if address is not None and str(address) not in found:
                found.append(str(address))
        return found or ["127.0.0.1"]

    @property
    def address(self) -> str:
        """An address for two programs of one test: loopback."""
        return next((address for address in self.addresses if address.startswith("127.")), self.addresses[0])

    def run(self, *command: str | os.PathLike[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Runs a program to its end, as subprocess.run does; a failure raises, and so does a minute without an end."""
        options = {"check": True, "timeout": 60, **options}
        return subprocess.run(command, **self._inherit(options))

    def popen(self, *command: str | os.PathLike[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a program; if it still runs when the test is over, it is killed."""
        process = subprocess.Popen(command, **self._inherit(options))
        self._started.append(process)
        return process

    def load(self) -> None:
        """Has this very process use weft; see weft.load."""
        weft.load()

    def _inherit(self, options: dict[str, Any]) -> dict[str, Any]:
        if options.get("env") is not None:
            options["env"] = {**options["env"], **self.environment}
        return options

    def _end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARK)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        names = getattr(item, "fixturenames", None)
        if names is not None and "rdma" not in names and item.get_closest_marker("rdma_faults") is not None:
            names.insert(0, "rdma")


@pytest.fixture(scope="session")
def _rdma_gids() -> dict[str, list[str]]:
    """Starts the devices once, in a process of its own, so that a machine on which they do not start is told apart from a
    test that fails."""
    probe = Path(__file__).with_name("_probe.py")
    environment = {**os.environ, **weft.environment()}
    done = subprocess.run(
        [sys.executable, "-I", str(probe)], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        pytest.fail(f"{done.stderr.strip()}\n`python -m weft doctor` says what this machine allows", pytrace=False)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.fixture
def rdma(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    _rdma_gids: dict[str, list[str]],
) -> Iterator[Rdma]:
    """Soft RDMA devices for what the test starts."""
    lines = [line for mark in reversed(list(request.node.iter_markers("rdma_faults"))) for line in mark.args]
    script = None
    if lines:
        script = tmp_path / "rdma-faults"
        script.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    try:
        environment = weft.environment(faults=script)
    except weft.Error as error:
        pytest.fail(str(error), pytrace=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    device = Rdma(environment, _rdma_gids, script)
    yield device
    device._end()
