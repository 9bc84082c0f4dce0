"""A new strategy takes one function in jaxddp, one class in torchref, and one line in the table of cases."""

from contextlib import contextmanager

import torchref
from jaxddp.communication.buckets import Bucket, BucketPlan
from jaxddp.replicated import replicated
from torchref.replicated import Replicated

from .cases import STRATEGIES, Case, StrategyCase, tolerance
from .inputs import largest_difference


def plan_pairs(tensors):
    """Two parameters a bucket."""
    tensors = list(tensors)
    return BucketPlan(tuple(Bucket(tuple(tensors[i : i + 2])) for i in range(0, len(tensors), 2)))


class PairsDDP(Replicated):
    def make_plan(self, tensors):
        return plan_pairs(tensors)


@contextmanager
def registered(package_strategies, strategy):
    """Registers a strategy for a while: other tests list those that the packages have."""
    package_strategies["pairs"], STRATEGIES["pairs()"] = strategy, StrategyCase("pairs")
    try:
        yield
    finally:
        del package_strategies["pairs"], STRATEGIES["pairs()"]


def train_on_rank(case, weights):
    from . import torch_side

    with registered(torchref.STRATEGIES, PairsDDP):
        return torch_side.train_on_rank(case, weights)


def test_a_new_strategy_trains_like_the_others(ranks):
    import jaxddp.checkpoint.interop

    from . import jax_side, torch_side

    def pairs():
        return replicated("pairs", plan_pairs)

    case = Case("pairs()", "adamw", 2, "toy", "float64", 3, 0.05)
    with jax_side.jax.enable_x64(True):
        weights = jaxddp.checkpoint.interop.to_numpy(jax_side.initial_params(case.model, case.dtype))
    with registered(jaxddp.STRATEGIES, pairs):
        ours = jax_side.train(case)
    theirs, _ = ranks.run(train_on_rank, case, weights, num_ranks=2)
    atol, reason = tolerance(case)
    assert largest_difference(ours, theirs) <= atol, reason
    assert largest_difference(theirs, torch_side.train_on_one_process(case, weights)) <= atol, reason
    assert largest_difference(theirs, weights) > 1e-4
