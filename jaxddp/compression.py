"""What travels: how a bucket's buffer becomes its sum over ranks.

``none`` sends the buffer as it is. ``noop`` sends nothing and keeps the rank's own part, which makes wrong training
and an exact baseline: exposed communication is the time of a step minus the time of the same step under ``noop``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from .buckets import Bucket


class Compression(NamedTuple):
    """How a buffer is summed over ranks.

    Attributes:
        name: For tables.
        sends: False if nothing is communicated.
        travel: ``(bucket, buffer, axis, memory, route) -> (what the rank keeps of the sum, memory)``; ``memory`` is
            what the compression remembers of this bucket from step to step.
    """

    name: str
    sends: bool
    travel: Callable[[Bucket, jax.Array, str, Any, Any], tuple[jax.Array, Any]]


none = Compression("none", True, lambda bucket, buffer, axis, memory, route: (route.send(buffer, axis), memory))
noop = Compression("noop", False, lambda bucket, buffer, axis, memory, route: (route.keep(buffer, axis), memory))
