"""The one engine that carries a bucket plan out.

Strategies differ in what a ``BucketPlan`` says: which gradients travel together, and whether the first collective waits
for the whole backward; and in what a rank keeps of their sum. ``DataParallel`` knows when: hooks on the parameters
report gradients as the backward finishes them, a bucket whose gradients are all there is launched, and
``finish_gradient_synchronization`` waits for what is under way and divides. What is launched, and where the sums go,
is its subclasses' business: ``Replicated`` sums on every rank, those in ``zero/`` leave each rank a shard.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from jaxddp.planning.buckets import BucketPlan, TensorSpec

from .clipping import clip_to_norm_, global_norm, sharded_norm
from .communication.collectives import broadcast
from .communication.compression import Compression, none
from .communication.low_rank import Memory
from .hooks import check_whole, remove_with
from .strategy import check_dense, tensor_spec

_live: weakref.WeakSet[DataParallel] = weakref.WeakSet()


class DataParallel(nn.Module, abc.ABC):
    """Keeps a module's replicas equal: same weights at the start, averaged gradients at every step.

    Attributes:
        module: The wrapped module.
        plan: What a backward pass communicates.
        num_ranks: Number of ranks.
        memory: What the compression remembers of parameters, by name: this rank's own.
        owns_optimizer: Whether the strategy makes and steps the optimizer: its constructor takes ``optimizer_cls`` and
            the optimizer's options, it has ``step()``, and ``optimizer`` is what a schedule drives.
    """

    module: nn.Module
    owns_optimizer: ClassVar[bool] = False

    def __init__(
        self,
        module: nn.Module,
        make_plan: Callable[[Sequence[TensorSpec]], BucketPlan],
        *,
        process_group: dist.ProcessGroup | None = None,
        order: Sequence[str] | None = None,
        compression: Compression = none,
        sharded: Collection[str] = (),
        shard: Callable[[], None] = lambda: None,
    ) -> None:
        """Broadcasts parameters and buffers from rank 0, and plans the communication.

        Args:
            module: Made with the same structure on every rank; its weights may differ.
            make_plan: Tensors in the order in which their gradients become ready ``->`` plan.
            process_group: The ranks; all of them when None.
            order: Names of the trainable parameters that the plan is about, in the order in which the backward
                finishes their gradients; the reverse of their registration when None.
            compression: What travels.
            sharded: Names of parameters that the plan is not about.
            shard: Replaces those by shards, once every rank has the same weights and nothing is left to refuse.

        Raises:
            ValueError: If there is no process group yet, nothing to train, the module is wrapped or sharded already,
                or ``order`` names other parameters.
        """
        if not dist.is_initialized():
            raise ValueError(
                f"{type(self).__name__} needs a process group: call torch.distributed.init_process_group,"
                " or run under torchref.launch, before wrapping a module"
            )
        check_whole(module)
        _check_unwrapped(module)
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.compression = compression
        self.num_ranks = dist.get_world_size(process_group)
        self.memory: dict[str, Memory] = {}
        self._sync = True
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError(
                f"module (={type(module).__name__}) must have at least one parameter that needs a gradient"
            )
        planned = [name for name in reversed(trained) if name not in sharded]
        names = planned if order is None else list(order)
        if sorted(names) != sorted(planned):
            wrong = sorted(set(names) ^ set(planned)) or [name for name in names if names.count(name) > 1]
            raise ValueError(f"order must name each trainable parameter once; {wrong[0]!r} is not")
        specs = [tensor_spec(name, trained[name]) for name in names]
        self.plan = make_plan(specs if self.num_ranks > 1 else ())  # one rank communicates nothing
        self._bucket_of = {t.name: i for i, bucket in enumerate(self.plan.buckets) for t in bucket.tensors}
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                broadcast(tensor, root=0, group=process_group)
        shard()
        self._sharded = frozenset(sharded)
        self._trained = {name: module.get_parameter(name) for name in trained}
        self._specs = {name: tensor_spec(name, p) for name, p in self._trained.items()}
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
        for bucket in self.plan.buckets[: self._num_launched]:
            for tensor in bucket.tensors:
                self._trained[tensor.name].grad = None
        self._forget()
        self._expect_gradients()

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
        self._launch_rest()
        self._collect()
        # The one division: by the number of ranks and micro-batches, or by the total weight.
        self._divide(self.num_ranks if denominator is None else denominator)
        self._expect_gradients()

    def grad_norm(self) -> torch.Tensor:
        """Gives the global norm of the gradients; call it on every rank, after the synchronisation.

        Raises:
            RuntimeError: If there are no gradients.
        """
        replicated, shards = self._gradients()
        if not replicated and not shards:
            raise RuntimeError("there are no gradients: call finish_gradient_synchronization after the backward")
        return sharded_norm(shards, replicated, self.process_group) if shards else global_norm(replicated)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients to a global norm of at most ``max_norm``, without an epsilon.

        Args:
            max_norm: The greatest norm.

        Returns:
            The norm before.

        Raises:
            ValueError: If ``max_norm`` is not positive.
            RuntimeError: If there are no gradients.
        """
        norm = self.grad_norm()
        replicated, shards = self._gradients()
        clip_to_norm_([*replicated, *shards], norm, max_norm)
        return norm

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Copies all parameters at full size; call it on every rank.

        Returns:
            Copies by name within the module; a shared parameter under each of its names.
        """
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: parameter.detach().clone() for name, parameter in named}

    @abc.abstractmethod
    def planned(self, num_microbatches: int = 1) -> list[tuple[str, int]]:
        """Lists what one step communicates; see ``planned_collectives``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """Copies the wrapper with its module; the copy communicates in the same process group."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo[id(self.process_group)] = self.process_group
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        new._add_hooks()
        return new

    @abc.abstractmethod
    def _launch(self, index: int) -> None:
        """Launches the collective of a bucket."""

    @abc.abstractmethod
    def _collect(self) -> None:
        """Waits for all that was launched, and takes in the sums."""

    @abc.abstractmethod
    def _divide(self, denominator: float) -> None:
        """Divides the sums, and makes them the gradients that the optimizer finds."""

    @abc.abstractmethod
    def _forget(self) -> None:
        """Drops what was launched, and may still be written to."""

    @abc.abstractmethod
    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The gradients that the optimizer finds: those that every rank has whole, and this rank's shards."""

    def _expect_gradients(self) -> None:
        self._num_missing = [len(bucket.tensors) for bucket in self.plan.buckets]
        self._ready: set[str] = set()
        self._num_launched = 0

    def _add_hooks(self) -> None:
        _live.add(self)
        # Weak, because a hook that holds its wrapper keeps model and buckets alive after both are dropped.
        this = weakref.ref(self)
        names = () if self.plan.after_backward else self._bucket_of
        hooked = [(self._trained[name], _ready_hook(this, name)) for name in names]
        remove_with(self, [parameter.register_post_accumulate_grad_hook(hook) for parameter, hook in hooked])

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
        if self._sync:
            self._count(name)

    def _count(self, name: str) -> None:
        if name in self._ready:
            raise RuntimeError(
                f"the gradient of {name!r} was computed twice: call finish_gradient_synchronization after each"
                " backward, or put all backward passes but the last under no_sync"
            )
        self._ready.add(name)
        self._num_missing[self._bucket_of[name]] -= 1
        # In plan order, even if a later bucket fills first: every rank must issue the same collectives in turn.
        while self._num_launched < len(self._num_missing) and self._num_missing[self._num_launched] == 0:
            self._launch_next()

    def _launch_rest(self) -> None:
        while self._num_launched < len(self.plan.buckets):
            self._launch_next()

    def _launch_next(self) -> None:
        self._launch(self._num_launched)
        self._num_launched += 1

    def _grad(self, name: str) -> torch.Tensor:
        """The gradient of a parameter, zeros if it has none."""
        parameter = self._trained[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        check_dense(name, parameter.grad)
        return parameter.grad


def _check_unwrapped(module: nn.Module) -> None:
    for other in _live:
        theirs = {id(p) for p in other._trained.values()}
        for name, parameter in module.named_parameters():
            if id(parameter) in theirs:
                raise ValueError(
                    f"parameter {name!r} is already wrapped by a {type(other).__name__}: delete that first, or both"
                    " would sum its gradient"
                )


def _ready_hook(wrapper: weakref.ref[DataParallel], name: str) -> Callable[[torch.Tensor], None]:
    def hook(parameter: torch.Tensor) -> None:
        del parameter  # torch passes the parameter, not its gradient
        net = wrapper()
        if net is not None:
            net._on_ready(name)

    return hook
