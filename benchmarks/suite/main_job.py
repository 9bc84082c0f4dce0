"""The main job: a byte-level language model on real text, under every strategy, in both frameworks.

It is the comparison of ``strategies.py`` without what the frameworks do by themselves.
"""

from __future__ import annotations

from jaxddp import STRATEGIES

from ..harness.options import Options
from ..strategies import benchmark as strategies
from ..strategies.benchmark import run as run
from ..training.measure import Setup


def describe(options: Options) -> tuple[Setup, str]:
    """Describes the job.

    Args:
        options: As for ``strategies.describe``.

    Returns:
        The setup, and its description in a line.

    Raises:
        ValueError: As ``strategies.describe``.
    """
    return strategies.describe(options, tuple(STRATEGIES))
