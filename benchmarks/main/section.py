"""The section of the main job."""

from functools import partial

from ..strategies.section import section as of_strategies

section = partial(of_strategies, title="The main job: every strategy in both frameworks")
