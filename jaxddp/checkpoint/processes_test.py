"""Several processes over Gloo on loopback save together, restore together, and one process goes on alone."""

import jax

from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.checkpoint.checkpoints_test import (
    BATCH,
    advance,
    assert_close,
    dict_of,
    make_params,
    trainer_of,
    uninterrupted,
)
from jaxddp.mesh_test import run_workers

NUM_PROCESSES = 2

WORKER = """
import sys
import jax
import numpy as np
import jaxddp

address, process_id, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)
jaxddp.start_process(address, 2, process_id)

from jax.experimental import multihost_utils
from jaxddp.training import placement
from jaxddp.checkpoint import host_state
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.checkpoint.checkpoints_test import BATCH, batch_of, make, make_params
from jaxddp.checkpoint.host_state import host_params

sent, real = [], multihost_utils.broadcast_one_to_all
def counted(tree):
    sent.append(sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(tree)))
    return real(tree)

multihost_utils.broadcast_one_to_all, placement.PIECE_BYTES = counted, 100
def step(trainer, state, position):
    mine = slice(process_id * BATCH // 2, (process_id + 1) * BATCH // 2)
    return trainer.step(state, {name: array[mine] for name, array in batch_of(position).items()})[0]

with Checkpoints(folder) as checkpoints:
    sharded = make(jaxddp.zero3(min_shard_elements=8))
    params = jax.tree.map(lambda leaf: leaf - process_id, make_params())  # those of process 0 count
    state = sharded.init(params)
    assert 0 < max(sent) <= 100 < params["w"].nbytes
    jax.tree.map(np.testing.assert_array_equal, host_params(sharded, state), make_params())
    state = step(sharded, state, 0)
    checkpoints.save(sharded, state, data_position=BATCH)
    whole = make(jaxddp.bucketed())
    state, position = checkpoints.restore(whole, make_params())
    checkpoints.save(whole, step(whole, state, position), data_position=position + BATCH)
    host_state.PIECE_BYTES = 100  # in several pieces
    owned = make(jaxddp.zero2(shard="leaves"))
    state, position = checkpoints.restore(owned, make_params())
    checkpoints.save(owned, step(owned, state, position), data_position=position + BATCH)
print(sharded.num_ranks)
"""


def test_processes_save_and_restore_as_one(tmp_path):
    assert run_workers(WORKER, NUM_PROCESSES, tmp_path) == ["4"] * NUM_PROCESSES
    with jax.enable_x64(True), Checkpoints(tmp_path) as checkpoints:
        trainer = trainer_of("bucketed on 3")
        for step, strategy in ((1, "zero3"), (2, "bucketed"), (3, "zero2")):
            assert checkpoints.about(step)["strategy"] == strategy
            state, position = checkpoints.restore(trainer, make_params(), step=step)
            assert position == step * BATCH
            assert_close(dict_of(trainer, state), uninterrupted(step))
        state, _ = advance(trainer, state, position, 1)
        assert_close(dict_of(trainer, state), uninterrupted(4))
