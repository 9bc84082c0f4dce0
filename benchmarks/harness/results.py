"""The folder of a run, and the commit and machine that its rows record."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path


def new_run_folder(out: str | None, benchmark: str) -> Path:
    """Makes the folder of a run, a new one under ``runs/`` if ``out`` is None.

    Raises:
        ValueError: If ``out`` exists and is not an empty folder: nothing is overwritten.
    """
    folder = Path(out) if out else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{benchmark}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"out (={folder}) must not exist, or be an empty folder: nothing is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def counts(collectives: Sequence[tuple[str, int]]) -> str:
    """The number of collectives of each kind: AR is all-reduce, RS reduce-scatter, AG all-gather."""
    kinds = Counter("".join(word[:1].upper() for word in kind.split("-")) for kind, _ in collectives)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"


def commit() -> str:
    """The commit checked out beside this file, with ``+`` if files differ from it; empty if there is none."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""
