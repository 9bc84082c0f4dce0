"""The trainer: a plain training step around a loss function, a torch optimizer and a module or a wrapped one.

micro-batches 1 ... A-1:  grads += d total / d params           under no_sync: most strategies do not communicate
micro-batch A:            grads += d total / d params           communicated as the strategy plans
grads = sum over ranks / sum of weights                         finish_gradient_synchronization
parameters, state = optimizer(grads)                            of all parameters, or of this rank's shards
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from jaxddp.arguments import check_integer, check_positive
from jaxddp.processes.roll_call import disagreement

from .agreement import check_alike, refuse
from .clipping import clip_to_norm_, global_norm
from .loss import as_part
from .strategy import DataParallel
from .zero.optimizers import describe_optimizer
from .zero.owners import ShardedOptimizer

Batch = Any  # a tensor, or a dictionary, tuple or list of them; dimension 0 of each counts examples


class Trainer:
    """Trains a module: data-parallel if it is wrapped in a strategy, on one process otherwise.

    Attributes:
        num_steps: Steps taken, skipped ones too; those before a checkpoint count once it is restored.
    """

    def __init__(
        self,
        loss_fn: Callable[[Any, Any], Any],
        optimizer: Any,
        net: nn.Module,
        *,
        num_microbatches: int = 1,
        max_grad_norm: float | None = None,
        nonfinite: str = "ignore",
    ) -> None:
        """Describes a training run.

        Args:
            loss_fn: ``(net, batch)`` to the mean loss over the batch's examples, or to ``Weighted``.
            optimizer: torch's, over the parameters of ``net``; ``net`` itself if its strategy owns the optimizer.
            net: A module, or a strategy around one.
            num_microbatches: Parts into which the rank's examples are split, in order. Gradients are communicated in
                the last one, unless the strategy communicates in each.
            max_grad_norm: Clips the global norm of the averaged gradient to this value.
            nonfinite: What ``step`` does if the loss or the norm of the averaged gradient is NaN or infinite, on all
                ranks, or an element of a buffer no longer is finite: ``"ignore"`` nothing, ``"skip"`` not update.
        """
        check_integer("num_microbatches", num_microbatches)
        if max_grad_norm is not None:
            check_positive("max_grad_norm", max_grad_norm)
        inner: Any = getattr(net, "_orig_mod", net)  # of torch.compile
        self._parallel = inner if isinstance(inner, DataParallel) else None
        self._torchs = inner if isinstance(inner, nn.parallel.DistributedDataParallel) else None
        is_averaged = self._parallel is not None or self._torchs is not None
        if isinstance(optimizer, ShardedOptimizer) and optimizer.num_ranks > 1 and not is_averaged:
            raise ValueError(f"net (={type(net).__name__}) must be wrapped, as in NaiveDDP: gradients are not averaged")
        if nonfinite not in ("ignore", "skip"):
            raise ValueError(f"nonfinite (={nonfinite!r}) must be ignore or skip")
        self.loss_fn, self.net, self._called, self.num_microbatches = loss_fn, inner, net, num_microbatches
        self.optimizer = inner if optimizer is net else optimizer
        self.max_grad_norm, self.nonfinite, self.num_steps = max_grad_norm, nonfinite, 0
        self.num_ranks = self._parallel.num_ranks if self._parallel else 1
        self._agreed = False

    def step(self, batch: Batch) -> dict[str, float]:
        """Takes one training step.

        Returns:
            ``"loss"``, the global mean before the update; ``"grad_norm"``, of the averaged gradient before clipping;
            ``"skipped"``, 1 if it was, else 0, with ``nonfinite="skip"``.

        Raises:
            ValueError: If the batch cannot be split, the loss is not a scalar, a weight is negative, ranks have other
                options, or, after the update, unequally many examples and no weights, or some weights and others none.
        """
        named = self.net.named_buffers() if self.nonfinite == "skip" else ()
        buffers = {name: one.detach().clone() for name, one in named}
        total, weight, of_ranks = self._backwards(batch)
        divisor = self.num_ranks * self.num_microbatches if weight is None else float(weight)
        if not 0 <= divisor < math.inf:  # the same on all ranks, so all raise
            raise ValueError(f"the weights of torchref.Weighted (={weight} in all) must be finite numbers, 0 or more")
        self._finish(divisor or 1)
        loss, norm = total / (divisor or 1), self._clip()
        self.num_steps += 1
        is_finite = self.nonfinite == "ignore" or self._is_finite(loss, norm, buffers)  # waits for a GPU
        if divisor and is_finite:
            self.optimizer.step()
        else:
            for one, before in self._kept(buffers):
                one.copy_(before)
        if self._parallel is not None:  # the mean of means would be another; after the update, or it waits for a GPU
            losses = [f"mean of {count:.0f} examples" if count >= 0 else "Weighted" for count in of_ranks.tolist()]
            if fault := disagreement([{"loss": one} for one in losses], "rank"):
                refuse(f"{fault}, unless loss_fn returns Weighted on all", self._parallel.process_group)
        metrics = {"loss": float(loss), "grad_norm": float(norm)}
        return metrics | ({"skipped": float(bool(divisor) and not is_finite)} if self.nonfinite == "skip" else {})

    def _backwards(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """The backwards of micro-batches; the sums of losses and weights, and each rank's examples, -1 if weighted."""
        if self._parallel is not None:
            if not self._agreed:
                alike = {name: getattr(self, name) for name in ("num_microbatches", "max_grad_norm", "nonfinite")}
                if isinstance(self.optimizer, torch.optim.Optimizer):  # others compare what they wrap
                    alike |= describe_optimizer(self.optimizer)
                check_alike(alike, self._parallel.process_group)
                self._agreed = True
            self._parallel.discard_pass()
        self.net.zero_grad(set_to_none=True)
        parts, weights = [], []
        for index in range(self.num_microbatches):
            is_last = index == self.num_microbatches - 1
            with contextlib.nullcontext() if is_last or self._parallel is None else self._parallel.no_sync():
                part, weight = as_part(self.loss_fn(self._called, local_rows(batch, index, self.num_microbatches)))
                part.backward()
            parts.append(part.detach())
            weights += [] if weight is None else [weight]
        if len(weights) not in (0, len(parts)):
            raise ValueError("loss_fn must return torchref.Weighted for all micro-batches or for none")
        if weights and self._torchs is not None and dist.get_world_size(self._torchs.process_group) > 1:
            raise ValueError("net (=DistributedDataParallel) must be BucketedDDP for Weighted: it averages over ranks")
        total = torch.stack(parts).to(torch.promote_types(parts[0].dtype, torch.float32)).sum()
        found = torch.stack([one.to(total) for one in weights]) if weights else torch.zeros_like(total)
        found = torch.where(found < 0, math.nan, found).sum()  # a negative one is found on all ranks
        sums = torch.cat([torch.stack([total, found]), total.new_zeros(self.num_ranks)])
        if self._parallel is not None and self.num_ranks > 1:
            sums[2 + dist.get_rank(self._parallel.process_group)] = -1 if weights else _num_rows(batch)
            self._parallel.start_reductions()  # in one order on all ranks
            dist.all_reduce(sums, group=self._parallel.process_group)  # not recorded: it carries no gradients
        # Where some have none, all divide alike, and are refused alike.
        is_weighted = bool(weights) and (self.num_ranks == 1 or bool(sums[2:].max() < 0))
        return sums[0], sums[1] if is_weighted else None, sums[2:]

    def _finish(self, denominator: float) -> None:
        if self._parallel is not None:
            self._parallel.finish_gradient_synchronization(denominator)
            return
        grads = []
        for parameter in self.net.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                grads.append(parameter.grad)
        torch._foreach_div_(grads, denominator)  # one kernel for many

    def _kept(self, before: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Buffers that are as large as before the forward, and what they were; none if no step is to be skipped."""
        for name, one in self.net.named_buffers():
            if name in before and one.shape == before[name].shape:
                yield one.detach(), before[name]

    def _is_finite(self, loss: torch.Tensor, norm: torch.Tensor, buffers: dict[str, torch.Tensor]) -> bool:
        """Whether loss and gradient are finite, and the buffers where they were; the same on all ranks."""
        found = loss.isfinite() & norm.isfinite().to(loss.device)
        for one, before in self._kept(buffers):
            if one.layout == torch.strided and one.element_size() > 1:  # isfinite knows no float8
                found &= (one.isfinite() | ~before.isfinite()).all().to(loss.device)
        own = self._torchs if self._parallel is None else self._parallel
        if own is not None and not getattr(own, "broadcasts_buffers", False):
            found = found.int()  # of the rank's own loss, or buffers
            dist.all_reduce(found, dist.ReduceOp.MIN, group=own.process_group)
        return bool(found)

    def _clip(self) -> torch.Tensor:
        """Clips the averaged gradient if asked to; returns its norm before."""
        if self._parallel is not None:
            limit = self.max_grad_norm
            return self._parallel.grad_norm() if limit is None else self._parallel.clip_grad_norm_(limit)
        grads = [parameter.grad for parameter in self.net.parameters() if parameter.grad is not None]
        norm = global_norm(grads)
        if self.max_grad_norm is not None:
            clip_to_norm_(grads, norm, self.max_grad_norm)
        return norm


def local_rows(batch: Batch, index: int, num_parts: int) -> Any:
    """Splits a batch along dimension 0 into equal parts, and returns one; a ValueError if it cannot be split so.

    Example:
        >>> local_rows({"x": torch.arange(6)}, 1, 3)
        {'x': tensor([2, 3])}
    """
    rows = _num_rows(batch)
    if rows % check_integer("num_parts", num_parts) or rows == 0:
        raise ValueError(f"batch (={rows} examples) must be divisible by the number of parts (={num_parts})")
    size = rows // num_parts
    return tree_map(lambda tensor: tensor[index * size : (index + 1) * size], batch)


def _num_rows(batch: Batch) -> int:
    shapes = {f"batch{keystr(path)}": getattr(one, "shape", ()) for path, one in tree_flatten_with_path(batch)[0]}
    lengths: dict[str, Any] = {name: shape[0] if shape else None for name, shape in shapes.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ValueError(f"batch must be tensors whose dimension 0 counts examples: {found or 'there are none'}")
    return next(iter(lengths.values()))
