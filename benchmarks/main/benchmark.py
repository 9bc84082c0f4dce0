"""The main job: a byte-level language model on real text, under every strategy, in both frameworks.

It is the strategies benchmark without what the frameworks do by themselves, and small enough for a few minutes: the
model of half the layers, in three buckets, and half the batch.
"""

from __future__ import annotations

from dataclasses import replace

from jaxddp import STRATEGIES

from ..harness.options import Options
from ..harness.ranks import num_gpus
from ..harness.run import Run
from ..strategies import benchmark as strategies
from ..training.measure import TrainingSetup
from .section import section

BATCH_SIZE = 4  # or a sequence for each rank where there are more


def describe(options: Options) -> tuple[TrainingSetup, str]:
    """Describes the job, as ``strategies.describe`` does."""
    model = options.model or strategies.QUICK_MODEL
    batch_size = options.batch_size or max(BATCH_SIZE, options.ranks or num_gpus())
    setup, described = strategies.describe(replace(options, model=model, batch_size=batch_size), tuple(STRATEGIES))
    return replace(setup, takes_turns=False), described  # torch compiles nothing: its rows need not wait for JAX's


def run(this: Run, setup: TrainingSetup) -> bool:
    """Runs the job, as ``strategies.run`` does."""
    return strategies.run(this, setup, section)
