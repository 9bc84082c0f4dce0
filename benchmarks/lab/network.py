"""A slow network on one machine: hosts joined by links of a given rate, each for a rank to run on.

    [host 0: eth0]---link---[port0  bridge  port1]---link---[eth0 :host 1]

A host is a network namespace, and its link a pair of virtual interfaces to a bridge, which has a namespace of its own:
nothing of the machine's own network is touched. Both ends of a link let through ``rate_mbit``, counted in Ethernet
frames, so a host can send as much and at the same time receive as much; beyond that 50 ms of data wait in line, and
more is dropped. No delay is added. TCP's settings are the machine's; its cores, memory and files all hosts share.

What is made goes with the lab: when it is closed, when Python exits, and after the death of its process when the next
lab is opened, for the names of namespaces say who made them. It takes Linux, root's rights, and ``ip`` and ``tc``.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_T = TypeVar("_T")

MIN_HOSTS, MAX_HOSTS = 2, 8
BURST_BYTES = 256 * 1024  # what an end of a link lets through at once after a rest
_MAX_WAIT = "50ms"
_INTERFACE = "eth0"
_PREFIX = "jaxddp-lab"
_NAMESPACES = Path("/run/netns")  # where ip keeps them by name
_CLONE_NEWUTS, _CLONE_NEWNET = 0x04000000, 0x40000000  # linux/sched.h
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # linux/capability.h
_serial = itertools.count()
_open: list[Lab] = []


@dataclass(frozen=True)
class Host:
    """A host of a lab; plain data, sent to the process that is to run on it.

    Attributes:
        address: Where the other hosts reach it.
    """

    name: str
    address: str

    def enter(self) -> None:
        """Moves this process to the host; call it before the process starts a thread that will communicate.

        Raises:
            ValueError: If the sandbox that this runs in does not let it.
        """
        self._move_thread()
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            del os.environ[name]  # JAX's coordinator would be looked for behind a proxy, and no host can reach one

    def call(self, function: Callable[[], _T]) -> _T:
        """Calls a function in a thread of its own, on this host; sockets that it opens stay there.

        Raises:
            ValueError: As ``enter``.
        """

        def run() -> _T:
            self._move_thread()
            return function()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(run).result()

    def _move_thread(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)

        def check(call: str, result: int) -> None:
            if result:
                raise ValueError(f"{call} is refused here, so no process can run on a host of a lab: {_last_error()}")

        with open(_NAMESPACES / self.name) as namespace:
            check("setns", libc.setns(namespace.fileno(), _CLONE_NEWNET))
        # XLA's Gloo listens where the name of its host leads. An address as name leads to itself, without any look-up.
        check("unshare", libc.unshare(_CLONE_NEWUTS))
        name = self.address.encode()
        check("sethostname", libc.sethostname(name, len(name)))


class Lab:
    """Hosts and the links between them; a context manager.

    Attributes:
        rate_mbit: What every link lets through each way, in Mbit/s.
        hosts: They are there while the lab is open.
    """

    def __init__(self, num_hosts: int, rate_mbit: float) -> None:
        """Plans a lab; makes nothing yet.

        Args:
            num_hosts: 2 to 8.
            rate_mbit: What every link lets through each way, in Mbit/s.

        Raises:
            ValueError: If a number is out of range.
        """
        if not MIN_HOSTS <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"hosts (={num_hosts}) must be at least {MIN_HOSTS} and at most {MAX_HOSTS}")
        if not 0 < rate_mbit < float("inf"):
            raise ValueError(f"rate_mbit (={rate_mbit:g}) must be a positive number of Mbit/s")
        self.rate_mbit = rate_mbit
        self._owner_pid = os.getpid()
        name = f"{_PREFIX}.{self._owner_pid}.{_start_time(self._owner_pid)}.{next(_serial)}"
        self._bridge = f"{name}.bridge"
        # Nobody else is on this network, so any private addresses serve.
        self.hosts = tuple(Host(f"{name}.host{index}", f"10.77.0.{index + 1}") for index in range(num_hosts))

    def __enter__(self) -> Lab:
        """Makes the hosts, once what labs of processes that are gone have left is removed.

        Raises:
            ValueError: If this machine does not let it: one line says what is missing.
        """
        check_rights()
        _remove_leftovers()
        atexit.register(self.close)
        try:
            self._build()
            self.hosts[0].call(lambda: None)
        except BaseException:
            self.close()
            raise
        _open.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the lab."""
        self.close()

    def close(self) -> None:
        """Removes everything that was made; harmless if done before."""
        if os.getpid() != self._owner_pid:  # a forked copy of the process that made it
            return
        for name in (self._bridge, *(host.name for host in self.hosts)):
            _remove(name)
        atexit.unregister(self.close)
        if self in _open:
            _open.remove(self)

    def _build(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
        for index, host in enumerate(self.hosts):
            port, peer = f"port{index}", ["peer", "name", _INTERFACE, "netns", host.name]
            _run("ip", "netns", "add", host.name)
            _run("ip", "-n", self._bridge, "link", "add", port, "type", "veth", *peer)
            _run("ip", "-n", self._bridge, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", _INTERFACE)
            for interface in ("lo", _INTERFACE):
                _run("ip", "-n", host.name, "link", "set", interface, "up")
            for namespace, interface in ((host.name, _INTERFACE), (self._bridge, port)):
                limit = ["rate", f"{self.rate_mbit * 1e6:.0f}bit", "burst", str(BURST_BYTES), "latency", _MAX_WAIT]
                _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limit)


def open_lab() -> Lab:
    """Gives the lab that this process has open, the last one if there are several.

    Raises:
        ValueError: If there is none.
    """
    if not _open:
        raise ValueError("ranks of kind 'lab' run on the hosts of a Lab, and none is open")
    return _open[-1]


def network() -> dict[str, float]:
    """Fields of rows about the network: the rate of the links in a lab, otherwise none."""
    return {"link_mbit": _open[-1].rate_mbit} if _open else {}


def enter_host(hosts: Sequence[Host], rank: int) -> None:
    """Moves this process to the host of its rank; what ``torchref.launch`` is to call in a rank's process."""
    hosts[rank].enter()


def check_rights() -> None:
    """Raises ValueError if this is not Linux, a command is missing, or the process may not make networks."""
    if sys.platform != "linux":
        raise ValueError(f"a lab is made of Linux's network namespaces, and this is {sys.platform}")
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise ValueError(f"a lab needs the command {command!r}, of the package iproute2")
    status = Path("/proc/self/status").read_text()
    granted = int(status.split("CapEff:")[1].split()[0], 16)
    missing = [name for name, bit in _CAPABILITIES.items() if not granted >> bit & 1]
    if missing:
        raise ValueError(f"a lab needs {' and '.join(missing)}, which this process does not have: run it as root")


def _remove_leftovers() -> None:
    for path in _NAMESPACES.glob(f"{_PREFIX}.*.*.*.*"):
        _, pid, start_time, *_ = path.name.split(".")
        if pid.isdecimal() and _start_time(int(pid)) != start_time:
            _remove(path.name)


def _remove(name: str) -> None:
    if (_NAMESPACES / name).exists():
        try:
            _run("ip", "netns", "delete", name)
        except ValueError:
            if (_NAMESPACES / name).exists():  # else another process was faster
                raise


def _start_time(pid: int) -> str | None:
    """When a process started, by which it differs from later ones of its number; None if it is gone."""
    with suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        if state not in "ZX":
            return fields[18]  # proc_pid_stat(5), 22
    return None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0]
        raise ValueError(f"no lab can be made here: {' '.join(command)}: {reason}")


def _last_error() -> str:
    return os.strerror(ctypes.get_errno())
