"""Several hosts on one machine: network namespaces, each on a port of a switch of its own.

    with Hosts.open(2) as hosts:
        process = hosts.start(0, ["torchrun", ...])      # on host 0: its network, its host name, its loopback
        hosts.cut(1)                                     # its cable: packets vanish without an error
        hosts.fix(1)

Needs Linux, root, and the right to make namespaces; ``why_not`` says what is missing. Host i has the address
``address(i)`` on the interface eth0. The machine's own network is not touched: the switch is a bridge in a
namespace of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

NETWORK = "10.97.0"


@functools.cache
def why_not() -> str:
    """Why namespaces cannot be had here; empty where they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a thing of Linux"
    for tool in ("ip", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with Hosts.open(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip()}"


class Hosts:
    """``names`` of the hosts, which are those of their namespaces."""

    def __init__(self, names: Sequence[str], switch: str) -> None:
        self.names, self._switch = names, switch

    @classmethod
    @contextlib.contextmanager
    def open(cls, n: int) -> Iterator[Hosts]:
        """Raises CalledProcessError where namespaces are not permitted."""
        mark = f"o{os.getpid()}"
        hosts = cls([f"{mark}-host{i}" for i in range(n)], f"{mark}-switch")
        try:
            ip("netns", "add", hosts._switch)
            hosts._in(hosts._switch, "link", "add", "bridge", "type", "bridge")
            hosts._in(hosts._switch, "link", "set", "bridge", "up")
            for i in range(n):
                hosts._plug_in(i)
            yield hosts
        finally:
            hosts.clear()
            for name in (*hosts.names, hosts._switch):
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def _plug_in(self, i: int) -> None:
        name, port = self.names[i], self._port(i)
        ip("netns", "add", name)
        self._in(self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._in(self._switch, "link", "set", port, "master", "bridge")
        self._in(self._switch, "link", "set", port, "up")
        self._in(name, "link", "set", "lo", "up")
        self._in(name, "address", "add", f"{self.address(i)}/24", "dev", "eth0")
        self._in(name, "link", "set", "eth0", "up")

    @staticmethod
    def address(i: int) -> str:
        return f"{NETWORK}.{i + 1}"

    def cut(self, i: int) -> None:
        """Pull its cable out of the switch."""
        self._in(self._switch, "link", "set", self._port(i), "down")

    def reconnect(self, i: int) -> None:
        """Put it in again, as fast as it was."""
        delete = ["tc", "-n", self._switch, "qdisc", "delete", "dev", self._port(i), "root"]
        subprocess.run(delete, capture_output=True, check=False)  # there may be none
        self._in(self._switch, "link", "set", self._port(i), "up")

    def slow(self, i: int, rate: str) -> None:
        """Let no more than ``rate`` ("400kbit" a second) through to it. Raises CalledProcessError without the
        kernel's token bucket filter."""
        words = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        run("tc", "-n", self._switch, "qdisc", "replace", "dev", self._port(i), *words)

    def bytes_received(self, i: int) -> int:
        """By the host, from the others, since it was made."""
        path = f"/sys/class/net/{self._port(i)}/statistics/tx_bytes"
        command = ["ip", "netns", "exec", self._switch, "cat", path]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    def start(
        self, i: int, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """``command`` on host i, in a session of its own; what it says is appended to ``log``."""
        name = self.names[i]
        inside = ["sh", "-c", 'hostname "$0" && exec "$@"', name, *command]
        outside = ["ip", "netns", "exec", name, "unshare", "--uts", *inside]
        with log.open("ab") as file:
            return subprocess.Popen(
                outside, stdout=file, stderr=file, env=dict(environment), start_new_session=True
            )

    def clear(self) -> None:
        """End whatever was started on the hosts."""
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in map(int, found.stdout.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    @staticmethod
    def _port(i: int) -> str:
        return f"port{i}"

    @staticmethod
    def _in(namespace: str, *words: str) -> None:
        ip("-n", namespace, *words)


def ip(*words: str) -> None:
    run("ip", *words)


def run(*words: str) -> None:
    subprocess.run(words, capture_output=True, text=True, check=True)
