"""Flat data parallelism; the twin of ``jaxddp/ddp/flat.py``, which says what it costs."""

from functools import partial

from jaxddp.communication.buckets import plan_buckets

from ..replicated import Replicated
from ..strategy import register


@register("flat")
class FlatDDP(Replicated):
    """One all-reduce of everything, or one per dtype, after the whole backward; options as `DataParallel`."""

    make_plan = staticmethod(partial(plan_buckets, bucket_mb=None, after_backward=True))
