import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxddp
from jaxddp.models import build
from jaxddp.training.jit_baseline import auto_step


def test_it_trains_as_the_strategies_do_with_collectives_of_the_compilers_choice():
    loss_fn, params = build("toy")
    optimizer, mesh = optax.sgd(0.1), jaxddp.data_mesh(4)
    trainer = jaxddp.Trainer(loss_fn, optimizer, jaxddp.flat(), mesh)
    rng = np.random.default_rng(0)
    batch = {name: rng.normal(size=(8, width)).astype(np.float32) for name, width in (("x", 10), ("y", 5))}
    ours, theirs = trainer.init(params), trainer.init(params)
    replicated, by_rank = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), mesh.axis_names))
    jitted = jax.jit(auto_step(loss_fn, optimizer), in_shardings=(replicated, by_rank), out_shardings=replicated)
    compiled = jitted.lower(theirs, batch).compile()
    found = jaxddp.gradient_collectives(compiled)
    assert len(found) < len(jax.tree.leaves(params))  # merged, where no strategy says otherwise
    assert sum(num_bytes for _, num_bytes in found) >= sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    batch = jax.device_put(batch, by_rank)
    for index in range(3):
        ours, our_metrics = trainer.step(ours, batch)
        theirs, their_metrics = jax.block_until_ready(compiled(theirs, batch))
        assert set(our_metrics) == set(their_metrics)
        assert int(theirs.step) == index + 1
        for name, metric in our_metrics.items():
            # Sums of float32 in another order: 2^-24 per addition, of which at most a few hundred do not average out.
            np.testing.assert_allclose(their_metrics[name], metric, rtol=2e-5)
    for leaf, other in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        np.testing.assert_allclose(other, leaf, rtol=0, atol=2e-6)  # likewise; the largest parameters are about 1
