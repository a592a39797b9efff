"""What the wheel has to do where it is installed. packaging/python/test runs this in a virtual environment without a compiler."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

import weft

WEFT = [sys.executable, "-m", "weft"]

# A stream of bytes through rsockets, called from Python: RDMA from end to end, and nothing to compile.
RSOCKETS = """
import ctypes, hashlib, socket, struct, sys
cm = ctypes.CDLL("librdmacm.so.1", use_errno=True)
cm.rsend.restype = cm.rrecv.restype = ctypes.c_ssize_t
for name in ("rsend", "rrecv"):
    getattr(cm, name).argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def check(what, value):
    if value < 0:
        raise OSError(ctypes.get_errno(), what)
    return value

def address(port):
    packed = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton("127.0.0.1") + bytes(8)
    return ctypes.create_string_buffer(packed, 16), 16

data = bytes(range(256)) * 4096
fd = check("rsocket", cm.rsocket(socket.AF_INET, socket.SOCK_STREAM, 0))
if sys.argv[1] == "server":
    check("rbind", cm.rbind(fd, *address(0)))
    check("rlisten", cm.rlisten(fd, 1))
    name, length = ctypes.create_string_buffer(16), ctypes.c_uint(16)
    check("rgetsockname", cm.rgetsockname(fd, name, ctypes.byref(length)))
    print(struct.unpack_from("!H", name.raw, 2)[0], flush=True)
    peer = check("raccept", cm.raccept(fd, None, None))
    got, room = b"", ctypes.create_string_buffer(65536)
    while len(got) < len(data):
        count = check("rrecv", cm.rrecv(peer, room, len(room), 0))
        if count == 0:
            break
        got += room.raw[:count]
    check("rclose", cm.rclose(peer))
    sys.exit(got != data)
check("rconnect", cm.rconnect(fd, *address(int(sys.argv[2]))))
sent = 0
while sent < len(data):
    sent += check("rsend", cm.rsend(fd, data[sent:], len(data) - sent, 0))
