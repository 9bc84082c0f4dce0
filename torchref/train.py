"""The trainer: a plain training step around a loss function, a torch optimizer and a module or a wrapped one.

on each rank                                                    shape
------------------------------------------------------------    -------------------------------
parameters, optimizer state                                     replicated, or this rank's shards
batch                                                           [global_batch / num_ranks, ...]
micro-batches 1 ... A-1:  grads += d (scale * total) / d params under no_sync: most strategies do not communicate
micro-batch A:            grads += d (scale * total) / d params communicated as the strategy plans
grads = sum over ranks / (sum of weights * scale)               finish_gradient_synchronization
parameters, state = optimizer(grads)                            of all parameters, or of this rank's shards
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn

from jaxddp.arguments import check_function, check_integer, check_kind, check_mapping, is_number
from jaxddp.processes.roll_call import disagreement

from .agreement import check_alike, gather_texts, refuse
from .clipping import clip_to_norm_, global_norm
from .loss import Part, as_part
from .loss_scale import LossScale
from .strategy import DataParallel, check_dtype
from .zero.stage3 import FSDP

NONFINITE = ("ignore", "raise", "skip")

Batch = Mapping[str, torch.Tensor]
Loss = Callable[[Any, Any], Any]  # (net, batch) -> scalar or Weighted


class Optimizer(Protocol):
    """An optimizer, or a strategy that owns one."""

    def step(self) -> Any:
        """Updates the parameters from their gradients."""


class Trainer:
    """Trains a module: data-parallel if it is wrapped in a strategy, on one process otherwise.

    Attributes:
        num_steps: Steps taken, skipped ones too; those before a checkpoint count once it is restored.
    """

    def __init__(
        self,
        loss_fn: Loss,
        optimizer: Optimizer,
        net: nn.Module,
        *,
        num_microbatches: int = 1,
        max_grad_norm: float | None = None,
        compute_dtype: torch.dtype | None = None,
        loss_scale: str | None = None,
        nonfinite: str = "ignore",
        max_skips: int = 10,
    ) -> None:
        """Describes a training run.

        Args:
            loss_fn: ``(net, batch)`` to the mean loss over the batch's examples, or to ``Weighted``.
            optimizer: Over the parameters of ``net``; ``net`` itself if its strategy owns the optimizer.
            net: A module, or a strategy around one.
            num_microbatches: Parts into which the rank's examples are split, in order. Gradients are communicated in
                the last one, unless the strategy communicates in each.
            max_grad_norm: Clips the global norm of the averaged gradient to this value.
            compute_dtype: ``loss_fn`` runs under ``torch.autocast`` to this dtype. Parameters, which are the masters,
                their gradients and what is communicated keep theirs; ``FSDP`` has a ``compute_dtype`` of its own.
            loss_scale: ``"dynamic"`` differentiates the loss times a scale, which float16 needs for small gradients. A
                step whose loss or gradient is not finite updates nothing and halves it, on all ranks; 2,000 finite ones
                double it.
            nonfinite: What ``step`` does if the loss or the norm of the averaged gradient is NaN or infinite; ranks
                agree on both, so all do it in the same step. ``"ignore"``: nothing. ``"raise"``: raises before the
                update. ``"skip"``: does not update, and raises after ``max_skips`` in a row.
            max_skips: Steps in a row that ``"skip"`` may skip.

        Raises:
            ValueError: If a number is out of range, ``compute_dtype`` is given with ``FSDP``, or ``net`` has
                ``sync="backward"``.
        """
        num_microbatches = check_integer("num_microbatches", num_microbatches)
        check_function("loss_fn", loss_fn)
        check_kind("net", net, nn.Module, "a torch.nn.Module, or one in a strategy")
        has_step = not isinstance(optimizer, type) and callable(getattr(optimizer, "step", None))
        if not has_step:
            raise ValueError(f"optimizer (={optimizer!r}) must be a torch optimizer, or a strategy that owns one")
        if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm > 0):
            raise ValueError(f"max_grad_norm (={max_grad_norm!r}) must be positive or None")
        check_dtype("compute_dtype", compute_dtype)
        if compute_dtype is not None and isinstance(net, FSDP):
            raise ValueError(f"compute_dtype (={compute_dtype}) must be given to FSDP, which gathers in it")
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite (={nonfinite!r}) must be one of {', '.join(NONFINITE)}")
        max_skips = check_integer("max_skips", max_skips, least=0)
        if loss_scale not in (None, "dynamic"):
            raise ValueError(f"loss_scale (={loss_scale!r}) must be 'dynamic' or None")
        if isinstance(net, DataParallel) and net.sync != "finish":
            raise ValueError(f"sync (={net.sync!r}) of net must be 'finish': the trainer divides by the batch's weight")
        self.compute_dtype = compute_dtype
        self.loss_scale = None if loss_scale is None else LossScale()
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.net = net
        self.num_microbatches = num_microbatches
        self.max_grad_norm = max_grad_norm
        self.nonfinite = nonfinite
        self.max_skips = max_skips
        self.num_steps = 0
        self._num_skips = 0  # in a row
        self._parallel = net if isinstance(net, DataParallel) else None
        self.num_ranks = self._parallel.num_ranks if self._parallel else 1
        self._agreed = self.num_ranks == 1

    def step(self, batch: Batch) -> dict[str, float]:
        """Takes one training step.

        Returns:
            ``"loss"``, the global mean before the update; ``"grad_norm"``, of the averaged gradient before clipping;
            ``"loss_scale"``, of this step, with one; ``"skipped"``, 1 if it was, else 0, with a ``loss_scale`` or
            ``nonfinite="skip"``.

        Raises:
            FloatingPointError: If loss or gradient are not finite and ``nonfinite="raise"``, or ``"skip"`` has skipped
                ``max_skips`` steps before; it names the parameters whose gradients are not. Nothing was updated.
            ValueError: If the batch cannot be split into micro-batches, the loss is not a scalar, ranks have other
                options, they have unequally many examples and the loss is no ``Weighted``, or a weight is negative.
        """
        if self._parallel is not None:
            if not self._agreed:
                options = {
                    "num_microbatches": self.num_microbatches,
                    "max_grad_norm": self.max_grad_norm,
                    "compute_dtype": self.compute_dtype,
                    "loss_scale": self.loss_scale and self.loss_scale.scale,
                    "nonfinite": self.nonfinite,
                    "max_skips": self.max_skips,
                }
                check_alike(options, self._parallel.process_group)
                self._agreed = True
            self._parallel.discard_pass()
        self.net.zero_grad(set_to_none=True)
        parts = []
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        rows = _num_rows(batch)
        if rows % self.num_microbatches or rows == 0:
            raise ValueError(
                f"batch (={rows * self.num_ranks} examples) must be divisible by num_ranks x num_microbatches"
                f" (={self.num_ranks} x {self.num_microbatches})"
            )
        for index in range(self.num_microbatches):
            is_last = index == self.num_microbatches - 1
            with contextlib.nullcontext() if is_last or self._parallel is None else self._parallel.no_sync():
                piece = local_rows(batch, index, self.num_microbatches)
                with self._autocast(piece):
                    part = as_part(self.loss_fn(self.net, piece))
                if not part.total.requires_grad:
                    raise ValueError("loss_fn must return a loss that depends on the parameters of net")
                (part.total if scale == 1 else part.total.to(_wide(part.total)) * scale).backward()
            parts.append(Part(part.total.detach(), part.weight))
        summed = self._sum_parts(parts, rows)
        num_parts = self.num_ranks * self.num_microbatches
        weight = float(num_parts if summed.weight is None else summed.weight)
        if not 0 <= weight < math.inf:  # the same on all ranks, so all raise
            raise ValueError(f"the weights of torchref.Weighted (={weight} in all) must be finite numbers, 0 or more")
        memory = self._parallel.memory if self._parallel is not None else {}
        self._finish((weight or 1.0) * scale)
        norm = self._clip()
        metrics = {"loss": float(summed.total) / (weight or 1.0), "grad_norm": float(norm)}
        is_finite = math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])  # on all ranks alike
        if self.loss_scale is not None:
            metrics["loss_scale"] = scale
            self.loss_scale.update(is_finite)
        if self.loss_scale is not None or self.nonfinite == "skip":
            metrics["skipped"] = float(not is_finite)
        self.num_steps += 1
        if weight != 0 and (is_finite or (self.loss_scale is None and self.nonfinite == "ignore")):
            self.optimizer.step()
        elif self._parallel is not None:  # no update at all: the compression's state must not change either
            self._parallel.memory = memory
        self._num_skips = 0 if is_finite else self._num_skips + 1
        gives_up = self.nonfinite == "raise" or (self.nonfinite == "skip" and self._num_skips > self.max_skips)
        if gives_up and not is_finite:
            self._raise_nonfinite(metrics)
        return metrics

    def _raise_nonfinite(self, metrics: Mapping[str, float]) -> NoReturn:
        """Names the parameters whose gradients are not finite, on any rank."""
        shards = self._parallel.local_shards() if self._parallel is not None else {}
        module = self._parallel.module if self._parallel is not None else self.net
        held = dict(module.named_parameters()) | {name: shard for name, (shard, _) in shards.items()}
        grads = {name: tensor.grad for name, tensor in held.items() if tensor.grad is not None}
        names = [name for name, grad in grads.items() if not bool(grad.as_subclass(torch.Tensor).isfinite().all())]
        if self._parallel is not None and self.num_ranks > 1:
            told = [json.loads(text) for text in gather_texts(json.dumps(names), self._parallel.process_group)]
            names = [name for name in held if any(name in of_rank for of_rank in told)]
        loss, norm = metrics["loss"], metrics["grad_norm"]
        found = f"loss (={loss}) and gradient norm (={norm}) of step {self.num_steps} must be"
        more = f" and {len(names) - 3} more" * (len(names) > 3)
        of = f": the gradients of {', '.join(names[:3])}{more} are not" if names else ""
        after = f", after {self.max_skips} skipped steps" if self.nonfinite == "skip" and self.max_skips else ""
        raise FloatingPointError(f"{found} finite{of}{after}")

    def _finish(self, denominator: float) -> None:
        if self._parallel is not None:
            self._parallel.finish_gradient_synchronization(denominator)
            return
        for parameter in self.net.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                if denominator != 1:  # DistributedDataParallel has divided already
                    parameter.grad.div_(denominator)

    def _clip(self) -> torch.Tensor:
        """Clips the averaged gradient if asked to; returns its norm before."""
        if self._parallel is not None:
            if self.max_grad_norm is None:
                return self._parallel.grad_norm()
            return self._parallel.clip_grad_norm_(self.max_grad_norm)
        grads = [parameter.grad for parameter in self.net.parameters() if parameter.grad is not None]
        norm = global_norm(grads)
        if self.max_grad_norm is not None:
            clip_to_norm_(grads, norm, self.max_grad_norm)
        return norm

    def _autocast(self, batch: Batch) -> contextlib.AbstractContextManager[Any]:
        if self.compute_dtype is None:  # a caller may have one of its own
            return contextlib.nullcontext()
        return torch.autocast(next(iter(batch.values())).device.type, self.compute_dtype)

    def _sum_parts(self, parts: list[Part], rows: int) -> Part:
        """Sums totals and weights over micro-batches and ranks, in one all-reduce."""
        totals = torch.stack([part.total for part in parts]).to(_wide(parts[0].total)).sum()
        weights = [part.weight.to(totals) for part in parts if part.weight is not None]
        weight = torch.stack(weights) if weights else torch.zeros_like(totals)
        weight = torch.where(weight < 0, math.nan, weight).sum()  # a negative one is found on all ranks
        sums = torch.stack([totals, weight])
        if self._parallel is not None and self.num_ranks > 1:
            group = self._parallel.process_group
            rows_of_rank = sums.new_zeros(self.num_ranks)
            rows_of_rank[dist.get_rank(group)] = rows
            sums = torch.cat([sums, rows_of_rank])
            dist.all_reduce(sums, group=group)  # not recorded: it carries no gradients
            counts = [{"batch": f"{count:.0f} examples"} for count in sums[2:].tolist()]
            if not weights and (fault := disagreement(counts, "rank")):
                refuse(f"{fault}, unless loss_fn returns Weighted: the mean of means would be another", group)
        return Part(sums[0], sums[1] if weights else None)


def local_rows(batch: Batch, index: int, num_parts: int) -> dict[str, torch.Tensor]:
    """Splits a batch along dimension 0 into equal parts, and returns one of them.

    Raises:
        ValueError: If the tensors disagree in length, or it is not divisible by ``num_parts``.

    Example:
        >>> local_rows({"x": torch.arange(6)}, 1, 3)
        {'x': tensor([2, 3])}
    """
    num_parts = check_integer("num_parts", num_parts)
    index = check_integer("index", index, 0)
    if index >= num_parts:
        raise ValueError(f"index (={index}) must be below num_parts (={num_parts})")
    rows = _num_rows(batch)
    if rows % num_parts or rows == 0:
        raise ValueError(f"batch (={rows} examples) must be divisible by the number of parts (={num_parts})")
    size = rows // num_parts
    return {name: tensor[index * size : (index + 1) * size] for name, tensor in batch.items()}


def _wide(total: torch.Tensor) -> torch.dtype:
    return torch.promote_types(total.dtype, torch.float32)


def _num_rows(batch: Batch) -> int:
    check_mapping("batch", batch, "tensors by name")
    for name, tensor in batch.items():
        if not getattr(tensor, "shape", ()):  # an array of NumPy's may be the loss function's business
            kind = type(tensor).__name__
            raise ValueError(f"batch[{name!r}] (={kind}) must be a tensor whose dimension 0 counts examples")
    lengths = {name: len(tensor) for name, tensor in batch.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"batch tensors must agree in length, they have {lengths}")
    return next(iter(lengths.values()))
