"""What JAX's profiler has recorded: the events of a trace, by plane and line.

A GPU is a plane ``/device:GPU:0``, and each of its streams a line ``Stream #13(...)``; what XLA runs on CPUs is in
lines of the plane ``/host:CPU``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Recorded(NamedTuple):
    """An event of a trace, as ``jax.profiler.ProfileData`` has it: with ``name``, ``start_ns`` and ``stats``."""

    plane: str
    line: str
    event: Any


def read_trace(path: Path) -> Iterator[Recorded]:
    """Reads the events of a file ``*.xplane.pb``."""
    import jax

    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                yield Recorded(plane.name, line.name, event)


def ran_on_gpu(one: Recorded) -> bool:
    """Whether an event is a kernel or a copy on a stream of a GPU; other lines of its plane repeat these."""
    return one.plane.startswith("/device:GPU:") and one.line.startswith("Stream #")
