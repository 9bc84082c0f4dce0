"""Naive data parallelism; the twin of ``jaxddp/ddp/naive.py``, which says what it costs."""

from functools import partial

from jaxddp.communication.buckets import plan_per_tensor

from ..replicated import Replicated
from ..strategy import register


@register("naive")
class NaiveDDP(Replicated):
    """One all-reduce per parameter, after the whole backward; options as `DataParallel`."""

    make_plan = staticmethod(partial(plan_per_tensor, after_backward=True))
