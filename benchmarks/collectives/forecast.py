"""Forecasts how long a run will take, and corrects the forecast as it goes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxddp.network import Network

from ..harness.ranks import Ranks
from ..harness.values import size
from ..lab.network import network
from .interleaving import NUM_WARMUP, Batch, rounds_within

# Half of the assignment report's Gloo, because ranks may share a few cores; and the report's NCCL.
CPUS, GPUS = Network(gb_per_s=0.5, latency_us=500.0), Network(gb_per_s=4.0, latency_us=100.0)
START_S = 10.0  # starting a part: processes, imports, compilation


def assumed_network(ranks: Ranks) -> Network:
    """The network assumed before anything is measured; in a lab, at most as fast as its links."""
    if ranks.kind == "gpus":
        return GPUS
    link_mbit = network().get("link_mbit", math.inf) if ranks.kind == "lab" else math.inf
    return replace(CPUS, gb_per_s=min(CPUS.gb_per_s, link_mbit / 8e3))


def forecast_s(batch: Batch, ranks: Ranks, num_rounds: int | None, budget_s: float) -> float:
    """Forecasts the seconds of a batch, as if every collective were an all-reduce."""
    call_s = assumed_network(ranks).seconds("all-reduce", batch.asked_bytes, range(ranks.num))
    round_s = len(batch.names) * call_s
    return (NUM_WARMUP + (num_rounds or rounds_within(budget_s, round_s))) * round_s


class Forecast:
    """The time left: the forecast, scaled by how wrong it was for the batches that are done."""

    def __init__(self, seconds: Mapping[tuple[str, Batch], float]) -> None:
        """Starts with the forecast seconds of each part's batches."""
        self._left = dict(seconds)
        self._forecast_s = self._took_s = 0.0

    def done(self, part: str, batch: Batch, seconds: float) -> None:
        """Records how long a batch took; it may come again in other processes of the part."""
        self._forecast_s += self._left.pop((part, batch), 0.0)
        self._took_s += seconds

    def skip(self, part: str) -> None:
        """Drops the rest of a part."""
        self._left = {key: seconds for key, seconds in self._left.items() if key[0] != part}

    def follow(self, part: str, show: Callable[[int, Any], None]) -> Follower:
        """Makes the handler of a part's messages, which passes readable messages on to ``show``."""
        return Follower(self, part, show)

    def __str__(self) -> str:
        """The time left in words."""
        scale = self._took_s / self._forecast_s if self._forecast_s else 1.0
        return duration(scale * sum(self._left.values()))


@dataclass
class Follower:
    """Handles the messages of a part's ranks: the start of a batch, and its rounds if they take long.

    ``under_way`` is the batch that rank 0 is measuring; ``rounds`` are those done and the total, as last shown.
    """

    forecast: Forecast
    part: str
    show: Callable[[int, Any], None]
    under_way: Batch | None = None
    rounds: list[int] = field(default_factory=list)
    began_s: float = field(default_factory=lambda: time.monotonic())

    def __call__(self, rank: int, message: Any) -> None:
        """Handles a message."""
        kind, *content = message
        if rank == 0 and kind == "size":
            self.close()
            (self.under_way,), self.rounds = content, []
            message = ("doing", f"{size(self.under_way.asked_bytes)}, about {self.forecast} left")
        elif rank == 0 and kind == "found":
            self.close()
        elif rank == 0 and kind == "rounds" and self.under_way is not None and content != self.rounds:
            self.rounds = content
            num_done, num_rounds = content
            said = f"{num_done} of {num_rounds} rounds" if num_rounds else "warming up"
            message = ("doing", f"{size(self.under_way.asked_bytes)}, {said}")
        self.show(rank, message)

    def close(self) -> None:
        """Records how long the batch under way took."""
        now_s = time.monotonic()
        if self.under_way is not None:
            self.forecast.done(self.part, self.under_way, now_s - self.began_s)
            self.began_s, self.under_way = now_s, None


def duration(seconds: float) -> str:
    """Formats a duration roughly.

    Example:
        >>> duration(42.0), duration(1000.0)
        ('42 s', '17 min')
    """
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
