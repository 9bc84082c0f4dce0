"""Finds the strategies of a package in its folders; no framework. ``registry.py`` of both packages calls it."""

import importlib
import pkgutil
from types import ModuleType
from typing import Any

# Other strategies follow those of their folder.
_ORDER = ("naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3")


def discover(strategies: dict[str, Any], *folders: ModuleType) -> None:
    """Imports every file of some folders, which register their strategies, and sorts these, folder by folder."""
    for folder in folders:
        for module in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            if not module.name.endswith("_test"):
                importlib.import_module(module.name)
    names = [folder.__name__ for folder in folders]

    def place(strategy: tuple[str, Any]) -> tuple[int, int]:
        name, factory = strategy
        return names.index(factory.__module__.rpartition(".")[0]), _ORDER.index(name) if name in _ORDER else len(_ORDER)

    found = sorted(strategies.items(), key=place)
    strategies.clear()
    strategies.update(found)
