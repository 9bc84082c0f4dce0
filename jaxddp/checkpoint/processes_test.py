"""Several processes over Gloo on loopback save together, restore together, and one process goes on alone."""

import json
import shutil

from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.checkpoint.checkpoints_test import BATCH, advance, dict_of, make_params, trainer_of, uninterrupted
from jaxddp.comparison_test import assert_near
from jaxddp.mesh_test import run_workers

WORKER = """
import json
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

with Checkpoints(f"{folder}/together") as checkpoints:
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
    owned = make(jaxddp.zero2(shard="leaves"))
    state, position = checkpoints.restore(owned, make_params())
    checkpoints.save(owned, step(owned, state, position), data_position=position + BATCH)

found = []
for case in ("unseen", "damaged"):
    with Checkpoints(f"{folder}/{case}/{process_id}", warn=lambda line: None) as checkpoints:
        newest = checkpoints.latest_step()
        state, position = checkpoints.restore(whole, make_params())
        found.append([newest, int(state.step), position])
        try:
            checkpoints.restore(whole, {"w": np.ones(3)})
        except ValueError as error:
            found.append(str(error))
print(json.dumps([sharded.num_ranks, found]))
"""


def test_processes_save_and_restore_as_one_and_process_0_alone_reads(tmp_path, x64):
    """Process 1 sees an empty folder. In the second case the newest is damaged: all go on from the one before."""
    trainer = trainer_of("naive on 1")
    state, position = trainer.init(make_params()), 0
    with Checkpoints(tmp_path / "unseen" / "0") as checkpoints:
        for _ in range(2):
            state, position = advance(trainer, state, position, 1)
            checkpoints.save(trainer, state, data_position=position)
    shutil.copytree(tmp_path / "unseen" / "0", tmp_path / "damaged" / "0")
    file = tmp_path / "damaged" / "0" / "2" / "state.npz"
    file.write_bytes(file.read_bytes()[:-1])
    for line in run_workers(WORKER, 2, tmp_path):
        num_ranks, found = json.loads(line)
        assert num_ranks == 4 and found[::2] == [[2, 2, 2 * BATCH], [2, 1, BATCH]]
        assert all("is of another model: params.w" in refused for refused in found[1::2])

    with Checkpoints(tmp_path / "together") as checkpoints:
        trainer = trainer_of("bucketed on 3")
        for step, strategy in ((1, "zero3"), (2, "bucketed"), (3, "zero2")):
            assert checkpoints.about(step)["strategy"] == strategy
            state, position = checkpoints.restore(trainer, make_params(), step=step)
            assert position == step * BATCH
            assert_near(dict_of(trainer, state), uninterrupted(step))
    state, _ = advance(trainer, state, position, 1)
    assert_near(dict_of(trainer, state), uninterrupted(4))
