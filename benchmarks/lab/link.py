"""Measures a lab's link over plain TCP between two hosts, without other traffic.

The rate is that of TCP's payload: 1,448 of the 1,514 bytes of an Ethernet frame, 96 % of the link's rate. Timing starts
when both ends have used up their burst allowance.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxddp.training.clock import Timings, stopwatch, summarize

from .network import BURST_BYTES, Lab

_CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # each host has its own
MAX_DEVIATION = 0.1  # of the requested rate; headers take 0.04
_WINDOW_S = 0.1
_NUM_WINDOWS = 8
_NUM_ROUND_TRIPS = 200
_CHUNK_BYTES = 64 * 1024
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Link:
    """The measured properties of a link.

    Attributes:
        asked_mbit: Requested rate in Mbit/s.
        rate_mbit: Median rate of TCP's payload, one way, over windows of 0.1 s or more; with its 10th and 90th
        percentile.
        round_trip: Time of one byte there and back.
        congestion_control: TCP's algorithm, which the machine chooses.
    """

    asked_mbit: float
    rate_mbit: float
    p10_mbit: float
    p90_mbit: float
    round_trip: Timings
    congestion_control: str

    @property
    def check(self) -> str:
        """``"ok"``, or what is wrong."""
        if abs(self.rate_mbit / self.asked_mbit - 1) <= MAX_DEVIATION:
            return "ok"
        return f"WRONG: more than {100 * MAX_DEVIATION:.0f} % off"

    @property
    def in_words(self) -> str:
        """All of it in a line."""
        return (
            f"link: {self.rate_mbit:.4g} Mbit/s measured (p10 {self.p10_mbit:.4g}, p90 {self.p90_mbit:.4g}),"
            f" {self.asked_mbit:g} asked, TCP {self.congestion_control}, round trip {self.round_trip}: {self.check}"
        )


def measure_link(lab: Lab) -> Link:
    """Measures from a lab's first host to its second; takes about a second."""
    with _connection(lab) as (sender, receiver), ThreadPoolExecutor(1) as other_end:
        echo = other_end.submit(_echo, receiver)
        trips_s = [_seconds(_round_trip, sender) for _ in range(_NUM_ROUND_TRIPS)]
        echo.result()
        num_bytes = max(BURST_BYTES, int(lab.rate_mbit * 1e6 / 8 * _WINDOW_S))
        rest = 4 * BURST_BYTES  # the bursts of both ends, twice
        sending = other_end.submit(_send, sender, rest + _NUM_WINDOWS * num_bytes)
        _receive(receiver, rest)
        windows_s = [_seconds(_receive, receiver, num_bytes) for _ in range(_NUM_WINDOWS)]
        sending.result()
    p10, median, p90 = np.percentile(num_bytes * 8e-6 / np.asarray(windows_s), [10, 50, 90]).tolist()
    congestion_control = lab.hosts[0].call(_CONGESTION_CONTROL.read_text).strip()
    return Link(lab.rate_mbit, median, p10, p90, summarize(trips_s), congestion_control)


@contextmanager
def _connection(lab: Lab) -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = lab.hosts[:2]
    with there.call(lambda: socket.create_server((there.address, 0))) as listener:
        address = listener.getsockname()
        sender = here.call(lambda: socket.create_connection(address, timeout=_TIMEOUT_S))
        receiver, _ = listener.accept()
    with sender, receiver:
        receiver.settimeout(_TIMEOUT_S)
        for end in (sender, receiver):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sender, receiver


def _seconds(function: Callable[..., None], *args: Any) -> float:
    return stopwatch(function, *args, wait=lambda result: None)[1]


def _round_trip(sender: socket.socket) -> None:
    sender.sendall(b"x")
    sender.recv(1)


def _echo(receiver: socket.socket) -> None:
    for _ in range(_NUM_ROUND_TRIPS):
        receiver.sendall(receiver.recv(1))


def _send(sender: socket.socket, num_bytes: int) -> None:
    chunk = bytes(_CHUNK_BYTES)
    for start in range(0, num_bytes, _CHUNK_BYTES):
        sender.sendall(chunk[: num_bytes - start])


def _receive(receiver: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        data = receiver.recv(min(num_bytes, _CHUNK_BYTES))
        if not data:
            raise OSError("the other end of a lab's link closed the connection")
        num_bytes -= len(data)
