"""ZeRO stages 1 and 2: the optimizer's state is sharded, and with stage 2 the gradients that outlive a backward.

The twin of ``jaxddp/zero/stages_1_and_2.py``, which counts the bytes. Each rank updates its shards:

    g[r]  = row r of the sum over ranks of pack(gradients) / N      reduce-scatter, bucket by bucket as they fill
    p[r]  = shard r of the parameters                               a slice, no communication
    p[r] += optimizer(g[r], state[r], p[r])                         state[r] is on rank r alone
    p     = unpack(p[0] ... p[N-1])                                 all-gather, bucket by bucket

Over A micro-batches, stage 1 adds up full gradients and reduces them once. Stage 2 reduces those of each and adds up
shards: 1/N of the gradients and the two buckets in flight.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from jaxddp.communication.buckets import Bucket, BucketMb, BucketPlan, TensorSpec, plan_buckets

from ..agreement import check_alike
from ..communication.collectives import all_gather, reduce_scatter
from ..communication.sharding import Cut, ShardSums, num_bytes, pack_row, pack_rows, unpack_row, unpack_rows
from ..parts import HeldShard, SpentGradient, mark_gradients, spent_gradient
from ..strategy import OPTIONS, DataParallel, before_step, register, weakly
from .optimizers import Params, as_groups, check_elementwise, describe_optimizer, mark_state_dicts


@register("zero1")
class ZeRO1(DataParallel):
    """One reduce-scatter per bucket as it fills, one all-gather per bucket as its parameters are updated.

    After ``finish_gradient_synchronization`` call ``step`` and ``zero_grad`` of the wrapper. Until then the module's
    gradients are this rank's local ones. Afterwards ``SpentGradient`` stands in their place up to the next backward,
    and the averaged ones belong to the shards in ``optimizer.param_groups``. Where it is cleared, as by ``zero_grad``
    of a part of the module, so is the averaged one. Clip with ``clip_grad_norm_`` of the wrapper.

    Attributes:
        optimizer: Over this rank's shards, one for each parameter. A schedule drives it. Each rank saves and loads the
            ``state_dict`` of its own.
    """

    owns_optimizer = True

    def __init__(
        self,
        module: nn.Module,
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        bucket_mb: BucketMb = "default",
        *,
        params: Params | None = None,
        **kwargs: Any,
    ) -> None:
        """Wraps a module.

        Args:
            module: What to train.
            optimizer_cls: Must be element-wise; ``ShardedOptimizer`` takes others.
            bucket_mb: Cap in MiB, a list of caps, None for one bucket, or ``"default"``; see ``plan_buckets``.
            params: What the optimizer updates: parameters of the module, or groups of them; all of them when None.
            **kwargs: For ``optimizer_cls``; options of ``DataParallel`` as there.

        Raises:
            ValueError: If the optimizer is not element-wise or differs by rank, or as ``DataParallel``.
        """
        self._bucket_mb = bucket_mb
        groups = as_groups(module.parameters() if params is None else params)
        super().__init__(module, **{name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()})
        self._rank = dist.get_rank(self.process_group)
        self._cuts = {name: Cut(tuple(parameter.shape), self.num_ranks) for name, parameter in self._trained.items()}
        # Empty at first: a view of the module's parameter would share its counter of changes.
        self._shards = {name: nn.Parameter(one.detach().new_empty(0)) for name, one in self._trained.items()}
        self._take_weights()
        self.optimizer = optimizer_cls(self._shard_groups(groups), **kwargs)
        names = {id(shard): name for name, shard in self._shards.items()}
        check_alike(describe_optimizer(self.optimizer, names), self.process_group)
        check_elementwise(self.optimizer)
        mark_state_dicts(self.optimizer, self.process_group)
        self.optimizer.register_step_pre_hook(before_step(self._before_step))
        self.optimizer.register_step_post_hook(weakly(self._gather))
        self.optimizer.zero_grad = weakly(self.zero_grad)  # type: ignore[method-assign]  # of the module as well
        self._spent = {name: spent_gradient(parameter) for name, parameter in self._trained.items()}
        self._sums = ShardSums()
        self._hold_shards()

    def make_plan(self, tensors: Sequence[TensorSpec]) -> BucketPlan:
        """Buckets up to the cap, in which the updated parameters are gathered as well."""
        return plan_buckets(tensors, self._bucket_mb)

    def layout(self) -> dict[str, tuple[torch.Tensor, Cut]]:
        """All trained parameters are updated by shards; the module's own are whole."""
        return {name: (shard, self._cuts[name]) for name, shard in self._shards.items()}

    @torch._disable_dynamo  # its collectives are not for a compiler
    def step(self) -> None:
        """Updates this rank's shards, and gathers those of all ranks into the module."""
        if all(shard.grad is None for shard in self._shards.values()):
            raise RuntimeError("step needs averaged gradients: call finish_gradient_synchronization after the backward")
        self.optimizer.step()

    @property
    def param_groups(self) -> Any:
        """Refused: what takes the wrapper for an optimizer, as a ``GradScaler`` does, would see shards."""
        raise RuntimeError("param_groups are wrapper.optimizer's; for a GradScaler, BucketedDDP and ShardedOptimizer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of the module and of this rank's shards."""
        self.on_train_batch_start()
        for tensor in (*self._trained.values(), *self._shards.values()):
            tensor.grad = None

    def planned_collectives(self, num_microbatches: int = 1) -> list[tuple[str, int]]:
        """Reduce-scatters, once or in each micro-batch, and all-gathers."""
        sizes = [num_bytes(bucket, self.num_ranks) for bucket in self.plan.buckets]
        num_passes = num_microbatches if self.each_microbatch else 1
        scatters = [("reduce-scatter", size) for size in sizes] * num_passes
        return scatters + [("all-gather", size) for size in sizes]

    def start_reduction(self, bucket: Bucket) -> None:
        """Reduce-scatters a bucket."""
        grads = {tensor.name: self._grad(tensor.name) for tensor in bucket.tensors}
        buffer = pack_rows(bucket, grads, self._cuts)
        row, work = reduce_scatter(buffer, self.process_group, async_op=True)
        self._sums.add(unpack_row(bucket, row.view(-1), self._cuts).items(), work, buffer)
        if self.each_microbatch:
            for tensor in bucket.tensors:
                self._trained[tensor.name].grad = self._spent[tensor.name]

    def finish_reductions(self, denominator: Any) -> None:
        """The shards' gradients become their part of the means, added to what earlier synchronisations have left."""
        self._check_shards()
        unplanned = self._trained.keys() - self._planned
        self._sums.add([(name, self._cuts[name].local_shard(self._grad(name), self._rank)) for name in unplanned])
        for name, mean in self._sums.means(denominator).items():
            before = self._shards[name].grad
            self._shards[name].grad = mean if before is None else before.add_(mean)
            self._trained[name].grad = self._spent[name]  # frees the local gradient
        mark_gradients(self._shards.values(), self.num_ranks > 1)

    def drop_reductions(self) -> None:
        """Drops what is in flight, and the sums over micro-batches."""
        self._sums.forget()

    def gradients(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Those of this rank's shards."""
        self._drop_cleared()
        return [], [one.grad.as_subclass(torch.Tensor) for one in self._shards.values() if one.grad is not None]

    def end_microbatch(self) -> None:
        """Stage 2 adds up the shards of a backward that another one follows."""
        if self.each_microbatch and self._ready:
            self._start(full_only=False)
            self._sums.wait()
            self._expect_gradients()
            self._has_begun = True

    def _make_room(self, name: str, *_: Any) -> None:
        """Takes the stand-in away; if it was cleared, so is what this rank has of earlier backwards."""
        parameter = self._trained[name]
        if isinstance(parameter.grad, SpentGradient):
            parameter.grad = None
        elif parameter.grad is None:
            self._shards[name].grad = None
            self._sums.forget(name)

    def _grad(self, name: str) -> torch.Tensor:
        self._make_room(name)
        return super()._grad(name)

    def _add_hooks(self) -> None:
        super()._add_hooks()
        for name, node in self._accumulators.items():
            node.register_prehook(partial(weakly(self._make_room), name))

    def _drop_cleared(self) -> None:
        """Clears in shards what was cleared in the module; refuses gradients that were put there."""
        for name, parameter in self._trained.items():
            if parameter.grad is None:
                self._shards[name].grad = None
            elif not isinstance(parameter.grad, SpentGradient) and not self._has_begun:
                raise RuntimeError(
                    f"the gradient of {name!r} was set after finish_gradient_synchronization, which the step would not"
                    " use: change those of the shards in optimizer.param_groups"
                )

    def _before_step(self, *_: Any) -> None:
        self._check_finished()
        self._check_shards()
        self._drop_cleared()
        check_elementwise(self.optimizer, num_own_hooks=2)
        self._take_weights()
        mark_gradients(self._shards.values(), False)

    @torch.no_grad()
    def _gather(self, *_: Any) -> None:
        for bucket in self.plan.buckets:
            rows = all_gather(pack_row(bucket, self._shards), self.process_group).view(self.num_ranks, -1)
            for name, tensor in unpack_rows(bucket, rows, self._cuts).items():
                self._trained[name].copy_(tensor)
        if self.num_ranks == 1:  # nothing is planned
            for name, shard in self._shards.items():
                self._trained[name].copy_(self._cuts[name].from_rows(shard))
        mark_gradients(self._shards.values(), self.num_ranks > 1)
        self._hold_shards()

    def _hold_shards(self) -> None:
        """Notes the shards as the optimizer has left them."""
        for shard in self._shards.values():
            shard.__class__ = HeldShard
        self._noted = {name: (shard._version, shard.requires_grad) for name, shard in self._shards.items()}

    def _check_shards(self) -> None:
        """Refuses what was changed in shards: before a step they become the module's parameters again."""
        for name, shard in self._shards.items():
            if isinstance(shard, HeldShard) and (shard._version, shard.requires_grad) != self._noted[name]:
                raise RuntimeError(
                    f"the shard of {name!r} in optimizer.param_groups was changed or frozen outside of the wrapper's"
                    " step, which would be lost: change or freeze the module's parameters, and wrap it anew"
                )

    def _take_weights(self) -> None:
        """Makes the shards those of the module's weights, into which others may have been loaded."""
        for name, shard in self._shards.items():
            shard.__class__ = nn.Parameter
            shard.data = self._cuts[name].local_shard(self._trained[name].detach(), self._rank)

    def _shard_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Parameter groups with this rank's shards in place of the parameters."""
        shard_of = {id(parameter): self._shards[name] for name, parameter in self._trained.items()}
        known = {id(parameter) for parameter in self.module.parameters()}
        given = [[one[1] if isinstance(one, tuple) else one for one in group["params"]] for group in groups]  # named
        if any(id(one) not in known for some in given for one in some):
            raise ValueError("params must be parameters of the module, or groups of them; one is not")
        shards = [[shard_of[id(one)] for one in some if id(one) in shard_of] for some in given]
        return [{**group, "params": mine} for group, mine in zip(groups, shards, strict=True)]


@register("zero2")
class ZeRO2(ZeRO1):
    """``ZeRO1`` that frees a gradient as soon as its bucket is packed.

    Every backward communicates, even under ``no_sync``, which then only announces that another backward follows. All
    ranks must run equally many, each through at least one trainable parameter.
    """

    each_microbatch = True
