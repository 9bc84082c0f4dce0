"""The argument parser of all command lines, also of ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser with one-line errors, whose help lists the strategies in place of STRATEGIES."""

    def format_help(self) -> str:
        """Fills in the names of the strategies."""
        for action in self._actions:
            if "STRATEGIES" in (action.help or ""):
                action.help = str(action.help).replace("STRATEGIES", ", ".join(_strategy_names()))
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Ends the program with one line, without argparse's usage before it."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def _strategy_names() -> list[str]:
    """Names of the registered strategies, read from source files, because importing them would start JAX."""
    if registry := sys.modules.get("jaxddp.registry"):
        return list(registry.STRATEGIES)
    folders = (Path(__file__).parents[1] / name for name in ("ddp", "zero"))
    texts = (path.read_text() for folder in folders for path in sorted(folder.glob("*.py")))
    return [name for text in texts for name in re.findall(r"^@register\ndef (\w+)", text, re.MULTILINE)]
