"""A slow network on one machine: hosts joined by links of a given rate, each for a rank to run on.

    [host 0: eth0]---link---[port0  bridge  port1]---link---[eth0 :host 1]

A host is a network namespace. Its link is a pair of virtual interfaces to a bridge in a namespace of its own, so the
machine's network is not touched. Both ends of a link are limited to ``rate_mbit``, counted in Ethernet frames, each
way; up to 50 ms of data are queued, and more is dropped. No delay is added. Hosts share the machine's TCP settings,
cores, memory and files.

A lab is removed when it is closed or, if its process was killed, when the next one is opened: names of namespaces
contain the process. It needs Linux, root's rights, and the commands ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIN_HOSTS, MAX_HOSTS = 2, 8
MAX_RATE_MBIT = 2_500  # two busy cores carry no more
BURST_BYTES = 256 * 1024  # sent at once by an idle end of a link
_INTERFACE = "eth0"
_PREFIX = "jaxddp-lab"
_NAMESPACES = Path("/run/netns")  # where ip keeps them
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_serial = itertools.count()
_open: list[Lab] = []


@dataclass(frozen=True)
class Host:
    """A host of a lab, and its address for other hosts; plain data, sent to the process that will run on it."""

    name: str
    address: str

    def enter(self) -> None:
        """Moves this process to the host, before threads that communicate start; raises ValueError if forbidden."""
        with open(_NAMESPACES / self.name) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                why = os.strerror(ctypes.get_errno())
                raise ValueError(f"setns is refused here, so no process can run on a host of a lab: {why}")
        os.environ["GLOO_SOCKET_IFNAME"] = _INTERFACE
        for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
            del os.environ[name]  # no host can reach a proxy, and JAX would use it for its coordinator


class Lab:
    """Hosts, which exist while it is open, and the links between them, of ``rate_mbit`` each way; a context manager.

    Raises ValueError if there are not 2 to 8 hosts and, when it is opened, if this machine does not allow it.
    """

    def __init__(self, num_hosts: int, rate_mbit: float) -> None:
        if not MIN_HOSTS <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"hosts (={num_hosts}) must be at least {MIN_HOSTS} and at most {MAX_HOSTS}")
        if rate_mbit > MAX_RATE_MBIT:
            raise ValueError(f"rate_mbit (={rate_mbit:g}) must be at most {MAX_RATE_MBIT}")
        self.rate_mbit = rate_mbit
        name = f"{_PREFIX}.{os.getpid()}.{next(_serial)}"
        self._bridge = f"{name}.bridge"
        # The network is isolated, so any private addresses will do.
        self.hosts = tuple(Host(f"{name}.host{index}", f"10.77.0.{index + 1}") for index in range(num_hosts))

    def __enter__(self) -> Lab:
        """Makes the hosts, after removing labs of processes that are gone."""
        for path in _NAMESPACES.glob(f"{_PREFIX}.*.*.*"):
            if not Path("/proc", path.name.split(".")[1]).exists():
                _remove(path.name)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        _open.append(self)
        return self

    def close(self, *exception: object) -> None:
        """Removes everything that was made; harmless if called again."""
        for name in (self._bridge, *(host.name for host in self.hosts)):
            _remove(name)
        if self in _open:
            _open.remove(self)

    __exit__ = close

    def _build(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
        limit = ["rate", f"{self.rate_mbit * 1e6:.0f}bit", "burst", str(BURST_BYTES), "latency", "50ms"]
        for index, host in enumerate(self.hosts):
            port, peer = f"port{index}", ["peer", "name", _INTERFACE, "netns", host.name]
            _run("ip", "netns", "add", host.name)
            _run("ip", "-n", self._bridge, "link", "add", port, "type", "veth", *peer)
            _run("ip", "-n", self._bridge, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", _INTERFACE)
            for interface in ("lo", _INTERFACE):
                _run("ip", "-n", host.name, "link", "set", interface, "up")
            for namespace, interface in ((host.name, _INTERFACE), (self._bridge, port)):
                _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *limit)


def open_lab() -> Lab:
    """Returns the lab that this process has open, the last of several."""
    assert _open, "ranks of kind 'lab' run on the hosts of a Lab that is open"
    return _open[-1]


@contextmanager
def lab_for(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Keeps a lab open if ranks are to run in one; gives the fields of rows about it."""
    if options.on != "lab":
        for name in ("hosts", "rate_mbit"):
            if (given := getattr(options, name)) is not None:
                raise ValueError(f"{name} (={given:g}) is of a lab alone, and on (={options.on}) is not lab")
        yield {}
        return
    with Lab(options.hosts or 2, options.rate_mbit or 1000.0) as lab:
        yield {"link_mbit": lab.rate_mbit}


def _remove(name: str) -> None:
    if (_NAMESPACES / name).exists():  # another process may remove it meanwhile
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise ValueError(f"a lab needs Linux and the command {command[0]!r}, of the package iproute2") from None
    except subprocess.CalledProcessError as failed:
        reason = (failed.stderr.strip().splitlines() or [f"exit status {failed.returncode}"])[0]
        raise ValueError(f"no lab can be made here, which takes root: {' '.join(command)}: {reason}") from None
