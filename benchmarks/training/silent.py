"""torch's step without its communication, whose time is the baseline of exposed communication.

Collectives are completed at once where they are handed to the process group. Only buffers of gradients and parameters
are held back: the loss and norms, fewer than ``SMALL`` values or a few for each rank, still go. What trains like this
computes as much as before, and nonsense. ``jaxddp.strategy.without_communication`` does the same there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

SMALL = 16


@contextlib.contextmanager
def stepped_without_communication() -> Iterator[None]:
    """Completes torch's collectives at once, with buffers of the right shape."""
    import torch.distributed as dist
    from torch.futures import Future

    class Done(dist.Work):
        def wait(self, timeout: Any = None) -> bool:
            return True

        def get_future(self) -> Any:
            future: Any = Future()
            future.set_result([])
            return future

    def reduce(group: Any, tensors: Any, *_: Any) -> Any:
        return Done()

    def gather(group: Any, full: Any, part: Any, *_: Any) -> Any:
        full.view(group.size(), -1).copy_(part.view(1, -1))
        return Done()

    def scatter(group: Any, part: Any, full: Any, *_: Any) -> Any:
        part.view(-1).copy_(full.view(group.size(), -1)[group.rank()])
        return Done()

    local: dict[str, Callable[..., Any]] = {
        "allreduce": reduce, "_allgather_base": gather, "all_gather_single": gather,
        "_reduce_scatter_base": scatter, "reduce_scatter_single": scatter,
    }  # fmt: skip
    group_type: Any = dist.ProcessGroup
    kept = {name: vars(group_type)[name] for name in local if name in vars(group_type)}  # they bind, unlike attributes
    try:
        for name in kept:
            original = getattr(group_type, name)

            def call(group: Any, *args: Any, original: Any = original, local: Any = local[name]) -> Any:
                first = args[0][0] if isinstance(args[0], list) else args[0]
                return local(group, *args) if first.numel() >= max(SMALL, group.size() + 4) else original(group, *args)

            setattr(group_type, name, call)
        yield
    finally:
        for name, original in kept.items():
            setattr(group_type, name, original)
