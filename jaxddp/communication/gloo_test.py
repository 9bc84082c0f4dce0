"""Between processes over Gloo, scatters are all-to-alls: right, and planned as such."""

import json

import jax
import pytest

from jaxddp.communication.gloo import kind_of_scatter
from jaxddp.mesh_test import run_workers

SUMS = """
import sys, time
import jax, jax.numpy as jnp, numpy as np, jaxddp
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxddp.communication.collectives import reduce_scatter

address, rank = sys.argv[1], int(sys.argv[2])
jaxddp.start_process(address, 2, rank)
mesh = jaxddp.data_mesh()
CASES = (("float32", 3 * 2**20, 6), ("bfloat16", 5, 1), ("float16", 5, 1), ("int32", 3, 1), ("float32", 0, 1))
wrong = 0
for dtype, chunk, rounds in CASES:
    scatter = jax.jit(
        jax.shard_map(lambda x: reduce_scatter(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    )
    for index in range(rounds):
        own = (np.arange(2 * chunk) % 7 + index + rank).astype(dtype)
        x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), own)
        time.sleep(0.1 * rank)  # ranks that arrive apart are what XLA's own gets wrong
        found = np.asarray(scatter(x).addressable_shards[0].data)
        expected = 2 * (np.arange(2 * chunk) % 7 + index) + 1
        wrong += found.dtype != dtype or (found != expected[rank * chunk : (rank + 1) * chunk]).any()
print(int(wrong))
"""

TRAINING = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax, jaxddp

address, rank = sys.argv[1], int(sys.argv[2])
jax.config.update("jax_num_cpu_devices", 2)
jaxddp.start_process(address, 2, rank)
from jaxddp import compression


@jaxddp.layer
def unit(params, x):
    return jnp.tanh(x @ params["w"])


def loss_fn(params, batch):
    for layer in params:
        batch = unit(layer, batch)
    return jnp.mean(batch**2)


params = [{"w": jnp.full((3, 3), 0.1 * (index + 1))} for index in range(3)]
batch = np.arange(24, dtype=np.float32).reshape(8, 3) / 24
found = {}
for name, strategy in {
    "bucketed": jaxddp.bucketed(),
    "zero1": jaxddp.zero1(),
    "zero1 bf16": jaxddp.zero1(compression=compression.bf16),
    "zero1 fp16": jaxddp.zero1(compression=compression.fp16),
    "zero2": jaxddp.zero2(),
    "zero1 by leaves": jaxddp.zero1(shard="leaves"),
    "zero3": jaxddp.zero3(min_shard_elements=1),
    "zero3 bf16": jaxddp.zero3(min_shard_elements=1, compute_dtype=jnp.bfloat16, reduce_dtype=jnp.bfloat16),
    "zero3 fp16": jaxddp.zero3(min_shard_elements=1, compute_dtype=jnp.float16, reduce_dtype=jnp.float16),
}.items():
    trainer = jaxddp.Trainer(loss_fn, optax.adam(0.1), strategy, jaxddp.data_mesh(), num_microbatches=2)
    state = trainer.init(params)
    for _ in range(3):
        state, metrics = trainer.step(state, batch[4 * rank : 4 * rank + 4])
    whole = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    planned = sorted(trainer.planned(state, whole))
    compiled = sorted(jaxddp.gradient_collectives(trainer.compile(state, whole)))
    found[name] = (float(metrics["loss"]), planned, compiled)
print(json.dumps(found))
"""


def test_sums_are_right_where_ranks_arrive_apart():
    assert run_workers(SUMS, 2) == ["0", "0"]


@pytest.mark.full  # ZeRO over Gloo is among the scripts of parity_tests/job_test.py
def test_plans_say_so_and_training_is_the_same():
    first, second = (json.loads(line) for line in run_workers(TRAINING, 2))
    assert first == second
    for name, (loss, planned, compiled) in first.items():
        assert planned == compiled, name
        kinds = {kind for kind, _ in planned}
        assert kinds == ({"all-reduce"} if name == "bucketed" else {"all-to-all", "all-gather"}), name
        # bfloat16 rounds to 8 bits, float16 to 11, float32 to 24.
        rel = {"bf16": 2e-2, "fp16": 3e-3}.get(name.split()[-1], 1e-5)
        assert loss == pytest.approx(first["bucketed"][0], rel=rel), name


def test_elsewhere_a_scatter_is_a_scatter(monkeypatch):
    assert kind_of_scatter("cpu") == "reduce-scatter"
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert [kind_of_scatter(platform) for platform in ("cpu", "gpu", "tpu")] == ["all-to-all"] + 2 * ["reduce-scatter"]
