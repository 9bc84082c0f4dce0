"""The contract of a strategy, the registry, and the one engine that carries a plan out.

The data-parallel strategies differ in two decisions only, and both stand in their ``BucketPlan``: which gradients
travel together, and whether the first collective waits for the whole backward. ``DataParallel`` turns the plan into
collectives: hooks on the parameters report gradients as the backward finishes them, a bucket whose gradients are all
there is launched, and ``finish_gradient_synchronization`` waits for what is under way and divides.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .buckets import Bucket, BucketPlan, TensorSpec, pack, unpack
from .collectives import broadcast
from .compression import Compression, none

STRATEGIES: dict[str, Callable[..., DataParallel]] = {}
_live: weakref.WeakSet[DataParallel] = weakref.WeakSet()


def register(name: str) -> Callable[[type], type]:
    """Adds a class to ``STRATEGIES`` under a name; a decorator."""

    def add(strategy: type) -> type:
        STRATEGIES[name] = strategy
        return strategy

    return add


def make_strategy(name: str, module: nn.Module, **options: Any) -> DataParallel:
    """Wraps a module in a strategy by name.

    Args:
        name: A key of ``STRATEGIES``.
        module: What to train.
        **options: For its class.

    Returns:
        The wrapper.

    Raises:
        ValueError: If there is no strategy of that name.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(STRATEGIES)}")
    return STRATEGIES[name](module, **options)


