"""Every case of the table: jaxddp, torchref and one process of each framework end with the same weights."""

import itertools
from collections.abc import Sequence

import pytest

import jaxddp.checkpoint.interop

from . import jax_side, torch_side
from .cases import AXES, LEFT_OUT, STRATEGIES, Case, pairwise_selection, tolerance, whole_product
from .inputs import largest_difference


def check(cases: Sequence[Case], ranks, differences):
    """Trains cases that differ in their strategy alone, so that one reference is right for all of them."""
    first = cases[0]
    with jax_side.jax.enable_x64(first.dtype == "float64"):
        weights = jaxddp.checkpoint.interop.to_numpy(jax_side.initial_params(first.model, first.dtype))
    atol, reason = tolerance(first)
    in_torch = torch_side.train_on_one_process(first, weights)
    trained = zip(cases, jax_side.check(cases, atol), torch_side.train_all(cases, weights, ranks), strict=True)
    wrong = []
    for case, (ours, from_one_device), theirs in trained:
        found = {
            "jaxddp - JAX on one device": from_one_device,
            "torchref - torch on one process": largest_difference(theirs, in_torch),
            "jaxddp - torchref": largest_difference(ours, theirs),
        }
        differences.append(case._asdict() | found | {"atol": atol, "reason": reason})
        for name in weights:
            moved = largest_difference({name: ours[name]}, {name: weights[name]})
            # An unused parameter's gradient is zero: only weight decay moves it.
            is_fixed = "frozen" in name or ("unused" in name and not case.optimizer.startswith("adamw"))
            if not ((moved == 0) if is_fixed else (moved > 1e-4)):
                wrong.append(f"{case.id}: {name} moved by {moved}")
        wrong += [f"{case.id}: {pair}: {one:.2e} > {atol:.0e}" for pair, one in found.items() if not one <= atol]
    assert not wrong, f"{reason}\n" + "\n".join(wrong)


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
    "case", [pytest.param(case, id=case.id, marks=pytest.mark.smoke if case in QUICK else []) for case in SELECTION]
)
def test_same_weights(case, ranks, differences):
    check([case], ranks, differences)


def pytest_generate_tests(metafunc):
    """The whole product, where ``-m full`` asks for it: its tests take a second to collect."""
    if "all_strategies" in metafunc.fixturenames:
        marks = metafunc.config.option.markexpr
        groups: dict[Case, list[Case]] = {}
        for case in whole_product() if "full" in marks and "not full" not in marks else []:
            groups.setdefault(case._replace(strategy="all"), []).append(case)
        metafunc.parametrize("all_strategies", groups.values(), ids=[group.id for group in groups])


@pytest.mark.full
def test_same_weights_in_the_whole_product(all_strategies, ranks, differences):
    check(all_strategies, ranks, differences)


def test_the_selection_covers_every_pair_of_values():
    assert len(SELECTION) <= 100
    values = [[(axis, value) for value in AXES[axis]] for axis in AXES]
    pairs = {pair for two in itertools.combinations(values, 2) for pair in itertools.product(*two)}
    met = {pair for case in SELECTION for pair in itertools.combinations(zip(AXES, case, strict=True), 2)}
    assert met == pairs - LEFT_OUT
    assert len(LEFT_OUT) < 0.1 * len(pairs)
