"""The accounting of the source documents, and the checks that this package's functions give its values.

``accounting.json`` has a row for every figure: what a document says, and what is right. A row whose right value is a
number has a check here, in the file of its subject; ``accounting_test.py`` says where the rows in words are.
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
    """Gives the rows by their ids."""
    rows = json.loads((Path(__file__).parent / "accounting.json").read_text())
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def checks(row_id: str) -> Callable[[Check], Check]:
    """Registers the check of a row; a decorator."""

    def add(check: Check) -> Check:
        assert row_id not in CHECKS, row_id
        CHECKS[row_id] = check
        return check

    return add


def check_printed(ours: Any, printed: Any, digits: int = 4) -> None:
    """Compares a value, or a tree of them, with what is printed.

    Args:
        ours: What a function gave.
        printed: Integers must be equal; of other numbers the printed digits, up to one unit of the last.
        digits: How many there are at least; zeros at the end are not printed.
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
    """Whether two values, or arrays of them, are equal but for the rounding of the same terms in another order."""
    return bool(np.allclose(ours, theirs, rtol=1e-12, atol=0))


def _last_digit(printed: float, least_digits: int) -> float:
    """One unit of the last printed digit: what is printed was rounded, in part from what was rounded before."""
    if printed == 0:
        return 1e-9
    mantissa = re.sub(r"e.*", "", repr(printed)).replace("-", "").replace(".", "").strip("0")
    exponent = math.floor(math.log10(abs(printed)))
    return 10.0 ** (exponent + 1 - max(len(mantissa), least_digits))
