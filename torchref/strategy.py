"""The contract of a strategy, the registry, and the engine that carries out a bucket plan.

    net = make_strategy(name, module, ...)       every rank has rank 0's weights from here on
    net(x) ... loss.backward()                   a bucket's reduction starts when its last gradient is ready
    net.finish_gradient_synchronization()        waits for all reductions and divides once; with sync="backward", which
                                                 the wrapper is given, the backward ends with it
    optimizer.step()                             or net.step(), if the strategy owns the optimizer

``DataParallel`` decides when a bucket is reduced: hooks on the parameters report gradients as the backward finishes
them, and buckets start in plan order. A strategy decides how: ``Replicated`` all-reduces, ``zero/`` reduce-scatters.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import weakref
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jaxddp import __version__
from jaxddp.arguments import check_flag, check_kind, check_positive
from jaxddp.communication.buckets import BucketMb, BucketPlan, TensorSpec
from jaxddp.processes.watchdog import begin_step, end_step

from .agreement import check_alike
from .clipping import clip_to_norm_, global_norm, sharded_norm
from .communication.buffers import check_dense, tensor_spec
from .communication.collectives import broadcast
from .communication.compression import Compression, none
from .communication.low_rank import Memory
from .gradients import PartialGradient
from .hooks import check_not_sharded, remove_hooks_with, weakly

Sync = Literal["finish", "backward"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_BROADCAST_BYTES = 250 * 2**20  # at a time, as DistributedDataParallel does

_live: weakref.WeakSet[DataParallel] = weakref.WeakSet()


class DataParallel(nn.Module, abc.ABC):
    """Keeps a module's replicas equal: the same weights at the start, averaged gradients at every step.

    Attributes:
        module: The wrapped module.
        plan: What a backward pass communicates.
        num_ranks: Number of ranks.
        memory: This rank's state of the compression, by parameter.
        sync: What synchronises the gradients: a call of ``finish_gradient_synchronization``, or every backward.
        owns_optimizer: Whether the strategy makes and steps the optimizer. Its constructor then takes
            ``optimizer_cls`` and the optimizer's options, it has ``step()``, and a schedule drives its ``optimizer``.
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
        broadcast_buffers: bool = True,
        sync: Sync = "finish",
        sharded: Collection[str] = (),
        shard: Callable[[], None] = lambda: None,
    ) -> None:
        """Broadcasts parameters and buffers from rank 0, and plans the communication.

        Args:
            module: Of the same structure on every rank; its weights may differ.
            make_plan: Tensors in the order in which their gradients become ready ``->`` plan.
            process_group: The ranks; all of them when None.
            order: Names of the planned parameters in the order in which the backward finishes their gradients; the
                reverse of their registration when None.
            compression: Of the gradients.
            broadcast_buffers: Whether buffers, such as running means, are rank 0's after each synchronisation, too.
            sync: ``"backward"`` ends every backward outside ``no_sync`` with ``finish_gradient_synchronization()``, so
                that none is to be called. Each rank's backward must then reach a trainable parameter.
            sharded: Names of parameters to leave out of the plan, because ``shard`` shards them.
            shard: Replaces those parameters by shards. Called after the broadcast and all checks.

        Raises:
            ValueError: If there is no process group yet, nothing to train, the module is wrapped or sharded already,
                ``sync`` is neither, ranks have other versions, strategies, parameters, buffers or plans, or ``order``
                names other parameters.
        """
        if not dist.is_initialized():
            raise ValueError(
                f"{type(self).__name__} needs a process group: call torch.distributed.init_process_group,"
                " or run under torchref.launch, before wrapping a module"
            )
        check_wrapped(module, compression, process_group)
        check_flag(broadcast_buffers=broadcast_buffers)
        if order is not None:
            check_kind("order", order, Iterable, "the names of parameters")
        if sync not in ("finish", "backward"):
            raise ValueError(f"sync (={sync!r}) must be 'finish' or 'backward'")
        check_not_sharded(module)
        _check_unwrapped(module)
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.compression = compression
        self.sync = sync
        self.num_ranks = dist.get_world_size(process_group)
        self.memory: dict[str, Memory] = {}
        self._sync = True
        if self.num_ranks > 1:
            versions = {"torchref": __version__, "torch": torch.__version__}
            chosen = {
                "strategy": type(self).__name__,
                "compression": compression.name,
                "broadcast_buffers": broadcast_buffers,
                "sync": sync,
            }
            check_alike(versions | chosen | _describe(module), process_group)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not trained:
            raise ValueError(
                f"module (={type(module).__name__}) must have at least one parameter that needs a gradient"
            )
        planned = [name for name in reversed(trained) if name not in sharded]
        names = planned if order is None else list(order)
        if sorted(names, key=str) != sorted(planned):
            wrong = sorted(set(names) ^ set(planned), key=str) or [name for name in names if names.count(name) > 1]
            raise ValueError(f"order must name each trainable parameter once; {wrong[0]!r} is not")
        specs = [tensor_spec(name, trained[name]) for name in names]
        self.plan = make_plan(specs if self.num_ranks > 1 else ())  # one rank communicates nothing
        if self.num_ranks > 1:
            checksum = zlib.crc32(repr(self.plan).encode())
            check_alike({"plan": f"{len(self.plan.buckets)} buckets, checksum {checksum:08x}"}, process_group)
        self._bucket_of = {t.name: i for i, bucket in enumerate(self.plan.buckets) for t in bucket.tensors}
        with torch.no_grad():
            for tensor in [*module.parameters(), *module.buffers()]:
                broadcast(tensor, root=0, group=process_group)
        shard()
        self._sharded = frozenset(sharded)
        self._trained = {name: module.get_parameter(name) for name in trained}
        self._specs = {name: tensor_spec(name, p) for name, p in self._trained.items()}
        self._buffer_specs = [tensor_spec(name, buffer) for name, buffer in module.named_buffers()]
        self._broadcasts_buffers = broadcast_buffers and self.num_ranks > 1 and compression.sends
        self._weights: _Weights | None = None  # at the last backward
        self._begins_pass = False
        self._has_optimizer = False  # one has stepped
        self._divisor: float | None = None  # of the last synchronisation, an estimate for the next
        self._is_finished = False  # synchronised, and no forward since
        self._last_backward = -1  # that ends with a synchronisation; autograd's number of it
        self._expect_gradients()
        self._add_hooks()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module.

        Raises:
            RuntimeError: If parameters have changed since a backward that was never finished.
        """
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:  # else it is recomputed in a backward
            self._check_last_pass()
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, and discards a backward pass that was never finished.

        Raises:
            RuntimeError: If parameters have changed since that pass.
        """
        self.on_train_batch_start()
        super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Suspends communication: backwards inside only accumulate, and the first one after it communicates the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def on_train_batch_start(self) -> None:
        """Discards a backward pass that was never finished, such as one that raised.

        Raises:
            RuntimeError: If parameters have changed since that pass.
        """
        self._check_no_stray_step()
        self.discard_pass()

    def discard_pass(self) -> None:
        """Discards a backward pass that was never finished, whatever has happened to the parameters since."""
        for bucket in self.plan.buckets[: self._num_started]:
            for tensor in bucket.tensors:
                self._trained[tensor.name].grad = None
        self._drop_reductions()
        self._expect_gradients()
        self._is_finished = False

    def finish_gradient_synchronization(self, denominator: float | None = None) -> None:
        """Reduces the remaining buckets, waits for all reductions, and divides once.

        Call it after the backward and before the optimizer, on every rank. A parameter that the forward did not use
        gets a zero gradient, so that optimizers treat it alike on all ranks.

        Args:
            denominator: Divides the sums over ranks; the number of ranks when None, which gives the mean.

        Raises:
            ValueError: If a parameter was replaced, frozen, cast, added or made trainable after wrapping, a buffer
                resized, cast, added or removed, or the denominator is not positive.
            RuntimeError: If no pass has followed the last synchronisation, or a gradient was changed that is being
                reduced already.
        """
        if denominator is not None:
            check_positive("denominator", denominator)
        self._check_unchanged()
        self._check_no_stray_step(by_content=not self._has_optimizer)
        self._discard_if_cleared()
        for name in self._sent:
            self._check_sent(name)
        if self._is_finished and not self._has_begun:
            raise RuntimeError(
                "finish_gradient_synchronization was called again without a backward: call it once after the backward,"
                " or zero_grad() before gradients of your own"
            )
        spans_job = self.num_ranks == dist.get_world_size()
        if spans_job:
            begin_step()
        denominator = self.num_ranks if denominator is None else denominator
        if self._waits_for_divisor:
            self._divisor = denominator
        self._start_all()
        self._divisor = denominator
        self._finish_reductions(denominator)
        self._broadcast_buffers()
        self._expect_gradients()
        self._is_finished = True
        if spans_job:
            end_step()

    def grad_norm(self) -> torch.Tensor:
        """Computes the global norm of the gradients; call it on every rank, after the synchronisation.

        Raises:
            RuntimeError: If there are no gradients, or they are not synchronised.
        """
        self._check_finished()
        replicated, shards = self._gradients()
        if not replicated and not shards:
            raise RuntimeError("there are no gradients: call finish_gradient_synchronization after the backward")
        return sharded_norm(shards, replicated, self.process_group) if shards else global_norm(replicated)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales the gradients to a global norm of at most ``max_norm``, without an epsilon; returns that before.

        Raises:
            ValueError: If ``max_norm`` is not positive.
            RuntimeError: If there are no gradients.
        """
        norm = self.grad_norm()
        replicated, shards = self._gradients()
        clip_to_norm_([*replicated, *shards], norm, max_norm)
        return norm

    def gather_full_params(self) -> dict[str, torch.Tensor]:
        """Copies all parameters in full, by name, a shared one under each of its names; call it on every rank."""
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: parameter.detach().clone() for name, parameter in named}

    def local_shards(self) -> dict[str, tuple[torch.Tensor, torch.Size]]:
        """This rank's shards that an optimizer updates, and the shapes of the whole parameters, by name."""
        return {}

    def __deepcopy__(self, memo: dict[int, Any]) -> DataParallel:
        """Copies the wrapper with its module; the copy communicates in the same process group."""
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        memo[id(self.process_group)] = self.process_group
        new.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        new._weights = None  # copies have versions of their own
        new._add_hooks()
        return new

    @abc.abstractmethod
    def _planned_collectives(self, num_microbatches: int) -> list[tuple[str, int]]:
        """Lists the collectives of one step; see ``planned_collectives``."""

    @abc.abstractmethod
    def _start_reduction(self, index: int) -> None:
        """Packs a bucket of the plan and starts to sum it over ranks."""

    @abc.abstractmethod
    def _finish_reductions(self, denominator: float) -> None:
        """Waits for the sums over ranks, divides them, and stores the means where the optimizer reads gradients."""

    @abc.abstractmethod
    def _drop_reductions(self) -> None:
        """Discards the reductions in flight; their buffers must not be reused, as they may still be written to."""

    @abc.abstractmethod
    def _gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The optimizer's gradients: those replicated on every rank, and this rank's shards."""

    def _expect_gradients(self) -> None:
        self._has_begun = False  # a backward that is not synchronised yet
        self._num_missing = [len(bucket.tensors) for bucket in self.plan.buckets]
        self._ready: set[str] = set()
        self._sent: dict[str, tuple[torch.Tensor, int]] = {}  # gradients as they were reduced, and their versions
        self._num_started = 0

    def _add_hooks(self) -> None:
        _live.add(self)
        for name in self._trained.keys() - self._sharded:
            hook = partial(weakly(self._on_arrival), name)
            remove_hooks_with(self, [self._trained[name].register_post_accumulate_grad_hook(hook)])
        if self._must_finish:
            remove_hooks_with(self, [register_optimizer_step_pre_hook(weakly(self._check_step))])

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
        for name, parameter in now.items():
            if parameter.requires_grad and name not in self._trained:
                raise ValueError(f"parameter {name!r} became trainable after wrapping: wrap the module anew")

    def _check_last_pass(self) -> None:
        """Refuses an optimizer step that was not synchronised, and discards a backward whose gradients were cleared."""
        self._check_no_stray_step()
        self._discard_if_cleared()
        self._begins_pass = self._must_finish
        self._is_finished = False

    def _note_weights(self) -> None:
        """Notes what the weights are, to see whether they change before the synchronisation."""
        self._begins_pass, self._weights = False, _Weights(self._trained.values())

    def _check_no_stray_step(self, *, by_content: bool = True) -> None:
        """Refuses weights that have changed since the last forward, if its backward was not finished."""
        if self._has_begun and self._weights is not None and self._weights.have_changed(by_content):
            raise RuntimeError(
                "parameters were changed after a backward that was never finished, by gradients of this rank alone:"
                " call finish_gradient_synchronization before the optimizer's step, or zero_grad() before other changes"
            )

    def _check_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuses an optimizer's step on gradients of this rank alone, also one that raises no version."""
        if self._has_optimizer and not self._has_begun:
            return
        ids = {id(parameter) for parameter in self._trained.values()}
        stepped = [one for group in optimizer.param_groups for one in group["params"] if id(one) in ids]
        self._has_optimizer = self._has_optimizer or bool(stepped)
        if any(parameter.grad is not None for parameter in stepped):
            self._check_finished()

    def _check_finished(self) -> None:
        if self._has_begun and self._must_finish and not self._is_cleared():
            raise RuntimeError(
                "gradients are of this rank alone: call finish_gradient_synchronization after the backward, before"
                " clipping and the step, or zero_grad() to discard them"
            )

    @property
    def _must_finish(self) -> bool:
        """Whether gradients are not whole before ``finish_gradient_synchronization``: on one rank most are."""
        return self.num_ranks > 1 or self.owns_optimizer or bool(self._sharded)

    def _is_cleared(self) -> bool:
        """Whether the gradients of a backward that was not finished were set to None, as optimizers do."""
        return all(parameter.grad is None for parameter in self._trained.values())

    def _discard_if_cleared(self) -> None:
        """Discards a backward whose gradients were all cleared, or what was reduced of it would come back."""
        if self._has_begun and self._is_cleared():
            self.discard_pass()

    def _on_arrival(self, name: str, *_: Any) -> None:  # torch passes the parameter, not its gradient
        self._has_begun = True
        if self.sync == "backward":
            self._finish_with_backward()
        if self._begins_pass:  # not before: a forward may change weights, as one that limits their norm does
            self._note_weights()
        grad = self._trained[name].grad
        if self.num_ranks > 1 and type(grad) is torch.Tensor and grad.layout == torch.strided:
            self._trained[name].grad = grad.as_subclass(PartialGradient)
        if name in self._bucket_of and not self.plan.after_backward:
            self._on_ready(name)

    def _finish_with_backward(self) -> None:
        """Has the running backward end with the synchronisation, unless under ``no_sync``."""
        backward = torch._C._current_graph_task_id()
        if self._sync and backward != self._last_backward:
            self._last_backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        if self._has_begun:  # else one within it, as of a reentrant checkpoint, was the last to reach a parameter
            self.finish_gradient_synchronization()

    def _on_ready(self, name: str) -> None:
        if self._sync or name in self._ready:
            self._count(name)

    @torch.no_grad()
    def _broadcast_buffers(self) -> None:
        """Broadcasts the buffers from rank 0, changed or not: no rank knows whether another's have changed."""
        if not self._broadcasts_buffers:
            return
        buffers = dict(self.module.named_buffers())
        now = [tensor_spec(name, buffer) for name, buffer in buffers.items()]
        if now != self._buffer_specs:
            before = {spec.name: spec for spec in self._buffer_specs}
            wrong = next(name for name in [*buffers, *before] if (spec := before.get(name)) is None or spec not in now)
            raise ValueError(
                f"buffer {wrong!r} was added, removed, resized or cast after wrapping, and ranks could differ in it:"
                " register it as it stays before wrapping, or wrap with broadcast_buffers=False"
            )
        if buffers:  # not counted with the gradients
            group: Any = self.process_group or dist.group.WORLD
            dist._broadcast_coalesced(group, list(buffers.values()), _BROADCAST_BYTES, 0)

    def _count(self, name: str) -> None:
        if name in self._ready:
            raise RuntimeError(
                f"the gradient of {name!r} was computed twice: call finish_gradient_synchronization after each"
                " backward, put all backward passes but the last under no_sync, or drop one by zero_grad() of the"
                " wrapper"
            )
        self._ready.add(name)
        self._num_missing[self._bucket_of[name]] -= 1
        if self._waits_for_divisor:
            return
        # In plan order, even if a later bucket fills first: all ranks must issue the same collectives in one order.
        while self._num_started < len(self._num_missing) and self._num_missing[self._num_started] == 0:
            self._start_next()

    @property
    def _waits_for_divisor(self) -> bool:
        """Whether buckets wait for the backward to end: the compression divides first, and no divisor is known yet."""
        return self.compression.needs_divisor and self._divisor is None

    def _start_all(self) -> None:
        while self._num_started < len(self.plan.buckets):
            self._start_next()

    def _start_next(self) -> None:
        self._start_reduction(self._num_started)
        for tensor in self.plan.buckets[self._num_started].tensors:
            if isinstance(self._trained[tensor.name].grad, PartialGradient):
                self._note_sent(tensor.name)
        self._num_started += 1

    def _note_sent(self, name: str) -> None:
        """Notes a gradient that must not change before the synchronisation."""
        grad = self._trained[name].grad
        assert grad is not None
        self._sent[name] = grad, grad._version

    def _check_sent(self, name: str, num_additions: int = 0) -> None:
        """Refuses a change of such a gradient, but for autograd's additions to it."""
        sent, version = self._sent.get(name, (None, 0))
        grad = self._trained[name].grad
        if sent is not None and (grad is not sent or sent._version != version + num_additions):
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
        return parameter.grad.as_subclass(torch.Tensor)


