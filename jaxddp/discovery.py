"""Finds the strategies of a package in its folder; no framework. ``registry.py`` of both packages calls it."""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

# Other strategies follow these.
_ORDER = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")


def discover(strategies: dict[str, Any], folder: ModuleType) -> None:
    """Imports every file of a folder, which register their strategies, and sorts these and those known before."""
    for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
        if not module.name.endswith("_test"):
            importlib.import_module(module.name)
    found = sorted(strategies.items(), key=lambda one: _ORDER.index(one[0]) if one[0] in _ORDER else len(_ORDER))
    strategies.clear()
    strategies.update(found)
