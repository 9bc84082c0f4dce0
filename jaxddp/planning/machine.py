"""Networks of targets, and targets as the planner sees them: what a device computes and holds, what each group sends.

Tensor-parallel ranks are neighbours, then FSDP ranks, then replicas. Over M axes of a torus a group is M times as fast.
"""

from dataclasses import replace
from typing import Any

from ..arguments import check_positive
from ..network import GB, Network, from_file, measured
from . import chips
from .chips import Target
from .products import as_measured

# Of https://jax-ml.github.io/scaling-book/tpus, not the vendor's.
_BOOK_FLOPS_PER_S = {("v5p", "bfloat16"): 4.6e14}
_BOOK_GB_PER_S = {"v5p": 180.0}  # of one axis of the torus, both directions together


def target(spec: str, *, peaks: bool = False) -> Target:
    """A target with the rates that were measured of its chip, or with published peaks; see ``chips.target``."""
    found = chips.target(spec)
    return found if peaks else replace(found, chip=as_measured(found.chip))


def network_of(
    target: Target, gb_per_s: float | None = None, host_gb_per_s: float | None = None, file: str | None = None
) -> Network:
    """A target's network: within a host the measured curves, where there are any, unless its numbers are given.

    ``gb_per_s`` is within a host, or over all links of a torus; None is as published. ``file`` has measured curves in
    its place: a path, ``"measured"`` for the chip's own, or ``"measured:a3mega"`` with that fabric between hosts.
    """
    chip, between, per_host = target.chip, None, None
    if target.num_hosts > 1 and target.platform == "gpu":
        between = chip.host_link_gb_per_s if host_gb_per_s is None else host_gb_per_s
        per_host = target.devices_per_host
    if chip.is_measured and gb_per_s is file is None:
        file = "measured"
    if file is not None and gb_per_s is not None:
        raise ValueError(f"gb_per_s (={gb_per_s:g}) must be left out with --network-file, which has the times")
    name, _, fabric = (file or "").partition(":")
    if name == "measured" and fabric:
        return measured(target.spec, host_gb_per_s=host_gb_per_s, fabric=fabric)
    if file is None:
        found = Network(chip.link_gb_per_s if gb_per_s is None else gb_per_s)
    else:
        found = measured(f"{chip.name}:{target.devices_per_host}") if name == "measured" else from_file(file)
    return replace(found, host_gb_per_s=between, devices_per_host=per_host)


def network_in_words(target: Target, network: Network) -> str:
    """Where the network's speeds come from."""
    if network.curves:
        within = f"network: as measured, {network.source}"
    else:
        origin = "as published, at peak" if network.gb_per_s == target.chip.link_gb_per_s else "as given"
        within = f"network, assumed: {network.gb_per_s:g} GB/s a device {origin}, {network.latency_us:g} us a call"
    if network.host_gb_per_s is None or network.fabric:
        return within
    origin = "as published" if network.host_gb_per_s == target.chip.host_link_gb_per_s else "as given"
    return f"{within}, between hosts {network.host_gb_per_s:g} GB/s {origin}"


def machine_of(
    target: Target, dtype: str, *, flops_per_s: float | None = None, memory_bytes: float | None = None,
    gb_per_s: float | None = None, **network: Any,
) -> tuple[Target, Network]:  # fmt: skip
    """A target with the rates and the memory to plan with, and its network; on a torus that of one of its axes."""
    chip, key = target.chip, target.chip.product_dtype(dtype)
    if target.torus and gb_per_s is None and network.get("file") is None:
        gb_per_s = _BOOK_GB_PER_S.get(chip.name, chip.link_gb_per_s / len(target.topology.split("x")))
    found = network_of(target, gb_per_s, **network)
    if memory_bytes is not None:
        check_positive("memory_bytes", memory_bytes)
        chip = replace(chip, memory_bytes=int(memory_bytes))
    if flops_per_s is not None:
        check_positive("flops_per_s", flops_per_s)
        chip = replace(chip, flops_per_s={**chip.flops_per_s, key: flops_per_s}, is_measured=False)
    elif key not in chip.flops_per_s:
        raise ValueError(f"dtype (={dtype!r}) has no published peak on {chip.name}: give --flops-per-s")
    elif book := _BOOK_FLOPS_PER_S.get((chip.name, key)):
        chip = replace(chip, flops_per_s={key: book})
    return replace(target, chip=chip), found


def link_rates(target: Target, network: Network, fsdp: int, tp: int) -> tuple[float, float, float]:
    """Computes what a device sends per second to its groups of FSDP, TP and DP: W_X, W_Y and W_R of ``formulas``."""
    link = network.gb_per_s * GB
    if target.torus:  # tensor parallelism has one of its axes, all else the others
        others = max(1, len(target.torus) - (tp > 1)) * link
        return others, link, others

    def rate(group: range) -> float:
        if len(group) < 2:
            return link
        return (len(group) - 1) / len(group) / network.transfer_s("reduce-scatter", 1.0, group)

    return rate(range(0, fsdp * tp, tp)), rate(range(tp)), rate(range(0, target.num_devices, fsdp * tp))
