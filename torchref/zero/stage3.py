"""ZeRO stage 3 (fully sharded data parallelism): parameters are sharded as well.

The twin of ``jaxddp/zero/stage3.py``, which counts the bytes. A unit is a module of one of ``shard_types``. A rank
holds 1/N of everything, the unit that is running, and the parameters of other modules, which stay replicated.

    forward   of unit u:  p = all-gather of p[r]           y = u(p, x)                 drop p
    backward  of unit u:  p = all-gather of p[r]           dx, dp = u'(p, x, dy)       drop p
                          g[r] += row r of the sum over ranks of dp                    reduce-scatter, drop dp
    rest                  g = sum over ranks of d rest                                 all-reduce, bucket by bucket
    update                p[r] += optimizer(g[r] / N, state[r], p[r])

    calls per step: 3 per unit, less one where the backward needs no weight (an embedding, a first layer)

The forward and the backward wait for each gather. Up to two reduce-scatters are in flight.
"""

import weakref
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.optimizer import register_optimizer_step_post_hook

from jaxddp.communication.buckets import BucketMb, BucketPlan, TensorSpec, plan_buckets

from ..agreement import check_alike, group_device
from ..communication.collectives import is_silent
from ..communication.sharding import Cut, ShardSums, num_bytes
from ..ddp import Replicated
from ..parts import Shard, SpentGradient, make_shard, mark_gradients, spent_gradient
from ..strategy import check_module, register, weakly
from .gather import Unit, own_parameters
from .optimizers import check_elementwise, check_memory, describe_optimizer


@register("zero3")
class FSDP(Replicated):
    """Shards the parameters of some modules, which are full only while they are used.

    ``parameters()`` are the shards, in the parameters' own dtype and with as many dimensions, and the replicated
    parameters. The optimizer over them may be made before or after wrapping, and must be element-wise. Every backward
    reduces the shards' gradients, even under ``no_sync``; the replicated ones are accumulated. Clip with
    ``clip_grad_norm_`` of the wrapper. All ranks must use the same units in the same order; the synchronisation
    compares. A parameter is full only within its own module's forward; elsewhere it is a shard (``parts.py``) for
    ever: ``state_dict`` is refused, and ``gather_full_params`` gives the whole. ``torch.compile`` does not compile it.
    """

    forward = torch._disable_dynamo(Replicated.forward)

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        shard_types: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding),
        *,
        bucket_mb: BucketMb = "default",
        **options: Any,
    ) -> None:
        """Wraps a module.

        Args:
            module: What to train.
            compute_dtype: Parameters are gathered and modules compute in this dtype: the floating-point arguments of
                each module with parameters are cast to it, but of BatchNorm. No casts if None.
            shard_types: Modules of these types are units: the parameters directly in them are sharded.
            bucket_mb: Cap of the buckets of replicated gradients; see ``plan_buckets``.
            **options: Of ``DataParallel``.

        Raises:
            ValueError: If there is no parameter to shard, a unit shares one with a module that is no unit, a unit keeps
                or changes its weights itself, a module is compiled, ``compute_dtype`` is not floating, or as
                ``BucketedDDP``.
        """
        if compute_dtype is not None and not getattr(compute_dtype, "is_floating_point", False):
            raise ValueError(f"compute_dtype (={compute_dtype!r}) must be a floating dtype of torch or None")
        check_module(module)
        self._bucket_mb, self.compute_dtype = bucket_mb, compute_dtype
        self._to_shard = _find_units(module, shard_types)
        ids = {id(parameter) for one in self._to_shard for parameter in own_parameters(one).values()}
        self._sharded = frozenset(name for name, one in module.named_parameters() if id(one) in ids)
        self._sums, self._in_step = ShardSums(), list[Any]()
        self._compared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.uses: list[str] = []  # collectives of units since the last synchronisation, in order
        super().__init__(module, **options)

    def make_plan(self, tensors: Sequence[TensorSpec]) -> BucketPlan:
        """Buckets of the replicated parameters, after the backward: between units, ranks' orders could differ."""
        return plan_buckets(tensors, self._bucket_mb, after_backward=True)

    def layout(self) -> dict[str, tuple[torch.Tensor, Cut]]:
        """The parameters of all units are shards, in the module as well; a shared one under each of its names."""
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: (one, one.cut) for name, one in named if hasattr(one, "cut")}

    def planned_collectives(self, num_microbatches: int = 1) -> list[tuple[str, int]]:
        """The collectives if all units run once, in order, on inputs that need a gradient."""
        forward: list[tuple[str, int]] = []
        backward: list[tuple[str, int]] = []
        for unit in self._units if self.num_ranks > 1 else ():
            gathers = [("all-gather", num_bytes(one, self.num_ranks)) for one in unit.compute_plan.buckets]
            sums = [("reduce-scatter", num_bytes(one, self.num_ranks)) for one in unit.reduce_plan.buckets]
            forward += gathers
            backward = [*(gathers if unit.needed_again else ()), *sums, *backward]
        return (forward + backward) * num_microbatches + super().planned_collectives(num_microbatches)

    def finish_reductions(self, denominator: Any) -> None:
        """Shards get their part of the means; replicated parameters as in ``Replicated``."""
        self.end_microbatch()
        self._compare_order()
        means = self._sums.means(denominator)
        for name, one in self._shards.items():
            mean, before = means.get(name), one.grad
            if mean is None:  # nothing has come
                mean = torch.zeros_like(one) if before is None else before
            elif before is not None and not isinstance(before, SpentGradient):  # an earlier mean
                mean += before.as_subclass(torch.Tensor)
            one.grad = mean
        mark_gradients(self._shards.values(), self.num_ranks > 1)
        super().finish_reductions(denominator)

    def drop_reductions(self) -> None:
        """Drops what is in flight or has arrived, and what was gathered for the backward."""
        self._sums.forget()
        self.end_microbatch()
        super().drop_reductions()

    def end_microbatch(self) -> None:
        """Waits for the sums in flight."""
        self._sums.wait()
        for unit in self._units:
            unit.drop()

    def _add_hooks(self) -> None:
        """Shards the parameters of the units too, after the broadcast and all checks."""
        rank = dist.get_rank(self.process_group)
        for name in self._sharded:
            parameter = self.module.get_parameter(name)
            make_shard(parameter, name, Cut(tuple(parameter.shape), self.num_ranks), rank)
        self._shards: dict[str, Any] = {name: p for name, p in self._trained.items() if name in self._sharded}
        self._units = [
            Unit(name, one, one in self._to_shard, self)
            for name, one in self.module.named_modules()
            if one in self._to_shard or (self.compute_dtype and own_parameters(one) and not isinstance(one, _BatchNorm))
        ]
        del self._to_shard
        super()._add_hooks()
        after_step = weakly(self._after_step)
        handles = [one for unit in self._units for one in unit.handles]
        handles.append(self.module.register_forward_pre_hook(after_step, prepend=True))  # of a step that raised
        for handle in (register_optimizer_step_post_hook(after_step), *handles):
            weakref.finalize(self, handle.remove)

    def add_sum(self, parts: dict[str, torch.Tensor], unit: Unit, work: Any, buffer: torch.Tensor) -> None:
        """A unit's gradients are on their way; until they are synchronised, a ``SpentGradient`` stands for them."""
        self._begin_pass()
        shards = [unit.shards[name] for name in parts]  # a shared one under each of its names
        for shard in shards:
            if shard.full_name in self._sent:
                self._check_sent([shard.full_name])
                continue
            if shard.grad is None:  # else it has the mean of an earlier synchronisation
                shard.grad = spent_gradient(shard.as_subclass(torch.Tensor))
            self._note_sent(shard.full_name)
        names = (shard.full_name for shard in shards)
        self._sums.add([*zip(names, parts.values(), strict=True)], work, buffer)

    def _compare_order(self) -> None:
        """Refuses ranks that have used units in another order: equal shapes would mix one with another in silence."""
        uses, self.uses = self.uses, []
        if self.num_ranks == 1 or is_silent():
            return
        checksum = zlib.crc32("\n".join(uses).encode())
        ends = torch.tensor([checksum, -checksum], device=group_device(self.process_group))
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.process_group)  # not counted with the gradients
        if int(ends.sum()):
            check_alike({f"collective {i} of units": use for i, use in enumerate(uses)}, self.process_group)

    def _check_step(self, optimizer: torch.optim.Optimizer) -> None:
        super()._check_step(optimizer)
        ids = {id(one) for group in optimizer.param_groups for one in group["params"]}
        if mine := [one for one in self._shards.values() if id(one) in ids]:
            check_elementwise(optimizer)
            if optimizer not in self._compared:  # its first step here, on all ranks
                check_alike(describe_optimizer(optimizer), self.process_group)
                self._compared.add(optimizer)
            place = f"rank {dist.get_rank(self.process_group)} of {self.num_ranks}"
            for group in optimizer.param_groups:  # whose options are saved and loaded with the state
                if (found := group.setdefault("shards_of", place)) != place:
                    raise ValueError(f"the optimizer's state (=of {found}) must be this rank's (={place})")
        self._in_step = mine
        for shard in mine:
            for one in optimizer.state.get(shard, {}).values():
                if getattr(one, "ndim", 0) and one.shape != shard.shape:
                    raise ValueError(
                        f"the optimizer's state of {shard.full_name!r} (={[*one.shape]}) must be of its shard"
                        f" (={[*shard.shape]}): make an optimizer that has state after wrapping"
                    )
            shard.__class__ = nn.Parameter
        mark_gradients(mine, False)

    def _after_step(self, *_: Any) -> None:
        for shard in self._in_step:
            shard.__class__ = Shard
        mark_gradients(self._in_step, self.num_ranks > 1)
        self._in_step = []


