"""The main job: a byte-level language model on real text, under every strategy, in both frameworks.

It is the strategies benchmark without what the frameworks do by themselves, on the model of half the layers: three
buckets, and every program compiled and timed within minutes.
"""

from __future__ import annotations

from dataclasses import replace

from jaxddp import STRATEGIES

from ..harness.options import Options
from ..harness.run import Run
from ..strategies import benchmark as strategies
from ..training.measure import TrainingSetup
from .section import section


def describe(options: Options) -> tuple[TrainingSetup, str]:
    """Describes the job, as ``strategies.describe`` does."""
    return strategies.describe(replace(options, model=options.model or strategies.QUICK_MODEL), tuple(STRATEGIES))


def run(this: Run, setup: TrainingSetup) -> bool:
    """Runs the job, as ``strategies.run`` does."""
    return strategies.run(this, setup, section)
