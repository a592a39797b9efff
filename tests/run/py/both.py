"""Runs a server and then its client: `both.py SCRIPT PORT PORT`, SCRIPT beside this one."""
import pathlib
import subprocess
import sys
import time

script, *ports = sys.argv[1:]
line = [sys.executable, str(pathlib.Path(__file__).with_name(script))]
server = subprocess.Popen([*line, "server", *ports])
time_limit = time.monotonic() + 20
listening = f":{int(ports[0]):04X} 00000000:0000 0A"
while listening not in pathlib.Path("/proc/net/tcp").read_text():
    assert time.monotonic() < time_limit
    time.sleep(0.01)
subprocess.run([*line, "client", *ports], check=True)
assert server.wait() == 0