def _find_units(module: nn.Module, shard_types: tuple[type[nn.Module], ...]) -> set[nn.Module]:
    """The modules to shard."""
    direct = {one: own_parameters(one) for one in module.modules()}
    check_memory(module.parameters())
    units = {one for one, parameters in direct.items() if parameters and isinstance(one, shard_types)}
    if not units:
        names = ", ".join(kind.__name__ for kind in shard_types)
        raise ValueError(f"module (={type(module).__name__}) must have parameters in modules of shard_types (={names})")
    compiled = [one for one in direct if one._compiled_call_impl or "_orig_mod" in one._modules]
    if any(part in units for one in compiled for part in one.modules()):
        raise ValueError("module must not be compiled: wrap it first; torch.compile around FSDP leaves it uncompiled")
    replicated_in = {id(parameter): one for one in direct.keys() - units for parameter in direct[one].values()}
    for path, one in module.named_modules():
        for name, parameter in direct[one].items() if one in units else ():
            fault = ""
            if id(parameter) in replicated_in:
                other = type(replicated_in[id(parameter)]).__name__
                fault = f"is shared with a {other}, which is not sharded: add its type to shard_types"
            elif parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                fault = "has hooks, which its shard would lose: change gradients after finish_gradient_synchronization"
            elif isinstance(one, nn.RNNBase):
                fault = f"cannot be sharded: {one} keeps its weights itself"
            elif parameter.grad is not None:
                fault = "has a gradient, which its shard would lose: zero_grad() before wrapping"
            if fault:
                raise ValueError(f"parameter {f'{path}.{name}'.lstrip('.')!r} {fault}")
    return units
