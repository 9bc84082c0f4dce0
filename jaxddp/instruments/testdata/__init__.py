"""Compiled programs as text, for tests; ``make.py`` lists and makes them."""

import functools
import gzip
from pathlib import Path

from ..schedule import Schedule, read_schedule

_FOLDER = Path(__file__).parent


def fixture_names(pattern: str = "*") -> list[str]:
    """Lists the programs that match a glob, sorted; each name is ``platform-program-jaxversion``."""
    return sorted(path.name.removesuffix(".hlo.gz") for path in _FOLDER.glob(f"{pattern}.hlo.gz"))


def load_fixture(name: str) -> str:
    """Loads the scheduled HLO text of one of ``fixture_names()``."""
    return gzip.decompress((_FOLDER / f"{name}.hlo.gz").read_bytes()).decode()


@functools.cache
def schedule_of(name: str) -> Schedule:
    """Reads one of ``fixture_names()``, once in a process."""
    return read_schedule(load_fixture(name))


def handmade(*lines: str, others: str = "") -> str:
    """Builds the text of a scheduled module from the lines of its entry computation and other computations."""
    body = "".join(f"  {line}\n" for line in lines)
    return f"HloModule handmade, is_scheduled=true\n\n{others}ENTRY %main () -> f32[] {{\n{body}}}\n"
