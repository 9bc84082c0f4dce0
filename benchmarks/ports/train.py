"""What a program's weights are before its port and after it; ranks of torch load no more than this file."""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]
Trained = tuple[Weights, Weights, Mapping[str, Sequence[Weights]]]  # start, end before the port, each rank's after it


def train_in_jax(program: Any, num_ranks: int) -> Trained:
    """Trains on one simulated device, and on several under each strategy."""
    import jax

    import jaxddp

    def weights(tree: Any) -> Weights:
        return {name: np.asarray(leaf) for name, leaf in jaxddp.named_leaves(tree).items()}

    jaxddp.simulate_devices(num_ranks)
    mesh = jaxddp.data_mesh(num_ranks)
    after: dict[str, Sequence[Weights]] = {}
    with jax.enable_x64(True):
        start, end = weights(program.before([])), weights(program.before(program.data()))
        for name in program.STRATEGIES:
            options: dict[str, Any] = {"min_shard_elements": 1} if name == "zero3" else {}  # the models are small
            after[name] = [weights(program.after(program.data(), jaxddp.make_strategy(name, **options), mesh))]
    return start, end, after


def train_in_torch(program: Any, num_ranks: int) -> Trained:
    """Trains in one process, and in several under each strategy."""
    from torchref.launch import shared_pool

    run = partial(shared_pool().run, _train_on_rank, program.__name__, timeout_s=600.0)
    ((start, end),) = run((), num_ranks=1)
    of_ranks = run(program.STRATEGIES, num_ranks=num_ranks)
    return start, end, dict(zip(program.STRATEGIES, zip(*of_ranks, strict=True), strict=True))


def _train_on_rank(name: str, strategies: Sequence[str]) -> list[Weights]:
    """The weights after the port under each strategy; without one at the start and at the end before it."""
    import torchref

    program = import_module(name)
    found = [program.after(program.data(), partial(torchref.make_strategy, one)) for one in strategies]
    found = found or [program.before([]), program.before(program.data())]
    return [{name: tensor.detach().numpy() for name, tensor in tensors.items()} for tensors in found]
