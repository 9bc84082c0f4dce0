"""Fields of rows. Rows come from files, so a field may be missing or of any type."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from .run import FAILED, NOT_RUN, holds

Row = Mapping[str, Any]
Key = TypeVar("Key")
Thing = TypeVar("Thing")

MIB = 2**20
NONE = "\N{EN DASH}"
_LONGEST = 160
_LEAST, _MOST = 1e-18, 1e18


def number(row: Row, *path: str) -> float | None:
    """Reads a number at nested keys; None if it is missing, not finite, or implausibly large or small.

    Example:
        >>> number({"compiled": {"batch": 3}}, "compiled", "batch"), number({"ratio": float("inf")}, "ratio")
        (3, None)
    """
    value: Any = row
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and (value == 0 or _LEAST < abs(value) < _MOST) else None


def text(row: Row, key: str) -> str:
    """Reads a field as text, cut to a line; empty if it is missing."""
    value = row.get(key)
    return "" if value is None else cut(str(value))


def cut(words: str, longest: int = _LONGEST) -> str:
    """Cuts text that is too long, and marks the cut."""
    return words if len(words) <= longest else words[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def ends(row: Row, low: str, high: str) -> tuple[float, float] | None:
    """Reads an interval from two fields; None if one is missing."""
    found = number(row, low), number(row, high)
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def spread(row: Row) -> tuple[float, float] | None:
    """The 10th and 90th percentile of a row's time."""
    return ends(row, "p10_ms", "p90_ms")


def rounds_ms(row: Row) -> list[float]:
    """The times of a row's rounds; empty if they are missing, or one of them is no time."""
    times = row.get("rounds_ms")
    found = [number({"ms": time}, "ms") or 0.0 for time in times] if isinstance(times, list) else []
    return found if all(time > 0 for time in found) else []


def buffer_bytes(row: Row) -> float | None:
    """The requested size of a row's buffer; the actual size may be a little larger, to be divisible."""
    asked = number(row, "asked_bytes")
    return number(row, "size_bytes") if asked is None else asked


def strategy(row: Row) -> str:
    """A row's strategy, with its bucket cap."""
    cap = number(row, "bucket_mb")
    return text(row, "strategy") if cap is None else f"{text(row, 'strategy')} {cap:g} MiB"


def check(row: Row) -> str:
    """A row's ``check``; empty if it has none."""
    return text(row, "check")


def is_bad(row: Row) -> bool:
    """Whether a row's check reports that it failed, is wrong or missed its limit."""
    return not holds([{"check": check(row)}])


def is_not_run(row: Row) -> bool:
    """Whether a row could not be measured here."""
    return check(row).startswith(NOT_RUN)


def is_sound(row: Row) -> bool:
    """Whether a row was measured and its check holds."""
    return not is_bad(row) and not is_not_run(row)


def mark(row: Row) -> str:
    """Why a row is not sound, in a word; empty if it is."""
    if is_not_run(row):
        return NOT_RUN.removesuffix(": ")
    said = check(row)
    return said.split(":")[0] if is_bad(row) and said.startswith((FAILED, "WRONG")) else said if is_bad(row) else ""


def badge(row: Row) -> str:
    """As ``mark``, with a cross if the row is bad."""
    return f"\N{BALLOT X} {mark(row)}" if is_bad(row) else mark(row)


def by(things: Iterable[Thing], key: Callable[[Thing], Key]) -> dict[Key, list[Thing]]:
    """Groups rows, or other things, in their order."""
    groups: dict[Key, list[Thing]] = {}
    for thing in things:
        groups.setdefault(key(thing), []).append(thing)
    return groups


def short(value: float) -> str:
    """Formats a number with three significant digits, or with all digits before the point.

    Example:
        >>> short(0.01234), short(12.34), short(1234.5), short(0)
        ('0.0123', '12.3', '1,234', '0')
    """
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(digits, 0), 9)}f}"


def plain(value: float) -> str:
    """Formats a number as ``short`` does, without trailing zeros.

    Example:
        >>> plain(2.0), plain(0.25), plain(4096)
        ('2', '0.25', '4,096')
    """
    written = short(value)
    return written.rstrip("0").rstrip(".") if "." in written else written


def percent(share: float) -> str:
    """Formats a share in percent, with one decimal below 10 %."""
    return f"{share:.0%}" if abs(share) >= 0.0995 or share == 0 else f"{share:.1%}"


def signed(value: float) -> str:
    """As ``short``, with a sign."""
    return f"{'+' if value > 0 else ''}{short(value)}"


def span(low_high: Sequence[float]) -> str:
    """Formats an interval."""
    return f"{short(low_high[0])}{NONE if low_high[0] >= 0 else ' to '}{short(low_high[1])}"


def mib(num_bytes: float) -> str:
    """Formats bytes as MiB, without the unit."""
    return f"{num_bytes / MIB:,.2f}"


def size(num_bytes: float) -> str:
    """Formats bytes in the largest unit that gives at least 1.

    Example:
        >>> size(4096), size(25 * 2**20), size(2**30)
        ('4 KiB', '25 MiB', '1 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def listed(words: Sequence[str]) -> str:
    """Joins words with commas and "and".

    Example:
        >>> listed(["one", "two", "three"])
        'one, two and three'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def counted(count: int, noun: str) -> str:
    """A number and its noun, in the plural unless the number is one.

    Example:
        >>> counted(1, "row"), counted(12, "row")
        ('1 row', '12 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