class DataParallel(nn.Module):
    """Keeps a module's replicas equal: same weights at the start, averaged gradients at every step.

    ======== ==================== =================================
    tensor   on each rank, before on each rank, after
    ======== ==================== =================================
    gradient ``[shape]``, its own ``[shape]``, sum / denominator
    buffer   ``[bucket]``         ``[bucket]``, the same everywhere
    ======== ==================== =================================

    After synchronisation every ``parameter.grad`` is a view of its bucket's buffer; with
    ``zero_grad(set_to_none=False)`` the next backward accumulates straight into it.

    Attributes:
        module: The wrapped module.
        plan: What a step communicates.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        make_plan: Callable[[Sequence[TensorSpec]], BucketPlan],
        *,
        process_group: dist.ProcessGroup | None = None,
        order: Sequence[str] | None = None,
        compression: Compression = none,
    ) -> None:
        """Broadcasts parameters and buffers from rank 0, and plans the communication.

        Args:
            module: Made with the same structure on every rank; its weights may differ.
            make_plan: Tensors in the order in which their gradients become ready ``->`` plan.
            process_group: The ranks; all of them when None.
            order: Names of the trainable parameters in the order in which the backward finishes their gradients;
                the reverse of their registration when None.
            compression: What travels.

        Raises:
            ValueError: If there is no process group yet, nothing to train, or ``order`` names other parameters.
        """
        if not dist.is_initialized():
            raise ValueError(
                f"{type(self).__name__} needs a process group: call torch.distributed.init_process_group,"
                " or run under torchref.launch, before wrapping a module"
            )
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.compression = compression
        self.num_ranks = dist.get_world_size(process_group)
        self._sync = True
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                broadcast(tensor, root=0, group=process_group)
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self._trained:
            raise ValueError(
                f"module (={type(module).__name__}) must have at least one parameter that needs a gradient"
            )
        names = list(reversed(self._trained)) if order is None else list(order)
        if sorted(names) != sorted(self._trained):
            wrong = sorted(set(names) ^ set(self._trained)) or [name for name in names if names.count(name) > 1]
            raise ValueError(f"order must name each trainable parameter once; {wrong[0]!r} is not")
        self._specs = {name: tensor_spec(name, self._trained[name]) for name in names}
        self.plan = make_plan(list(self._specs.values()) if self.num_ranks > 1 else ())  # one rank communicates nothing
        self._buffers_of_plan = [_buffer(bucket, self._trained) for bucket in self.plan.buckets]
        self._bucket_of = {t.name: i for i, bucket in enumerate(self.plan.buckets) for t in bucket.tensors}
        self._expect_gradients()
        self._add_hooks()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; the first one outside communicates the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def on_train_batch_start(self) -> None:
        """Forgets a backward pass that was never finished, such as one that failed midway."""
        for index in range(len(self._work)):  # what is under way may still write to these
            bucket = self.plan.buckets[index]
            self._buffers_of_plan[index] = _buffer(bucket, self._trained)
            for tensor in bucket.tensors:
                self._trained[tensor.name].grad = None
        self._expect_gradients()

    def _expect_gradients(self) -> None:
        self._num_missing = [len(bucket.tensors) for bucket in self.plan.buckets]
        self._ready: set[str] = set()
        self._work: list[Any] = []

    def finish_gradient_synchronization(self, denominator: float | None = None) -> None:
        """Launches what is left, waits for all, and divides once.

        Call it after the backward and before the optimizer, on every rank. A parameter that took no part in the
        forward gets a gradient of zeros, so that optimizers treat it alike everywhere.

        Args:
            denominator: What the sum over ranks is divided by: the number of ranks when None, which gives the mean.

        Raises:
            ValueError: If a parameter is no longer what it was when the module was wrapped.
        """
        self._check_unchanged()
        for parameter in self._trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        while len(self._work) < len(self.plan.buckets):
            self._launch_next()
        for work, bucket, buffer in zip(self._work, self.plan.buckets, self._buffers_of_plan, strict=True):
            if work is not None:
                work.wait()
            for name, view in unpack(bucket, self._grad_buffer(bucket, buffer)).items():
                self._trained[name].grad = view
        # The one division: by the number of ranks and micro-batches, or by the total weight.
        denominator = self.num_ranks if denominator is None else denominator
        for bucket, buffer in zip(self.plan.buckets, self._buffers_of_plan, strict=True):
            self._grad_buffer(bucket, buffer).div_(denominator)
        for name in self._trained.keys() - self._bucket_of.keys():
            self._grad(name).div_(denominator)
        self._expect_gradients()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """Copies the wrapper with its module; the copy communicates in the same process group."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo[id(self.process_group)] = self.process_group
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        new._add_hooks()
        return new

    def _add_hooks(self) -> None:
        for other in _live:
            shared = {id(p) for p in other._trained.values()}
            for name, parameter in self._trained.items():
                if id(parameter) in shared:
                    raise ValueError(
                        f"parameter {name!r} is already wrapped by a {type(other).__name__}: delete that first, or"
                        " both would sum its gradient"
                    )
        _live.add(self)
        if not self.plan.after_backward:
            # Weak, because a hook that holds its wrapper keeps model and buckets alive after both are dropped.
            this = weakref.ref(self)
            for name in self._bucket_of:
                self._trained[name].register_post_accumulate_grad_hook(_ready_hook(this, name))

    def _check_unchanged(self) -> None:
        now = dict(self.module.named_parameters())
        for name, parameter in self._trained.items():
            if now.get(name) is not parameter or tensor_spec(name, parameter) != self._specs[name]:
                change = "replaced or turned into another dtype"
            elif not parameter.requires_grad:
                change = "frozen"
            else:
                continue
            raise ValueError(f"parameter {name!r} was {change} after wrapping: wrap the module anew")

    def _on_ready(self, name: str) -> None:
        if not self._sync:
            return
        if name in self._ready:
            raise RuntimeError(
                f"the gradient of {name!r} was computed twice: call finish_gradient_synchronization after each"
                " backward, or put all backward passes but the last under no_sync"
            )
        self._ready.add(name)
        self._num_missing[self._bucket_of[name]] -= 1
        # In plan order, even if a later bucket fills first: every rank must issue the same collectives in turn.
        while len(self._work) < len(self._num_missing) and self._num_missing[len(self._work)] == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket, buffer = self.plan.buckets[len(self._work)], self._buffers_of_plan[len(self._work)]
        if buffer is not None:
            grads = {tensor.name: self._grad(tensor.name) for tensor in bucket.tensors}
            pack(bucket, grads, out=buffer)
        in_flight = not self.plan.after_backward  # naive and flat wait for each call, which is what they are
        flat = self._grad_buffer(bucket, buffer)
        self._work.append(self.compression.sum_over_ranks(flat, self.process_group, in_flight))

    def _grad_buffer(self, bucket: Bucket, buffer: torch.Tensor | None) -> torch.Tensor:
        return self._grad(bucket.tensors[0].name) if buffer is None else buffer

    def _grad(self, name: str) -> torch.Tensor:
        grad = self._trained[name].grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise ValueError(f"the gradient of {name!r} has layout {grad.layout}: only dense gradients are supported")
        return grad


def tensor_spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describes a tensor by name, shape and dtype, which is all that a bucket plan needs."""
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def planned_collectives(net: DataParallel) -> list[tuple[str, int]]:
    """Lists what a wrapper communicates in one step.

    Args:
        net: The wrapper.

    Returns:
        ``(kind, bytes of the full buffer)`` in launch order.
    """
    if not net.compression.sends:
        return []
    return [("all-reduce", bucket.num_bytes) for bucket in net.plan.buckets]


def _buffer(bucket: Bucket, tensors: dict[str, nn.Parameter]) -> torch.Tensor | None:
    """The buffer of a bucket, kept from step to step; None for one tensor, whose own gradient serves."""
    if len(bucket.tensors) == 1:
        return None
    first = tensors[bucket.tensors[0].name]
    return torch.empty(bucket.num_elements, dtype=first.dtype, device=first.device)


def _ready_hook(wrapper: weakref.ref[DataParallel], name: str) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        del parameter  # torch passes the parameter, not its gradient
        net = wrapper()
        if net is not None:
            net._on_ready(name)

    return hook
