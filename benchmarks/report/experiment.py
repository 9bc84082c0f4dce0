"""What a row belongs to: a benchmark, and the network that it ran on, without which its numbers mean nothing.

The same benchmark runs over the machine's own memory and inside a lab, over links of a given rate. Rows of different
networks share no section, no figure and no table, and are never compared.
"""

from __future__ import annotations

from typing import NamedTuple

from ..harness.values import Row, number, text


class Experiment(NamedTuple):
    """A benchmark on a network.

    Attributes:
        benchmark: Its name.
        link_mbit: The rate of a lab's links, in Mbit/s; None outside of one.
    """

    benchmark: str
    link_mbit: float | None = None

    @property
    def rate(self) -> str:
        """Of a lab's links, in words; empty outside of one."""
        return "" if self.link_mbit is None else f"{self.link_mbit:.12g} Mbit/s"

    @property
    def network(self) -> str:
        """Where it ran, in words; empty outside of a lab."""
        return self.rate and f"in a lab with links of {self.rate}"

    @property
    def label(self) -> str:
        """Its name, with the rate of a lab's links.

        Example:
            >>> Experiment("buckets").label, Experiment("buckets", 1000.0).label
            ('buckets', 'buckets at 1000 Mbit/s')
        """
        return f"{self.benchmark} at {self.rate}" if self.rate else self.benchmark

    @property
    def id(self) -> str:
        """Its name for an address.

        Example:
            >>> Experiment("buckets", 12.5).id
            'buckets-12.5-mbit'
        """
        return self.benchmark if self.link_mbit is None else f"{self.benchmark}-{self.link_mbit:.12g}-mbit"


def experiment_of(row: Row) -> Experiment:
    """The experiment that a row belongs to, as it says itself."""
    return Experiment(text(row, "benchmark"), number(row, "link_mbit"))
