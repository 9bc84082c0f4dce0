"""Every case of the table: jaxddp, torchref and one process of each framework end with the same weights."""

import itertools

import pytest

import jaxddp.checkpoint.interop

from . import jax_side, torch_side
from .cases import AXES, LEFT_OUT, STRATEGIES, Case, pairwise_selection, tolerance, whole_product
from .inputs import largest_difference


def check(case: Case, ranks, differences):
    with jax_side.jax.enable_x64(case.dtype == "float64"):
        weights = jaxddp.checkpoint.interop.to_numpy(jax_side.initial_params(case.model, case.dtype))
    atol, reason = tolerance(case)
    ours, from_one_device = jax_side.check(case, atol)
    theirs = torch_side.train(case, weights, ranks)
    found = {
        "jaxddp - JAX on one device": from_one_device,
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


SELECTION = pairwise_selection()
# Of each strategy a case that is quick: a toy, on few ranks but not on one.
QUICK = {
    min(
        (case for case in SELECTION if case.strategy == strategy),
        key=lambda case: (case.model == "tiny", case.num_ranks == 1, case.num_ranks),
    )
    for strategy in STRATEGIES
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.id, marks=pytest.mark.smoke if case in QUICK else []) for case in SELECTION],
)
def test_same_weights(case, ranks, differences):
    check(case, ranks, differences)


def pytest_generate_tests(metafunc):
    """The whole product, where ``-m full`` asks for it: 10,000 tests take seconds to collect."""
    if "case_of_product" in metafunc.fixturenames:
        marks = metafunc.config.option.markexpr
        cases = whole_product() if "full" in marks and "not full" not in marks else []
        metafunc.parametrize("case_of_product", cases, ids=lambda case: case.id)


@pytest.mark.full
def test_same_weights_in_the_whole_product(case_of_product, ranks, differences):
    check(case_of_product, ranks, differences)


def test_the_selection_covers_every_pair_of_values():
    assert len(SELECTION) <= 100
    values = [[(axis, value) for value in AXES[axis]] for axis in AXES]
    pairs = {pair for two in itertools.combinations(values, 2) for pair in itertools.product(*two)}
    met = {pair for case in SELECTION for pair in itertools.combinations(zip(AXES, case, strict=True), 2)}
    assert met == pairs - LEFT_OUT
    assert len(LEFT_OUT) < 0.1 * len(pairs)
