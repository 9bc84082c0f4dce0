"""Parameter groups as torch's optimizers take them, listed in an order that is the same on every rank.

A set has none: it lists the same tensors in another order in each process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Lists groups.

    Args:
        params: Parameters, with their names or without, or groups of them with options.

    Returns:
        Groups, their ``"params"`` as ``as_list`` gives them.

    Raises:
        TypeError: If one is a set.

    Example:
        >>> as_groups(iter([torch.tensor(1.0)]))
        [{'params': [tensor(1.)]}]
    """
    given = as_list(params)
    groups = given if not given or isinstance(given[0], dict) else [{"params": given}]
    return [{**group, "params": as_list(group["params"])} for group in groups]


def as_list(params: Any) -> list[Any]:
    """Lists what is given, each tensor once: tied parameters are listed under each of their names.

    Args:
        params: A parameter, or parameters, with their names or without, or groups of them.

    Returns:
        The same, in order.

    Raises:
        TypeError: If it is a set.
    """
    if isinstance(params, (set, frozenset)):
        raise TypeError(
            f"params (={type(params).__name__}) must be a list: a set is in another order in each process, and ranks"
            " must share one"
        )
    listed = [params] if isinstance(params, torch.Tensor) else list(params)
    return list({id(one[1] if isinstance(one, tuple) else one): one for one in listed}.values())
