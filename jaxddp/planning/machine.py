"""A cluster as the planner sees it: what a device computes and holds, and what each group of ranks can send.

GPUs: tensor-parallel ranks are neighbours, then FSDP ranks, then replicas; a group that spans hosts sends at the rate
of ``Network``. TPUs: a slice is a torus with links in both directions, and a group over M of its axes sends M times
what one axis does. The numbers are those of ``chips.py``, except for TPU v5p: the compute-bound conditions are known
with the scaling book's rounded 4.6e14 FLOP/s and 2 x 9e10 B/s per axis, not the vendor's 459e12 and 600e9 for three
axes.

References:
    Austin et al., How to Scale Your Model, 2025: https://jax-ml.github.io/scaling-book/tpus
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..arguments import check_positive
from ..network import DEFAULT_LATENCY_US, GB, Network, from_file, measured
from .chips import Target
from .formulas import DeviceRates

# FLOP/s in bfloat16, and GB/s of one axis of the torus, both directions together.
_BOOK = {"v5p": (4.6e14, 180.0)}


class Axes(NamedTuple):
    """How many axes of a torus each kind of group spans.

    Attributes:
        fsdp: M_X.
        tp: M_Y.
        dp: M_R.
        is_exact: Whether the groups are products of whole axes; otherwise the counts are assumed.
    """

    fsdp: int
    tp: int
    dp: int
    is_exact: bool = True


@dataclass(frozen=True)
class Cluster:
    """Devices to plan for.

    Attributes:
        name: A target spec, as in ``--target``.
        flops_per_s: Peak of one device, for the planned dtype.
        link_gb_per_s: What a device can send within its host, or over one axis of its torus, 10^9 bytes per second.
        host_link_gb_per_s: What a device can send to other hosts; unused on a torus.
        devices_per_host: On GPUs; None on a torus.
        torus: Sides; empty on GPUs.
        products: The dtype in which products are computed, whose peak ``flops_per_s`` is; empty if set by hand.

    Raises:
        ValueError: If a number is out of range.
    """

    name: str
    num_devices: int
    flops_per_s: float
    memory_bytes: float
    link_gb_per_s: float
    host_link_gb_per_s: float
    devices_per_host: int | None = None
    latency_us: float = DEFAULT_LATENCY_US
    torus: tuple[int, ...] = ()
    products: str = ""

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "memory_bytes", "link_gb_per_s", "host_link_gb_per_s"):
            check_positive(name, getattr(self, name))
        if not 0 <= self.latency_us < math.inf:
            raise ValueError(f"latency_us (={self.latency_us}) must be a finite number of microseconds, 0 or more")

    def axes(self, fsdp: int, tp: int) -> Axes:
        """Assigns the axes of the torus to groups of ``fsdp`` and ``tp`` ranks.

        Returns:
            Whole axes whose sides multiply to the group sizes, if there are any. Otherwise two axes for FSDP and one
            for tensor parallelism, or all three for FSDP alone.
        """
        return _whole_axes(self.torus, fsdp, tp) or Axes(3 if tp == 1 else 2, 1, 1, is_exact=False)

    def rates(self, fsdp: int, tp: int) -> DeviceRates:
        """Computes what a device computes and sends per second, with groups of ``fsdp`` and ``tp`` ranks."""
        if self.torus:
            rates = [count * self.link_gb_per_s * GB for count in self.axes(fsdp, tp)[:3]]
            return DeviceRates(self.flops_per_s, *rates)
        network = Network(
            self.link_gb_per_s, self.latency_us, self.host_link_gb_per_s, self.devices_per_host or self.num_devices
        )

        def rate(group: range) -> float:
            if len(group) < 2:
                return self.link_gb_per_s * GB
            return (len(group) - 1) / len(group) / network.transfer_s("reduce-scatter", 1.0, group)

        return DeviceRates(
            self.flops_per_s,
            fsdp_bytes_per_s=rate(range(0, fsdp * tp, tp)),
            tp_bytes_per_s=rate(range(tp)),
            dp_bytes_per_s=rate(range(0, self.num_devices, fsdp * tp)),
        )


def network_of(target: Target, gb_per_s: float | None = None, latency_us: float = DEFAULT_LATENCY_US) -> Network:
    """A target's links; a given speed replaces the slowest: between hosts if there are several."""
    chip = target.chip
    if target.num_hosts == 1 or target.platform == "tpu":
        return Network(chip.link_gb_per_s if gb_per_s is None else gb_per_s, latency_us)
    between_hosts = chip.host_link_gb_per_s if gb_per_s is None else gb_per_s
    return Network(chip.link_gb_per_s, latency_us, between_hosts, target.devices_per_host)


