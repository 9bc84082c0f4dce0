"""Overlapped data parallelism; the twin of ``jaxddp/ddp/overlapped.py``, which says what it costs."""

from jaxddp.communication.buckets import plan_per_tensor

from ..replicated import Replicated
from ..strategy import register


@register("overlapped")
class OverlappedDDP(Replicated):
    """One all-reduce per parameter, as its gradient becomes ready; options as `DataParallel`."""

    make_plan = staticmethod(plan_per_tensor)