STRATEGIES: dict[str, type[DataParallel]] = {}


def check_wrapped(module: Any, compression: Any, process_group: Any) -> None:
    """Refuses arguments of another kind by a ValueError, before a strategy reads them."""
    check_kind("module", module, nn.Module, "a torch.nn.Module")
    check_kind("compression", compression, Compression, "a compression, such as make_compression('bf16')")
    if process_group is not None:
        check_kind("process_group", process_group, dist.ProcessGroup, "a process group, or None for all ranks")


def check_dtype(name: str, dtype: Any) -> None:
    """Refuses what is neither a floating-point dtype of torch nor None, by a ValueError."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"{name} (={dtype!r}) must be a floating-point dtype or None")


def register(name: str) -> Callable[[type], type]:
    """Adds a class to ``STRATEGIES`` under a name; a decorator."""

    def add(strategy: type) -> type:
        STRATEGIES[name] = strategy
        return strategy

    return add


def planned_collectives(net: DataParallel, *, num_microbatches: int = 1) -> list[tuple[str, int]]:
    """Lists the collectives of one step: ``(kind, bytes of the full buffer)`` in the order in which they start."""
    return net._planned_collectives(num_microbatches) if net.compression.sends else []


def resolve_bucket_mb(bucket_mb: BucketMb, bucket_size_mb: BucketMb) -> BucketMb:
    """Returns the bucket cap that was given under either of its two names.

    Raises:
        ValueError: If both are given.
    """
    if bucket_size_mb == "default":
        return bucket_mb
    if bucket_mb != "default":
        raise ValueError(
            f"bucket_mb (={bucket_mb!r}) and bucket_size_mb (={bucket_size_mb!r}) are one option: give one of them"
        )
    return bucket_size_mb


def _check_unwrapped(module: nn.Module) -> None:
    for other in _live:
        theirs = {id(p) for p in other._trained.values()}
        for name, parameter in module.named_parameters():
            if id(parameter) in theirs:
                raise ValueError(
                    f"parameter {name!r} is already wrapped by a {type(other).__name__}: delete that first, or both"
                    " would sum its gradient"
                )


class _Weights:
    """Tells whether parameters have changed, also where no version counter does, as by ``parameter.data``.

    Costs one read of them, fused and not waited for on a GPU (on 2 CPU cores 6 ms for 60 MiB). A comparison costs
    another, and is waited for: a step with one forward and one synchronisation needs none.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._versions, self._checksums = self._now_versions(), self._now_checksums()

    def have_changed(self, by_content: bool) -> bool:
        """Compares with the present; without ``by_content``, the version counters only, which costs nothing."""
        if self._versions != self._now_versions():
            return True
        return by_content and not all(map(torch.equal, self._checksums, self._now_checksums()))

    def _now_versions(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]

    def _now_checksums(self) -> Sequence[torch.Tensor]:
        weights = [parameter.detach() for parameter in self._parameters]
        weights = [torch.view_as_real(one) if one.is_complex() else one for one in weights]
        if len({one.device for one in weights}) == 1 and weights[0].is_cuda:
            norms = torch.stack(torch._foreach_norm(weights, dtype=torch.float64))  # one tensor: compared at once
            return [norms.view(torch.int64)]  # bits, as NaN is not equal to itself
        # On a CPU, norms depend on the number of threads; sums of the bits as integers do not.
        bits = [one.view(_INTEGERS[one.element_size()]) for one in weights]
        return [one.sum(dtype=one.dtype) for one in bits]


def _describe(module: nn.Module) -> dict[str, str]:
    """What must be alike on every rank: names, order, shapes and dtypes, and which parameters are trained."""
    said = {
        f"{kind} {index}": f"{name} {[*tensor.shape]} {tensor.dtype}{' trained' if tensor.requires_grad else ''}"
        for kind, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers()))
        for index, (name, tensor) in enumerate(tensors)
    }
    return {name: text.replace("torch.", "") for name, text in said.items()}
