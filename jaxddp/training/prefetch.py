"""Batches on their way to the ranks while a step runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from ..arguments import check_integer, check_kind
from .placement import place_batch
from .train import Trainer
from .validation import count_examples, host_arrays


def prefetch(iterator: Iterable[Any], trainer: Trainer, size: int = 2) -> Iterator[Any]:
    """Puts batches onto the ranks before they are used.

    The next batch is read, and its transfer started, when the loop asks for one: on GPUs and TPUs while the step before
    computes, unless the loop has waited for that step's metrics. No thread is started.

    Args:
        iterator: Of batches as for ``Trainer.step`` or ``evaluate``, such as a PyTorch ``DataLoader``.
        trainer: Whose ranks.
        size: Batches on the devices, that which was handed out among them.

    Yields:
        The batches, in order. One that the ranks cannot share evenly stays on the host: ``evaluate`` pads it.

    Raises:
        ValueError: If ``size`` is not positive, or a batch is no tree of arrays. What the iterator raises comes after
            the batches before it.
    """
    check_kind("iterator", iterator, Iterable, "an iterable of batches")
    check_kind("trainer", trainer, Trainer, "a jaxddp.Trainer")
    size = check_integer("size", size)
    trainer._check_devices("prefetch", "compile")
    sharding = trainer.batch_sharding

    def put(batch: Any) -> Any:
        # Copies: a reader may refill its arrays for the next batch, and on CPUs devices share memory with the host.
        batch = jax.tree.map(_copied, batch, host_arrays(batch))
        is_even = count_examples(batch) % len(sharding.addressable_devices) == 0
        return place_batch(batch, sharding) if is_even else batch

    def batches() -> Iterator[Any]:
        source, placed, end = iter(iterator), deque[Any](), None
        while True:
            while end is None and len(placed) < size:
                try:
                    placed.append(put(next(source)))
                except Exception as error:
                    end = error
            if placed:
                yield placed.popleft()
            elif isinstance(end, StopIteration):
                return
            elif end is not None:
                raise end

    return batches()


def _copied(given: Any, leaf: Any) -> Any:
    return leaf if isinstance(given, jax.Array) or not hasattr(leaf, "copy") else leaf.copy()
