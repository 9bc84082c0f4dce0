"""The sizes that are measured, and which of them fit into memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..harness.free_memory import PROCESS_BYTES
from ..harness.ranks import Ranks
from ..harness.values import size
from .cases import ELEMENT_BYTES
from .interleaving import Batch

KIB, MIB, GIB = 2**10, 2**20, 2**30
SIZES = tuple(KIB * 4**power for power in range(11))
QUICK_SIZES = (16 * KIB, 256 * KIB, 4 * MIB, 16 * MIB)

# Peak memory of a rank while a collective runs, in full buffers, with its inputs: measured on 2 ranks in the framework
# that needs more, rounded up. Gloo and rings copy, and freed memory that a process keeps is fragmented.
HELD = {
    "all_reduce": 5.0,
    "reduce_scatter": 8.0,
    "all_gather": 10.5,
    "broadcast": 6.5,
    "reduce": 6.5,
    "send_recv": 6.0,
    "ring_reduce_scatter": 6.0,
    "ring_all_gather": 9.5,
    "ring_all_reduce": 9.0,
    (TOGETHER := "together"): 12.5,  # while several collectives take turns: more fragmentation
}
SPARE_SHARE = 0.05  # of free memory, left unused


def asked_sizes(sizes_mb: Sequence[float] | None, quick: bool) -> tuple[int, ...]:
    """Chooses the sizes to measure; raises ValueError if one is below 1 KiB."""
    if not sizes_mb:
        return QUICK_SIZES if quick else SIZES
    for size_mb in sizes_mb:
        if size_mb * MIB < KIB:
            raise ValueError(f"sizes_mb (={size_mb:g}) must be at least 1 KiB, {KIB / MIB:g} MiB")
    return tuple(sorted({int(size_mb * MIB) for size_mb in sizes_mb}))


def needed_bytes(name: str, asked_bytes: int, ranks: Ranks) -> int:
    """Memory that a collective needs: of all its ranks together or, on GPUs, of each."""
    is_even = asked_bytes % (ELEMENT_BYTES * ranks.num) == 0  # otherwise inputs of two lengths are held
    held = math.ceil((HELD[name] + (not is_even)) * asked_bytes)
    if ranks.kind == "gpus":
        return held
    return ranks.num_on_host * held + (1 if ranks.kind == "simulated" else ranks.num_on_host) * PROCESS_BYTES


def fitting(
    names: Sequence[str], sizes: Sequence[int], ranks: Ranks, free: int
) -> tuple[tuple[Batch, ...], list[tuple[str, int, str]]]:
    """Sorts out which sizes fit.

    Returns:
        Batches, largest first, with each collective by itself where they do not fit together; and of the rest ``(name,
        size, why not)``.
    """
    batches, left_out = [], []
    free = int(free * (1 - SPARE_SHARE))
    for asked in sorted(sizes, reverse=True):
        needed = {name: needed_bytes(name, asked, ranks) for name in names}
        fit = tuple(name for name in names if needed[name] <= free)
        if needed_bytes(TOGETHER, asked, ranks) <= free:
            batches.append(Batch(asked, fit))
        else:
            batches += [Batch(asked, (name,)) for name in fit]
        for name in names:
            if name not in fit:
                what, least = (f"{name} of ", needed[name]) if fit else ("", min(needed.values()))
                why = f"{what}{size(asked)} needs {least / GIB:.1f} GiB, {free / GIB:.1f} can be had"
                left_out.append((name, asked, why))
    return tuple(batches), left_out


def launches(batches: Sequence[Batch]) -> list[tuple[Batch, ...]]:
    """Deals batches to processes: several of one size, which do not fit together, get their own; others share."""
    sizes = [batch.asked_bytes for batch in batches]
    shared = tuple(batch for batch in batches if sizes.count(batch.asked_bytes) == 1)
    alone: list[tuple[Batch, ...]] = [(batch,) for batch in batches if batch not in shared]
    return [*alone, shared] if shared else alone


def check_fit(names: Sequence[str], sizes: Sequence[int], ranks: Ranks, free: int) -> None:
    """Raises ValueError if there are sizes at which nothing fits."""
    batches, left_out = fitting(names, sizes, ranks, free)
    if none := sorted(set(sizes) - {batch.asked_bytes for batch in batches}):
        least, most = min(needed_bytes(name, none[0], ranks) for name in names), free * (1 - SPARE_SHARE)
        raise ValueError(
            f"sizes_mb (={', '.join(f'{one / MIB:g}' for one in none)}) must fit into memory: with {ranks.num} ranks"
            f" {size(none[0])} needs at least {least / GIB:.1f} GiB, {most / GIB:.1f} can be had"
        )
