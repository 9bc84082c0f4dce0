"""What every result is kept with: a folder of its own, the commit, the machine."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any


def new_run_folder(out: str | None, benchmark: str) -> Path:
    """Makes the folder of a run; nothing is ever overwritten.

    Args:
        out: Its path; a new one under ``runs/`` when None.
        benchmark: For the name of the latter.

    Raises:
        ValueError: If ``out`` exists and is not an empty folder.
    """
    folder = Path(out) if out else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{benchmark}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out (={folder}) must not exist, or be an empty folder: nothing is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def counts(collectives: Sequence[tuple[str, int]]) -> str:
    """How many collectives of each kind: AR is all-reduce, RS reduce-scatter, AG all-gather."""
    kinds = Counter("".join(word[0].upper() for word in kind.split("-")) for kind, _ in collectives)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"


def commit() -> str:
    """The commit that is checked out beside this file, with ``+`` if files differ from it; empty if there is none."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe_machine() -> dict[str, Any]:
    """What the numbers depend on beside the code."""
    import os

    return {"machine": platform.machine(), "cores": os.cpu_count(), "system": platform.system()}
