"""Runs an optimizer to find out whether it is element-wise, and so may run on shards.

A rank's optimizer updates a flat part of each parameter. The result is that of the full parameter if the update of an
element depends only on the element's own gradient and state, and on numbers that are equal on all ranks. The test takes
a few steps on a small matrix, and the same steps on its two flat halves, each with its own optimizer, as two ranks
would. The results must agree.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .optimizers import make_optimizer

_NUM_STEPS = 3  # more than one: Adam's first step is the gradient's sign, whatever its size
_TOLERANCE = 1e-9  # of the largest movement, in float64: vectorised code may round the halves differently
# Further trials of an optimizer that is not torch's own: its update may depend on size, scale, dtype, rate or step.
_SHAPES = ((24,), (64, 96))
_SCALES = (1e-4, 1e4)
_MORE_STEPS = 12
_TOLERANCE_FLOAT32 = 1e-4


def check_elementwise(
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    device: torch.device | str = "cpu",
    *,
    is_declared: bool = False,
) -> None:
    """Refuses an optimizer that would update shards differently from full parameters.

    With ``is_declared`` a step of its own is accepted if no trial on the device finds a difference.

    Raises:
        ValueError: If an update depends on more than its element, such as on a norm or the parameter's shape; if a step
            raises, for instance because the optimizer needs a closure, matrices or sparse gradients; or if the step is
            not torch's own, or has hooks, and ``elementwise = True`` is not set.

    Example:
        >>> check_elementwise(torch.optim.AdamW, {"lr": 0.1})
        >>> check_elementwise(torch.optim.Adafactor, {"lr": 0.1})
        Traceback (most recent call last):
            ...
        ValueError: optimizer (=Adafactor) must be element-wise to be sharded: ... on the whole and on its parts
    """
    name = getattr(optimizer_cls, "__name__", optimizer_cls)
    # A schedule may start at 0, where nothing moves.
    moving = {**options, "lr": 1.0} if "lr" in options else dict(options)
    probe = make_optimizer(optimizer_cls, [nn.Parameter(torch.zeros(4, 6, device=device))], moving)
    try:
        differs = _differs(optimizer_cls, moving, device)
        if not type(probe).__module__.startswith("torch.optim.") or own_parts(probe):
            given = options if options.get("lr") else moving
            tried = itertools.product(_SHAPES, _SCALES, (torch.float64, torch.float32))
            differs = differs or any(
                _differs(optimizer_cls, given, device, *one, num_steps=_MORE_STEPS) for one in tried
            )
    except Exception as error:  # an optimizer may raise anything
        raise ValueError(
            f"optimizer (={name}) must be element-wise to be sharded: on a matrix and its parts it raises"
            f" {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if differs:
        raise ValueError(
            f"optimizer (={name}) must be element-wise to be sharded: its steps differ on the whole and on its parts"
        )
    if own_parts(probe) and not (is_declared or getattr(probe, "elementwise", False)):
        raise ValueError(
            f"optimizer (={name}) must be element-wise to be sharded: its step is its own, and no trial shows that of"
            " every step; if each element is updated by itself, say so by elementwise = True in the class"
        )


def try_elementwise(optimizer: torch.optim.Optimizer, device: torch.device | str = "cpu") -> None:
    """Refuses an optimizer that a trial finds to update shards differently.

    The trial is of another one, made from its options. What it would not show, hooks or a step of this one alone, or
    all of the step where no other can be made, must be declared.

    Raises:
        ValueError: As ``check_elementwise``, but a step of its own need not be declared if it was tried.
    """
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    try:
        tried = own_parts(type(optimizer)([nn.Parameter(torch.zeros(1, device=device))], **options))
    except Exception:  # it was made in another way
        tried = set()
    else:
        check_elementwise(type(optimizer), options, device, is_declared=True)
    if own_parts(optimizer) - tried and not getattr(optimizer, "elementwise", False):
        raise ValueError(
            f"optimizer (={type(optimizer).__name__}) must be element-wise to be sharded: its step, or a hook of it, is"
            " its own, and none like it can be made to be tried; if each element is updated by itself, say so by"
            " optimizer.elementwise = True"
        )


def own_parts(optimizer: torch.optim.Optimizer) -> set[Any]:
    """Lists what a step does beside torch's own: hooks, and methods that the class or the instance replaces.

    Example:
        >>> own_parts(torch.optim.SGD([torch.zeros(2)]))
        set()
    """
    classes = itertools.takewhile(lambda one: not one.__module__.startswith("torch.optim."), type(optimizer).__mro__)
    base = next(one for one in type(optimizer).__mro__ if one.__module__.startswith("torch.optim."))
    methods = [
        _unwrapped(value)
        for one in (optimizer, *classes)
        for name, value in vars(one).items()
        if hasattr(base, name) and (name == "step" or (name[0] == "_" and name[:2] != "__"))
    ]
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return {*hooks, *(one for one in methods if not _is_torchs(one))}


def _unwrapped(method: Any) -> Any:
    """What torch has wrapped: ``step`` of subclasses, and of instances that a schedule drives."""
    while _is_torchs(method) and hasattr(method, "__wrapped__"):
        method = method.__wrapped__
    return method


def _is_torchs(method: Any) -> bool:
    return getattr(method, "__globals__", {}).get("__name__", "").startswith("torch.optim.")  # wraps() keeps it


def _differs(
    optimizer_cls: Callable[..., torch.optim.Optimizer],
    options: Mapping[str, Any],
    device: torch.device | str,
    shape: tuple[int, ...] = (4, 6),
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    *,
    num_steps: int = _NUM_STEPS,
) -> bool:
    """Whether the steps on a tensor differ from those on its flat halves, each with its own optimizer."""
    values = torch.cos(torch.arange(float(math.prod(shape)), dtype=torch.float64, device=device)).to(dtype)
    whole = nn.Parameter(values.reshape(shape).clone())
    parts = [nn.Parameter(part.clone()) for part in values.chunk(2)]
    _take_steps([optimizer_cls([whole], **options)], [whole], scale, num_steps)
    _take_steps([optimizer_cls([part], **options) for part in parts], parts, scale, num_steps)  # as on two ranks
    moved, moved_in_parts = (torch.cat([p.detach().reshape(-1) for p in one]) - values for one in ([whole], parts))
    tolerance = _TOLERANCE if dtype == torch.float64 else _TOLERANCE_FLOAT32
    return not (moved - moved_in_parts).abs().max() <= tolerance * moved.abs().max()


def _take_steps(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Sequence[nn.Parameter], scale: float, num_steps: int
) -> None:
    """Takes ``num_steps`` steps on a tensor, or the same steps on its parts."""
    places = torch.arange(float(sum(p.numel() for p in parameters)), dtype=torch.float64, device=parameters[0].device)
    for step in range(num_steps):
        grads = (scale * torch.sin((step + 1) * places)).to(parameters[0].dtype)
        for optimizer, parameter, grad in zip(optimizers, parameters, grads.chunk(len(parameters)), strict=True):
            parameter.grad = grad.reshape(parameter.shape)
            optimizer.step()
