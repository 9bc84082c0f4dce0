"""The accounting of the teaching material, and checks that this package computes the same values.

``accounting.json`` has a row for every figure: the document's value and the right one. A row whose right value is a
number has a check here, in the file of its subject.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Row = dict[str, Any]
Check = Callable[[Row], None]

CHECKS: dict[str, Check] = {}


def load_rows() -> dict[str, Row]:
    """Loads the rows by id."""
    rows = json.loads((Path(__file__).parent / "accounting.json").read_text())
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def checks(row_id: str) -> Callable[[Check], Check]:
    """Decorator that registers the check of a row."""

    def add(check: Check) -> Check:
        assert row_id not in CHECKS, row_id
        CHECKS[row_id] = check
        return check

    return add


def check_printed(ours: Any, printed: Any, digits: int = 4) -> None:
    """Compares a value, or a tree of values, with printed ones.

    Args:
        ours: The computed value.
        printed: Integers must be equal; other numbers up to one unit of the last printed digit.
        digits: Least number of significant digits; trailing zeros are not printed.
    """
    if isinstance(printed, Mapping):
        assert list(ours) == list(printed)
        for key in printed:
            check_printed(ours[key], printed[key], digits)
    elif isinstance(printed, list):
        assert len(ours) == len(printed)
        for our, theirs in zip(ours, printed, strict=True):
            check_printed(our, theirs, digits)
    elif isinstance(printed, str | bool | None):
        assert ours == printed, (ours, printed)
    elif isinstance(printed, int):
        assert float(ours) == printed, (ours, printed)
    else:
        assert abs(float(ours) - printed) <= _last_digit(printed, digits), (ours, printed)


def close(ours: Any, theirs: Any) -> bool:
    """Whether two values or arrays are equal up to rounding."""
    return bool(np.allclose(ours, theirs, rtol=1e-12, atol=0))


def _last_digit(printed: float, least_digits: int) -> float:
    """One unit of the last printed digit."""
    if printed == 0:
        return 1e-9
    mantissa = re.sub(r"e.*", "", repr(printed)).replace("-", "").replace(".", "").strip("0")
    exponent = math.floor(math.log10(abs(printed)))
    return 10.0 ** (exponent + 1 - max(len(mantissa), least_digits))
