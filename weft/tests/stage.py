"""Runs a compose file or a pod as an engine of containers does, with namespaces, mounts, users and names, but on this machine's files:

    stage.py FILE.yaml FOLDER_WITH_WEFT FOLDER_WITH_ITS_LIBRARIES

Prints what each container said. The status is that of the last one; the others are ended then.
"""

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time

import yaml


class Container:
    def __init__(self, name, network, user, environment, mounts, command, probe):
        self.name, self.network, self.command, self.probe = name, network, command, probe
        self.user, _, group = str(user).partition(":")
        self.group = group or self.user
        self.environment, self.mounts = environment, mounts
        self.process = None

    def line(self, stage, command):
        line = f"ip netns exec {stage.space(self.network)} bwrap --unshare-pid --unshare-uts --die-with-parent --ro-bind / /".split()
        line += f"--dev /dev --proc /proc --tmpfs /tmp --tmpfs /run --tmpfs /opt --hostname {self.name}".split()
        # Programs are where their user can reach them, wherever they were built.
        line += f"--ro-bind {stage.programs} /opt/bin --ro-bind {stage.libraries} /opt/lib --ro-bind {stage.hosts} /etc/hosts".split()
        for volume, place in self.mounts:
            line += ["--bind", stage.volume(volume), place]
        line += ["--clearenv", "--setenv", "PATH", "/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin", "--setenv", "HOME", "/tmp"]
        for key, value in self.environment.items():
            line += ["--setenv", key, str(value)]
        line += "--chdir /tmp --cap-add CAP_SETUID --cap-add CAP_SETGID setpriv".split()
        return line + [f"--reuid={self.user}", f"--regid={self.group}", "--clear-groups", *command]

    def start(self, stage):
        log = open(f"{stage.folder}/{self.name}.log", "w+")
        self.process = subprocess.Popen(self.line(stage, self.command), stdout=log, stderr=log, start_new_session=True)
        self.log = log
        deadline = time.monotonic() + 30
        while self.probe and subprocess.run(self.line(stage, self.probe), capture_output=True).returncode != 0:
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{self.name} does not come up:\n{self.said()}")
            time.sleep(0.05)

    def end(self):
        """As an engine does: the program is asked, not its keeper."""
        keepers = [self.process.pid]
        for _ in range(2):  # bwrap, and the first process of the PID namespace
            keepers = [int(pid) for pid in subprocess.run(["pgrep", "-P", str(keepers[0])], capture_output=True).stdout.split()] or keepers
        os.kill(keepers[0], signal.SIGTERM)
        self.process.wait(30)

    def said(self):
        self.log.seek(0)
        return self.log.read()


class Stage:
    def __init__(self, programs, libraries):
        self.programs, self.libraries = os.path.abspath(programs), os.path.abspath(libraries)
        self.folder = tempfile.mkdtemp(prefix="weft-stage-")
        self.hosts = f"{self.folder}/hosts"
        with open(self.hosts, "w") as hosts:
            hosts.write("127.0.0.1 localhost\n")
        self.spaces, self.number = {}, itertools.count(2)
        self.name = f"wst{os.getpid()}"
        self.ip(f"netns add {self.name}", f"-n {self.name} link add br0 type bridge", f"-n {self.name} link set br0 up")

    @staticmethod
    def ip(*lines):
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True)

    def space(self, network):
        """The network namespace of this name, at the bridge."""
        if network not in self.spaces:
            last = next(self.number)
            space, hub = f"{self.name}n{last}", self.name
            self.spaces[network] = space
            self.ip(
                f"netns add {space}",
                f"-n {hub} link add v{last} type veth peer name eth0 netns {space}",
                f"-n {hub} link set v{last} master br0 up",
                f"-n {space} addr add 10.80.0.{last}/24 dev eth0",
                f"-n {space} link set eth0 up",
                f"-n {space} link set lo up",
            )
            with open(self.hosts, "a") as hosts:
                hosts.write(f"10.80.0.{last} {network}\n")
        return self.spaces[network]

    def volume(self, name):
        path = f"{self.folder}/volume-{name}"
        if not os.path.isdir(path):
            os.mkdir(path)
            os.chmod(path, 0o1777)
        return path

    def close(self):
        for space in [*self.spaces.values(), self.name]:
            subprocess.run(["ip", "netns", "delete", space], check=False)
        subprocess.run(["rm", "-rf", self.folder], check=False)


def of_compose(document):
    for name, service in document["services"].items():
        mounts = [volume.split(":")[:2] for volume in service.get("volumes", [])]
        probe = service.get("healthcheck", {}).get("test", [])[1:]
        yield Container(name, name, service["user"], service.get("environment", {}), mounts, service["command"], probe)


def of_pod(document):
    spec = document["spec"]
    context = spec["securityContext"]
    user = f"{context['runAsUser']}:{context['runAsGroup']}"
    for one in spec["initContainers"] + spec["containers"]:
        probe = one.get("startupProbe", {}).get("exec", {}).get("command", [])
        environment = {entry["name"]: entry["value"] for entry in one.get("env", [])}
        mounts = [(mount["name"], mount["mountPath"]) for mount in one.get("volumeMounts", [])]
        yield Container(one["name"], document["metadata"]["name"], user, environment, mounts, one["command"], probe)


def main(file, programs, libraries):
    with open(file) as text:
        document = yaml.safe_load(text)
    stage = Stage(programs, libraries)
    containers = list(of_compose(document) if "services" in document else of_pod(document))
    try:
        for container in containers:
            stage.space(container.network)
        for container in containers:
            container.start(stage)
        status = containers[-1].process.wait(60)
        for container in containers[:-1]:
            container.end()
        for container in containers:
            print(f"--- {container.name}\n{container.said()}")
        return status
    finally:
        for container in containers:
            if container.process and container.process.poll() is None:
                os.killpg(container.process.pid, signal.SIGKILL)
        stage.close()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
