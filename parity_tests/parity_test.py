"""Every case of the table: jaxddp, torchref and one process of each framework end with the same weights."""

import pytest

import jaxddp.checkpoint.interop

from . import jax_side, torch_side
from .cases import AXES, STRATEGIES, Case, pairwise_selection, tolerance, whole_product
from .inputs import largest_difference


def check(case: Case, ranks, differences):
    with jax_side.jax.enable_x64(case.dtype == "float64"):
        weights = jaxddp.checkpoint.interop.to_numpy(jax_side.initial_params(case.model, case.dtype))
    ours = jax_side.train(case)
    theirs = torch_side.train(case, weights, ranks)
    atol, reason = tolerance(case)
    found = {
        "jaxddp - JAX on one device": largest_difference(
            ours, jax_side.train_on_one_device(case.model, case.optimizer, case.dtype, case.max_grad_norm)
        ),
        "torchref - torch on one process": largest_difference(theirs, torch_side.train_on_one_process(case, weights)),
        "jaxddp - torchref": largest_difference(ours, theirs),
    }
    differences.add(case, found, largest_difference(ours, weights), atol, reason)
    for name in weights:
        moved = largest_difference({name: ours[name]}, {name: weights[name]})
        # An unused parameter's gradient is zero: only weight decay moves it.
        is_fixed = "frozen" in name or ("unused" in name and not case.optimizer.startswith("adamw"))
        assert (moved == 0) if is_fixed else (moved > 1e-4), f"{name} moved by {moved}"
    for pair, difference in found.items():
        assert difference <= atol, f"{pair}: {difference:.2e} > {atol:.0e} ({reason})"


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_once(strategy, ranks, differences):
    check(Case(strategy, "adamw", 2, "toy", "float64"), ranks, differences)


@pytest.mark.parametrize("case", pairwise_selection(), ids=lambda case: case.id)
def test_same_weights(case, ranks, differences):
    check(case, ranks, differences)


@pytest.mark.full
@pytest.mark.parametrize("case", whole_product(), ids=lambda case: case.id)
def test_same_weights_in_the_whole_product(case, ranks, differences):
    check(case, ranks, differences)


def test_the_selection_covers_every_pair_of_values():
    cases = pairwise_selection()
    assert len(cases) <= 250
    names = list(AXES)
    for first in range(len(names)):
        for second in range(first + 1, len(names)):
            met = {(case[first], case[second]) for case in cases}
            assert met >= {(a, b) for a in AXES[names[first]] for b in AXES[names[second]]}
