"""The result of a compilation for a target: the program, or the error."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ..planning.chips import Target

# The TPU compiler's words, with sizes such as 95.74G of 2^30 bytes.
_SIZES = (
    re.compile(r"\((?P<needed>[\d.]+[KMGT]?)\) exceeds available HBM \((?P<available>[\d.]+[KMGT]?)\)"),
    re.compile(r"Used (?P<needed>[\d.]+[KMGT]?) of (?P<available>[\d.]+[KMGT]?)"),
)
_UNITS_BYTES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class MemoryStats(NamedTuple):
    """Memory of a compiled program on each device in bytes, named as in ``Compiled.memory_analysis()``."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int  # of the arguments, what the outputs take over
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int
    peak_memory_in_bytes: int


class TargetProgram:
    """A program compiled for devices that are not here: read like ``jax.stages.Compiled``, it raises when called."""

    def __init__(self, target: Target, text: str, memory: MemoryStats, cost: dict[str, float]) -> None:
        self.target = target
        self._text, self._memory, self._cost = text, memory, cost

    def as_text(self) -> str:
        """The scheduled HLO module."""
        return self._text

    def memory_analysis(self) -> MemoryStats:
        """Memory on each device."""
        return self._memory

    def cost_analysis(self) -> dict[str, float]:
        """The compiler's estimates by name; XLA for GPUs gives none."""
        return self._cost

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses to run: a ValueError."""
        raise ValueError(f"this program is compiled for {self.target.spec!r}, which is not here: it cannot run")

    def __repr__(self) -> str:
        return f"TargetProgram(target={self.target.spec!r})"


class TargetError(ValueError):
    """A program could not be compiled for a target; the message is one line.

    Attributes:
        details: The compiler's full output.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class TargetMemoryError(TargetError):
    """A program does not fit into the memory of a target's devices.

    Attributes:
        needed_bytes: Memory that it needs on each device.
        available_bytes: Memory of a device.
    """

    def __init__(self, message: str, details: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message, details)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


def refusal(target: Target, said: str) -> TargetError:
    """Turns a compiler's refusal into an error.

    It is a ``TargetMemoryError`` if the message has both sizes of memory.

    Example:
        >>> from jaxddp.targets import target
        >>> print(refusal(target("v5p:8"), "RESOURCE_EXHAUSTED: Used 154G of 95.7G hbm."))
        the program needs 165.4 GB on each device of 'v5p:8', which offers 102.8 GB: 62.6 GB too much
    """
    for sizes in _SIZES:
        if found := sizes.search(said):
            needed, available = (_num_bytes(found.group(name)) for name in ("needed", "available"))
            message = (
                f"the program needs {needed / 1e9:.1f} GB on each device of {target.spec!r}, which offers "
                f"{available / 1e9:.1f} GB: {(needed - available) / 1e9:.1f} GB too much"
            )
            return TargetMemoryError(message, said, needed, available)
    return TargetError(f"compiling for {target.spec!r} failed: {said.splitlines()[0]}", said)


def _num_bytes(size: str) -> int:
    return round(float(size.rstrip("KMGT")) * _UNITS_BYTES.get(size[-1], 1))