check("rclose", cm.rclose(fd))
"""


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)


def inner(tmp_path, text, *arguments):
    """A session of pytest of its own, on one file."""
    file = tmp_path / "test_inner.py"
    file.write_text(textwrap.dedent(text))
    return python("-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, str(file), cwd=tmp_path)


def test_no_compiler_is_here():
    assert not any(shutil.which(name) for name in ("cc", "gcc", "clang", "c++", "cargo", "rustc"))


def test_the_program_gets_every_argument_and_gives_its_status():
    assert python("-m", "weft", "--version").stdout == f"weft {weft.__version__}\n"
    assert subprocess.run(["weft", "--version"], capture_output=True, text=True).stdout == f"weft {weft.__version__}\n"
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    done = subprocess.run([*WEFT, "verbs", "--", sys.executable, "-c", code, "a b", "-x"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "['a b', '-x']\n"), done.stderr
    assert python("-m", "weft", "no-such-thing").returncode == 2
    process = subprocess.Popen([*WEFT, "verbs", "--", "sleep", "60"])
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == -signal.SIGTERM


def test_a_program_is_looked_for_in_the_environments_folder_first():
    bare = {**os.environ, "PATH": os.defpath}
    done = python("-m", "weft", "verbs", "--", "python", "-c", "import sys; print(sys.prefix)", env=bare)
    assert done.stdout.strip() == sys.prefix, done.stderr


def test_run_and_fs_find_their_libraries():
    for command in (["run"], ["fs", "run"], ["advise"]):
        done = python("-m", "weft", *command, "--", "true")
        assert done.returncode == 0, (command, done.stderr)


def test_python_m_weft_verbs_pytest(tmp_path):
    (tmp_path / "test_one.py").write_text(
        "import ctypes\n"
        "def test_one():\n"
        "    verbs = ctypes.CDLL('libibverbs.so.1')\n"
        "    verbs.ibv_get_device_list.restype = ctypes.c_void_p\n"
        "    count = ctypes.c_int()\n"
        "    assert verbs.ibv_get_device_list(ctypes.byref(count)) and count.value >= 2\n"
    )
    done = subprocess.run([*WEFT, "verbs", "--", "pytest", "-q"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_settings_that_mean_nothing_are_refused_with_wefts_words():
    with pytest.raises(weft.Error, match="no-such-file"):
        weft.environment(faults="no-such-file")
    with pytest.raises(weft.Error, match="devices"):
        weft.environment(devices="mlx5_0")
    assert weft.environment(devices="weft_ib0")["WEFT_DEVICES"] == "weft_ib0"


def test_the_fixture_has_devices_and_addresses(rdma):
    assert rdma.devices == ["weft0", "weft_ib0"]
    assert rdma.address == "127.0.0.1" and rdma.address in rdma.addresses
    assert all(rdma.gids.values()) and rdma.faults is None
    assert os.environ["LD_LIBRARY_PATH"].split(":")[0] == weft.libraries()


def test_what_a_test_starts_sees_the_devices_in_sys(rdma):
    done = rdma.run("ls", "/sys/class/infiniband", capture_output=True, text=True)
    assert done.stdout.split() == ["weft0", "weft_ib0"]


@pytest.mark.parametrize("local", ["auto", "off"])
def test_bytes_come_through_rsockets(rdma, monkeypatch, local):
    monkeypatch.setenv("WEFT_LOCAL", local)
    server = rdma.popen(sys.executable, "-c", RSOCKETS, "server", stdout=subprocess.PIPE, text=True)
    rdma.run(sys.executable, "-c", RSOCKETS, "client", server.stdout.readline().strip())
    assert server.wait(60) == 0


def test_what_popen_started_ends_with_the_test(tmp_path):
    text = "def test_a(rdma):\n    print('PID', rdma.popen('sleep', '600').pid)\n"
    done = inner(tmp_path, text, "-s")
    pid = int(done.stdout.split("PID ")[1].split()[0])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_this_process_itself_can_use_weft():
    code = "import weft, ctypes; weft.load(); weft.load(); c = ctypes.c_int(); v = ctypes.CDLL('libibverbs.so.1'); " \
        "v.ibv_get_device_list.restype = ctypes.c_void_p; v.ibv_get_device_list(ctypes.byref(c)); print(c.value)"
    done = python("-c", code)
    assert int(done.stdout) >= 2, done.stderr


PYVERBS = "/usr/lib/python3/dist-packages"


def test_pyverbs_uses_weft():
    if not os.path.isdir(f"{PYVERBS}/pyverbs") or sys.version_info[:2] != (3, 11):
        pytest.skip("no pyverbs for this Python (Debian 12: apt-get install python3-pyverbs)")
    code = f"import sys, weft; weft.load(); sys.path.append({PYVERBS!r}); import pyverbs.device as d; print(*(x.name.decode() for x in d.get_device_list()))"
    done = python("-c", code)
    assert done.stdout.split() == ["weft0", "weft_ib0"], done.stderr


def ping(rdma):
    """How many of 20 round trips rping makes: its exit status does not tell."""
    port = str(free_port())
    rdma.popen("rping", "-s", "-a", "127.0.0.1", "-p", port, "-C", "20")
    client = ("rping", "-c", "-v", "-a", "127.0.0.1", "-p", port, "-C", "20")
    for _ in range(100):
        done = rdma.run(*client, check=False, capture_output=True, text=True)
        if "REJECTED" not in done.stdout + done.stderr and "REFUSED" not in done.stdout + done.stderr:
            break
        time.sleep(0.1)  # the server is not there yet
    return done.stdout.count("ping data:")


needs_rping = pytest.mark.skipif(not shutil.which("rping"), reason="no rping (Debian: apt-get install rdmacm-utils)")


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@needs_rping
def test_rping_goes_without_faults(rdma):
    assert ping(rdma) == 20


@needs_rping
@pytest.mark.rdma_faults("seed 7", "send 5 on 1: die")
def test_rping_fails_with_a_fault_on_purpose(rdma):
    assert rdma.faults.read_text() == "seed 7\nsend 5 on 1: die\n"
    assert ping(rdma) < 20


@pytest.mark.rdma_faults("send 5: die")
def test_the_mark_alone_brings_the_fixture():
    assert os.environ["WEFT_FAULTS"].endswith("rdma-faults")


def test_after_a_test_with_faults_there_are_none(rdma):
    assert "WEFT_FAULTS" not in os.environ and "WEFT_FAULTS" not in rdma.environment


def test_a_script_that_means_nothing_fails_the_test(tmp_path):
    text = """
        import pytest
        @pytest.mark.rdma_faults("send 5: explode")
        def test_a(rdma): pass
    """
    done = inner(tmp_path, text, "--strict-markers")
    assert done.returncode == 1 and "explode" in done.stdout and "1 error" in done.stdout, done.stdout + done.stderr


def test_a_machine_without_devices_is_told_apart(tmp_path):
    text = """
        import weft
        weft.environment = lambda **_: {"LD_LIBRARY_PATH": "/nowhere"}
        def test_a(rdma): pass
    """
    done = inner(tmp_path, text)
    assert done.returncode == 1 and "weft doctor" in done.stdout, done.stdout + done.stderr
