"""Six parameters on two ranks."""

import jax
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.inspection.walkthrough import _linear, _loss, _phases, main, walk


@pytest.fixture(autouse=True)
def started():
    """Starts JAX on all simulated devices; the walkthrough would start it on two, for every later test as well."""
    jax.devices()


def test_what_two_ranks_hold():
    for rank in (0, 1):
        held = [
            (one.parameters, one.exp_avg, one.exp_avg_sq, one.gradients, one.sent) for one in walk() if one.rank == rank
        ]
        assert held == [
            (6, 3, 3, 0, ""),
            (6, 3, 3, 6, ""),
            (6, 3, 3, 3, "reduce-scatter"),
            (6, 3, 3, 3, "all-gather"),
        ]


def test_the_table_has_a_line_for_each_phase_and_rank(capsys):
    main()
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.split() == ["phase", "rank", "parameters", "exp_avg", "exp_avg_sq", "gradients", "sent"]
    assert len(lines) == 4 * 2
    assert lines[4].split() == ["gradients", "synchronised", "0", "6", "3", "3", "3", "reduce-scatter"]


def one_rank(x):
    """Plain optax, on the mean of the ranks' losses."""
    params, optimizer = _linear(), optax.adam(0.1)
    grads = jax.grad(lambda params: _loss(params, x) / 2)(params)
    return optax.apply_updates(params, optimizer.update(grads, optimizer.init(params), params)[0])


def trained(x):
    trainer = jaxddp.Trainer(_loss, optax.adam(0.1), jaxddp.zero1(), jaxddp.data_mesh(2))
    return trainer.params(trainer.step(trainer.init(_linear()), x)[0])


@pytest.mark.parametrize("expected", [one_rank, trained])
def test_the_step_is_that_of_one_rank_and_of_the_trainer(expected):
    *_, (_, held) = _phases(jaxddp.data_mesh(2))
    ours, theirs = (
        jaxddp.named_leaves(tree) for tree in (held.params, expected(np.array([[1.0, 1.0], [2.0, 2.0]], "f")))
    )
    assert set(ours) == set(theirs) == {"bias", "kernel"}
    for name, leaf in ours.items():
        assert np.abs(leaf - _linear()[name]).min() > 0.09  # Adam's first step is the learning rate
        # Sums of whole numbers are exact; a few roundings of Adam's in float32, of weights up to 4.
        np.testing.assert_allclose(leaf, theirs[name], rtol=0, atol=1e-6)