def read_network(path: str, target: Target, assumed: Network, gb_per_s: float | None = None) -> Network:
    """Measured curves within a target's hosts, from a file or, as ``"measured"``, for its chip.

    ``assumed`` has the speed between hosts; a speed given for a single host contradicts the curves.

    Raises:
        ValueError: If a speed is given for one host, or as ``network.measured`` and ``from_file``.
    """
    if gb_per_s is not None and target.num_hosts == 1:
        raise ValueError(f"network_gb_per_s (={gb_per_s:g}) must be left out with --network-file: it has the speeds")
    between = assumed.host_gb_per_s
    found = measured(target.spec, host_gb_per_s=between) if path == "measured" else from_file(path)
    return replace(found, host_gb_per_s=between, devices_per_host=assumed.devices_per_host)


def network_in_words(target: Target, network: Network) -> str:
    """Where the network's speeds come from, and what to give instead.

    Example:
        >>> from .chips import target
        >>> network_in_words(target("h100:8"), Network(50))
        'network, assumed: 50 GB/s a GPU as given, what a GPU sends to other hosts: that is one GPU a host, h100:8x1'
    """
    if network.curves:
        between = f", between hosts {network.host_gb_per_s:g} GB/s a GPU assumed" if network.host_gb_per_s else ""
        return f"network: as measured, {network.source}{between}"
    chip, published = target.chip, network_of(target)
    is_given = network != replace(published, latency_us=network.latency_us)
    if target.platform == "tpu":
        source = "as given" if is_given else "all its links as published"
        return f"network, assumed: {network.gb_per_s:g} GB/s a chip, {source}"
    nvlink = f"{network.gb_per_s:g} GB/s a GPU, NVLink's published peak (rings reach about 360 of an H100's 450)"
    if target.num_hosts > 1:
        nic = f"{network.host_gb_per_s:g} GB/s a GPU, {'as given' if is_given else 'a published NIC for each'}"
        within = "" if target.devices_per_host == 1 else f"within a host {nvlink}, "
        return f"network, assumed: {within}between hosts {nic}"
    if not is_given:
        return f"network, assumed: {nvlink}: try --network-gb-per-s {0.8 * chip.link_gb_per_s:g}"
    given = f"network, assumed: {network.gb_per_s:g} GB/s a GPU as given"
    if network.gb_per_s > chip.host_link_gb_per_s or target.num_devices == 1:
        return given
    return f"{given}, what a GPU sends to other hosts: that is one GPU a host, {chip.name}:{target.num_devices}x1"


def cluster_of(
    target: Target, dtype: str, *, flops_per_s: float | None = None, **by_hand: float | int | None
) -> Cluster:
    """Makes the cluster of a target.

    ``by_hand`` are attributes of ``Cluster`` that replace the target's, like ``flops_per_s``; None keeps the target's.

    Raises:
        ValueError: If a number is out of range, or the chip has no published peak for the dtype.
    """
    chip = target.chip
    key = chip.matmul_float32 if dtype == "float32" else dtype
    if flops_per_s is None and key not in chip.flops_per_s:
        raise ValueError(f"dtype (={dtype!r}) has no published peak on {chip.name}: give --flops-per-s")
    book_flops_per_s, book_gb_per_s = _BOOK.get(chip.name, (None, None))
    peak = book_flops_per_s if book_flops_per_s and key == "bfloat16" else chip.flops_per_s.get(key, math.nan)
    is_torus = chip.platform == "tpu"
    if is_torus and (speed := by_hand.get("host_link_gb_per_s")) is not None:
        raise ValueError(f"host_link_gb_per_s (={speed}) must be left out for {target.spec!r}, which is one torus")
    sides = tuple(int(side) for side in target.topology.split("x") if int(side) > 1) if is_torus else ()
    cluster = Cluster(
        name=target.spec,
        num_devices=target.num_devices,
        flops_per_s=peak if flops_per_s is None else flops_per_s,
        memory_bytes=chip.memory_bytes,
        link_gb_per_s=book_gb_per_s or chip.link_gb_per_s,
        host_link_gb_per_s=chip.host_link_gb_per_s,
        devices_per_host=None if is_torus else target.devices_per_host,
        torus=sides,
        products=key if flops_per_s is None else "",
    )
    return replace(cluster, **{name: value for name, value in by_hand.items() if value is not None})  # type: ignore[arg-type]


def _whole_axes(torus: tuple[int, ...], fsdp: int, tp: int) -> Axes | None:
    """The first assignment of axes to groups whose sides multiply to the group sizes."""
    dp = math.prod(torus) // (fsdp * tp)
    for assignment in itertools.product(range(3), repeat=len(torus)):
        sides = [[side for side, group in zip(torus, assignment, strict=True) if group == kind] for kind in range(3)]
        if [math.prod(each) for each in sides] == [fsdp, tp, dp]:
            # A group of one rank has no axis and sends nothing; a count of 1 keeps its rate finite.
            over_fsdp, over_tp, over_dp = (max(1, len(each)) for each in sides)
            return Axes(over_fsdp, over_tp, over_dp)
    return None
