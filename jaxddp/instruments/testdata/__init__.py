"""Compiled programs as text, for tests; ``make.py`` lists and makes them."""

import functools
import gzip
from pathlib import Path

from ..schedule import Schedule, read_schedule

_FOLDER = Path(__file__).parent


def fixture_names(pattern: str = "*") -> list[str]:
    """Lists the programs, sorted; each name is ``platform-program-jaxversion``.

    Args:
        pattern: A glob, such as ``"gpu-*"``.

    Example:
        >>> fixture_names("tpu-bucketed-*")
        ['tpu-bucketed-jax0.10', 'tpu-bucketed-jax0.12']
    """
    return sorted(path.name.removesuffix(".hlo.gz") for path in _FOLDER.glob(f"{pattern}.hlo.gz"))


def load_fixture(name: str) -> str:
    """Loads the scheduled HLO text of one of ``fixture_names()``."""
    return gzip.decompress((_FOLDER / f"{name}.hlo.gz").read_bytes()).decode()


@functools.cache
def schedule_of(name: str) -> Schedule:
    """Reads one of ``fixture_names()``, once in a process."""
    return read_schedule(load_fixture(name))


def handmade(*lines: str, others: str = "") -> str:
    """Builds the text of a scheduled module.

    Args:
        *lines: Instructions of its entry computation.
        others: Text of its other computations.

    Example:
        >>> print(handmade("ROOT %x = f32[] parameter(0)"))
        HloModule handmade, is_scheduled=true
        <BLANKLINE>
        ENTRY %main () -> f32[] {
          ROOT %x = f32[] parameter(0)
        }
        <BLANKLINE>
    """
    body = "".join(f"  {line}\n" for line in lines)
    return f"HloModule handmade, is_scheduled=true\n\n{others}ENTRY %main () -> f32[] {{\n{body}}}\n"
