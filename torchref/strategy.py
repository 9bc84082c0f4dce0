"""The contract of a strategy, and the engine that carries out a bucket plan.

    net = make_strategy(name, module, ...)       every rank has rank 0's weights from here on
    net(x) ... loss.backward()                   a bucket's reduction starts when its last gradient is ready
    net.finish_gradient_synchronization()        waits for all reductions and divides once
    optimizer.step()                             or net.step(), if the strategy owns the optimizer

A strategy is what these methods of a subclass say, and nothing outside of its file asks which one it is:

    make_plan(tensors)                           which gradients are reduced together, and what waits for the backward
    layout()                                     which parameters are updated by shards, and how they are cut
    start_reduction(bucket)                      starts to sum a bucket over ranks: all-reduce or reduce-scatter
    finish_reductions(denominator)               waits, divides, and stores the means where the optimizer reads them
    step()                                       of those that own the optimizer: on shards, then an all-gather
"""

from __future__ import annotations

import abc
import contextlib
import re
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jaxddp.arguments import check_positive
from jaxddp.communication.buckets import Bucket, BucketPlan, TensorSpec
from jaxddp.processes.watchdog import begin_step, end_step

from .agreement import check_alike
from .clipping import clip_to_norm_, global_norm
from .communication.collectives import broadcast
from .communication.reduction import check_dense, tensor_spec
from .communication.sharding import Cut, gather_whole
from .parts import PartialGradient, Shard

# Options of DistributedDataParallel that change nothing here.
_HARMLESS = {"device_ids", "output_device", "dim", "find_unused_parameters", "gradient_as_bucket_view", "static_graph"}
OPTIONS = {"process_group", "broadcast_buffers", *_HARMLESS}
_live: weakref.WeakSet[DataParallel] = weakref.WeakSet()


