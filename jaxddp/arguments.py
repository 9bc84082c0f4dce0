"""Checks of arguments by their kind: one line in place of an error far from the call, in words that are not its own.

No framework is imported.
"""

from __future__ import annotations

from typing import Any


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuses a value of another type.

    Args:
        name: Of the argument.
        value: Its value.
        kinds: What it may be.
        wanted: The same in words.

    Raises:
        ValueError: If it is none of them.
    """
    if not isinstance(value, kinds):
        raise ValueError(f"{name} (={_short(value)}) must be {wanted}")


def check_function(name: str, value: Any, wanted: str = "a function") -> None:
    """Refuses what cannot be called.

    Raises:
        ValueError: If it cannot.
    """
    if not callable(value):
        raise ValueError(f"{name} (={_short(value)}) must be {wanted}")


def check_optimizer(optimizer: Any) -> None:
    """Refuses what is no optax transformation.

    Raises:
        ValueError: If it lacks ``init`` or ``update``.
    """
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        raise ValueError(f"optimizer (={_short(optimizer)}) must be an optax transformation, such as optax.adam(1e-3)")


def is_number(value: Any) -> bool:
    """Whether a value is a real number; True, strings and arrays of several elements are none."""
    if isinstance(value, (bool, str, bytes)):
        return False
    return isinstance(value, (int, float)) or (getattr(value, "shape", None) == () and hasattr(value, "__float__"))


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