class DataParallel(nn.Module, abc.ABC):
    """Keeps a module's replicas equal: the same weights at the start, averaged gradients at every step.

    Attributes:
        plan: What a backward pass communicates.
        require_backward_grad_sync: As in ``DistributedDataParallel``; ``no_sync`` switches it off.
        owns_optimizer: Whether the strategy makes the optimizer, of ``optimizer_cls`` and options, and has ``step()``.
        broadcasts_buffers: Whether buffers are rank 0's after each synchronisation.
        each_microbatch: Whether gradients are reduced in every backward, also under ``no_sync``.
    """

    module: nn.Module
    owns_optimizer: ClassVar[bool] = False
    each_microbatch: bool = False
    _sharded: frozenset[str] = frozenset()  # names of parameters that are in no plan, because the module holds shards

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        **ddp_options: Any,
    ) -> None:
        """Broadcasts parameters and buffers from rank 0, and plans the communication.

        Args:
            module: Of the same structure on every rank; its weights may differ.
            process_group: The ranks; all of them when None.
            broadcast_buffers: Whether buffers, such as running means, are rank 0's after each synchronisation, too.
            **ddp_options: Those of ``DistributedDataParallel`` that change nothing here, such as ``device_ids``.

        Raises:
            ValueError: If there is nothing to train, the module is wrapped, an option is unknown, or ranks differ.
        """
        if unknown := ddp_options.keys() - _HARMLESS:
            raise ValueError(f"{type(self).__name__} has no option {min(unknown)}; caps of buckets are bucket_mb")
        check_module(module)
        super().__init__()
        self.module, self.process_group = module, process_group
        self.num_ranks, self.require_backward_grad_sync = dist.get_world_size(process_group), True
        self.broadcasts_buffers = broadcast_buffers and self.num_ranks > 1
        self._trained = {one: p for one, p in module.named_parameters() if p.requires_grad}
        hook = re.sub(r" at 0x[0-9a-f]+", "", str(getattr(self, "_hook", None)))
        chosen = {"strategy": type(self).__name__, "broadcast_buffers": broadcast_buffers, "hook": hook}
        chosen["compute_dtype"] = str(getattr(self, "compute_dtype", None))
        check_alike(chosen | _describe(module), process_group)
        specs = [tensor_spec(name, p) for name, p in reversed(self._trained.items()) if name not in self._sharded]
        self.plan = self.make_plan(specs if self.num_ranks > 1 else ())  # one rank communicates nothing
        self._planned = {tensor.name for bucket in self.plan.buckets for tensor in bucket.tensors}
        checksum = f"{zlib.crc32(repr(self.plan).encode()):08x}"
        check_alike({"plan": f"{len(self.plan.buckets)} buckets, checksum {checksum}"}, process_group)
        if not self._trained:
            raise ValueError(f"module (={type(module).__name__}) must have a parameter that needs a gradient")
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                broadcast(tensor, root=0, group=process_group)
        # Whether gradients are not whole before finish_gradient_synchronization: on one rank most are.
        self._must_finish = self.num_ranks > 1 or self.owns_optimizer or bool(self._sharded)
        self._is_finished = self._is_in_step = False  # synchronised, and no forward since
        self._expect_gradients()
        self._add_hooks()
        self._wrapped = self._held()

    @abc.abstractmethod
    def make_plan(self, tensors: Sequence[TensorSpec]) -> BucketPlan:
        """Plans tensors, which come in the order in which their gradients become ready."""

    @abc.abstractmethod
    def start_reduction(self, bucket: Bucket) -> None:
        """Packs a bucket of the plan and starts to sum it over ranks."""

    @abc.abstractmethod
    def finish_reductions(self, denominator: Any) -> None:
        """Waits for the sums over ranks, divides them, and stores the means where the optimizer reads gradients."""

    @abc.abstractmethod
    def drop_reductions(self) -> None:
        """Discards the reductions in flight; their buffers must not be reused, as they may still be written to."""

    @abc.abstractmethod
    def planned_collectives(self, num_microbatches: int = 1) -> list[tuple[str, int]]:
        """Lists the collectives of one step: ``(kind, bytes of the full buffer)`` in the order in which they start."""

    def layout(self) -> dict[str, tuple[torch.Tensor, Cut]]:
        """This rank's shards that an optimizer updates, and how the parameters are cut, by name."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(f"a {type(self).__name__} is not pickled or copied: save gather_full_params()")

    def gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The optimizer's gradients: those replicated on every rank, and this rank's shards."""
        grads = {name: p.grad.as_subclass(torch.Tensor) for name, p in self._trained.items() if p.grad is not None}
        replicated = [grad for name, grad in grads.items() if name not in self._sharded]
        return replicated, [grad for name, grad in grads.items() if name in self._sharded]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module; a RuntimeError if parameters have changed since a backward that was never finished."""
        self._before_forward()
        return self.module(*args, **kwargs)

    @torch._disable_dynamo  # of which torch.compile around the wrapper traces nothing
    def _before_forward(self) -> None:
        is_in_backward = torch._C._current_graph_task_id() != -1  # which computes this again
        if torch.is_grad_enabled() and not is_in_backward:
            self._check_weights()
            self._discard_if_cleared()
            self._is_finished = False
            if self._has_begun:
                self.end_microbatch()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, and discards a backward pass that was never finished, as ``on_train_batch_start``."""
        self.on_train_batch_start()
        super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Suspends communication: backwards inside only accumulate, and the first one after it communicates the sum."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def on_train_batch_start(self) -> None:
        """Discards a backward pass that was never finished; a RuntimeError if parameters have changed since."""
        self._check_weights()
        self.discard_pass()

    def discard_pass(self) -> None:
        """As ``on_train_batch_start``, whatever has happened to the parameters since."""
        if self._ready:  # another rank may have used what this one has not, and sent it
            self._start(full_only=False)
        for name in self._sent:
            self._trained[name].grad = None
        self.drop_reductions()
        self._expect_gradients()
        self._is_finished = False

    def finish_gradient_synchronization(self, denominator: Any = None) -> None:
        """Reduces the remaining buckets, waits for all reductions, and divides once.

        Call it after the backward and before the optimizer, on every rank. A parameter that the forward did not use
        gets a zero gradient, so that optimizers treat it alike on all ranks.

        Args:
            denominator: Divides the sums over ranks, a number or a scalar tensor; the number of ranks when None.

        Raises:
            ValueError: If a parameter or a buffer was changed after wrapping, or a denominator that is no tensor is not
                positive.
            RuntimeError: If no pass has followed the last synchronisation, or a gradient was changed while reduced.
        """
        if denominator is not None and not isinstance(denominator, torch.Tensor):
            check_positive("denominator", denominator)
        self._check_held()
        self._check_weights()
        self._discard_if_cleared()
        self._check_sent(self._sent)
        if self._is_finished and not self._has_begun:
            raise RuntimeError(
                "finish_gradient_synchronization was called again without a backward: call it once after the backward,"
                " or zero_grad() of the wrapper before gradients of your own, or none"
            )
        self.start_reductions()
        self.finish_reductions(self.num_ranks if denominator is None else denominator)
        self._broadcast_buffers()
        self._expect_gradients()
        self._is_finished = True

    def start_reductions(self) -> None:
        """Starts the reductions that the backward has not, of parameters that this rank did not use.

        ``finish_gradient_synchronization`` does. Call it first where another collective, as of the loss, comes before
        that: ranks that used other parameters would start theirs in another order, and one would be mixed with another.
        """
        if not self._is_in_step and self.num_ranks == dist.get_world_size():
            self._is_in_step = True
            begin_step()
        self._start(full_only=False)

    def grad_norm(self) -> torch.Tensor:
        """The global norm of the gradients; call it on every rank, after the synchronisation."""
        self._check_finished()
        return global_norm(*self.gradients(), self.process_group)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients to a global norm of at most ``max_norm``, without an epsilon; returns that before."""
        norm = self.grad_norm()
        clip_to_norm_(sum(self.gradients(), []), norm, max_norm)
        return norm

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Copies all parameters in full, by name, a shared one under each of its names; call it on every rank."""
        named: Any = self.module.named_parameters(remove_duplicate=False)
        return {
            name: gather_whole(one, one.cut, self.process_group) if hasattr(one, "cut") else one.detach().clone()
            for name, one in named
        }

    def _expect_gradients(self) -> None:
        if self._is_in_step:
            end_step()
        self._is_in_step = False  # as the watchdog sees it
        self._has_begun = False  # a backward that is not synchronised yet
        self._ready: set[str] = set()
        self._sent: dict[str, tuple[torch.Tensor, int]] = {}  # gradients as they were reduced, and their versions
        self._num_started = 0

    def _add_hooks(self) -> None:
        _live.add(self)
        self._accumulators: dict[str, Any] = {}  # autograd's, which must stay alive to keep their hooks
        for name in self._trained.keys() - self._sharded:
            node: Any = get_gradient_edge(self._trained[name]).node
            # After the hooks that users put on the parameter, whenever they do: as DistributedDataParallel's.
            node.register_hook(partial(weakly(self._on_arrival), name))
            self._accumulators[name] = node
        if self._must_finish:
            weakref.finalize(self, register_optimizer_step_pre_hook(before_step(self._check_step)).remove)

    def _held(self) -> set[tuple[str, TensorSpec, int]]:
        """What is to stay as it is: trainable parameters, and the shapes and dtypes of buffers that are broadcast."""
        named = self.module.named_parameters()
        held = {(f"parameter {name!r}", tensor_spec(name, p), id(p)) for name, p in named if p.requires_grad}
        buffers = self.module.named_buffers() if self.broadcasts_buffers else ()
        return held | {(f"buffer {name!r}", tensor_spec(name, one), 0) for name, one in buffers}

    def _check_held(self, lost: Collection[str] = ()) -> None:
        if changed := [*(name for name, *_ in self._held() ^ self._wrapped), *lost]:
            raise ValueError(
                f"{min(changed)} was added, removed, frozen, unfrozen, replaced or cast after wrapping: wrap the"
                " module anew, for buffers that change with broadcast_buffers=False"
            )

    def _begin_pass(self) -> None:
        """Notes that there are gradients of this rank alone, and the versions of the weights that they are of."""
        if not self._has_begun:
            self._has_begun, self._versions = True, [one._version for one in self._trained.values()]

    def _check_weights(self) -> None:
        """Refuses weights that have changed since a backward that was not finished, but by ``parameter.data``."""
        if self._has_begun and self._must_finish and self._versions != [p._version for p in self._trained.values()]:
            raise RuntimeError(
                "parameters were changed after a backward that was never finished, by gradients of this rank alone:"
                " call finish_gradient_synchronization before the optimizer's step, or zero_grad() before other changes"
            )

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer's step on gradients of this rank alone."""
        if self._has_begun or not self._is_finished:
            ids = {id(parameter) for parameter in self._trained.values() if parameter.grad is not None}
            if any(id(one) in ids for group in optimizer.param_groups for one in group["params"]):
                # Accumulators are others, without the hooks, after a cast there and back.
                held = [(one, self._trained[one], node) for one, node in self._accumulators.items()]
                held = [each for each in held if each[1].requires_grad]
                lost = [name for name, parameter, node in held if get_gradient_edge(parameter).node is not node]
                self._check_held([f"parameter {name!r}" for name in lost])
                if torch._C._current_graph_task_id() != -1:  # in a hook of a backward, before its gradient has arrived
                    self._begin_pass()
                self._check_finished()

    def _check_finished(self) -> None:
        self._discard_if_cleared()
        if self._has_begun and self._must_finish:
            raise RuntimeError(
                "gradients are of this rank alone: call finish_gradient_synchronization after the backward, before"
                " clipping and the step, or zero_grad() to discard them"
            )

    def _discard_if_cleared(self) -> None:
        """Discards a backward whose gradients were all set to None, or what was reduced of it would come back."""
        if self._has_begun and all(parameter.grad is None for parameter in self._trained.values()):
            self.discard_pass()

    def _on_arrival(self, name: str, *_: Any) -> None:
        self._begin_pass()
        grad = self._trained[name].grad
        if self.num_ranks > 1 and type(grad) is torch.Tensor and grad.layout == torch.strided:
            self._trained[name].grad = grad.as_subclass(PartialGradient)
        if name in self._planned and not self.plan.after_backward:
            if self.require_backward_grad_sync or self.each_microbatch or name in self._ready:
                self._count(name)

    def end_microbatch(self) -> None:
        """Called before the forward that follows a backward, for those that reduce in each."""

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """Broadcasts the buffers from rank 0, changed or not: no rank knows whether another's have changed."""
        buffers = list(self.module.buffers()) if self.broadcasts_buffers else []
        if buffers:  # not counted with the gradients
            group: Any = self.process_group or dist.group.WORLD
            dist._broadcast_coalesced(group, buffers, 250 * 2**20, 0)  # bytes at a time, as DistributedDataParallel

    def _count(self, name: str) -> None:
        if name in self._ready and self.each_microbatch:
            self.end_microbatch()
        if name in self._ready:
            raise RuntimeError(
                f"the gradient of {name!r} was computed twice: call finish_gradient_synchronization after each"
                " backward, put all backward passes but the last under no_sync, or drop one by zero_grad() of the"
                " wrapper; of a parameter that a reentrant checkpoint uses again, checkpoint with use_reentrant=False"
            )
        self._ready.add(name)
        self._start()

    def _start(self, full_only: bool = True) -> None:
        """Starts buckets in plan order, even if a later one is full first: the order of collectives is all ranks'."""
        for bucket in self.plan.buckets[self._num_started :]:
            if full_only and not all(tensor.name in self._ready for tensor in bucket.tensors):
                return
            self.start_reduction(bucket)
            for tensor in bucket.tensors:
                self._note_sent(tensor.name)
            self._num_started += 1

    def _note_sent(self, name: str) -> None:
        grad: Any = self._trained[name].grad
        self._sent[name] = grad, grad._version

    def _check_sent(self, names: Collection[str]) -> None:
        """Refuses a change of a gradient that is being reduced."""
        for name in names:
            sent, version = self._sent[name]
            if self._trained[name].grad is not sent or sent._version != version:
                raise RuntimeError(
                    f"the gradient of {name!r} was changed while it was reduced: change gradients after"
                    " finish_gradient_synchronization, or drop all of them by zero_grad() of the wrapper"
                )

    def _grad(self, name: str) -> torch.Tensor:
        """A parameter's gradient; zeros if it has none."""
        parameter = self._trained[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        check_dense(name, parameter.grad)
        parameter.grad = parameter.grad.resolve_conj()  # no collective takes a lazy one
        return parameter.grad.as_subclass(torch.Tensor).detach()


STRATEGIES: dict[str, type[DataParallel]] = {}  # read it from registry.py, which fills it


def register(name: str) -> Callable[[type], type]:
    """Adds a class to ``STRATEGIES`` under a name; a decorator."""

    def add(strategy: type) -> type:
        STRATEGIES[name] = strategy
        return strategy

    return add


def check_module(module: nn.Module) -> None:
    """Refuses a module of which another wrapper reduces or shards a parameter, by a ValueError."""
    for path, one in module.named_modules():
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.max_norm is not None:
            raise ValueError(f"module {path!r} (={one}) changes rows of its weight where a rank looks them up")
    owners = {id(p): type(other).__name__ for other in _live for p in other._trained.values()}
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device: module.to_empty(device=...), then wrap it")
        if isinstance(parameter, Shard):
            raise ValueError(f"parameter {name!r} is a shard made by FSDP: wrap a new module, of gather_full_params()")
        if id(parameter) in owners:
            raise ValueError(f"parameter {name!r} is already wrapped by a {owners[id(parameter)]}: delete that first")


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Makes a hook of a method: one that referenced its wrapper would keep model and buckets alive after both."""
    reference = weakref.WeakMethod(method)

    def hook(*args: Any, **kwargs: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args, **kwargs)

    return hook


def before_step(check: Any) -> Callable[..., Any]:
    """Makes a hook of a method that is called before an optimizer's step, or in it, after its closure."""
    check = weakly(check)

    @torch._disable_dynamo  # a compiled step may be of another wrapper's parameters
    def hook(optimizer: Any, args: Any, kwargs: Any) -> Any:
        closure: Any = args[1] if len(args) > 1 else kwargs.pop("closure", None)
        if not callable(closure):
            return check(optimizer)
        return (optimizer, lambda: (closure(), check(optimizer))[0], *args[2:]), kwargs

    return hook


def _describe(module: nn.Module) -> dict[str, str]:
    """What must be alike on every rank: names, order, shapes and dtypes, and which parameters are trained."""
    said = {
        f"{kind} {index}": f"{name} {[*tensor.shape]} {tensor.dtype}{' trained' if tensor.requires_grad else ''}"
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for index, (name, tensor) in enumerate(tensors)
    }
    return {name: text.replace("torch.", "") for name, text in said.items()}
