"""Several processes over Gloo on loopback save together, restore together, and one process goes on alone."""

import json
import shutil

from jaxddp.checkpoint import folder
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
for case in ("empty", "older", "another", "damaged", "fallen"):
    with Checkpoints(f"{folder}/{case}/{process_id}", warn=lambda line: None) as checkpoints:
        try:
            newest = checkpoints.latest_step()
            found.append(f"{newest} {checkpoints.restore(whole, make_params())[0].step}")
        except ValueError as error:
            found.append(str(error))
print(json.dumps([sharded.num_ranks, found]))
"""


def test_processes_save_and_restore_as_one_and_process_0_decides_what(tmp_path, x64):
    """Process 1 sees an empty folder, an older checkpoint, another one of that step, and a damaged one.

    In the last case it is process 0 whose newest is damaged: all go on from the one before.
    """
    trainer = trainer_of("naive on 1")
    state, position = trainer.init(make_params()), 0
    with Checkpoints(tmp_path / "sound") as checkpoints:
        for _ in range(2):
            state, position = advance(trainer, state, position, 1)
            checkpoints.save(trainer, state, data_position=position)
    cases = [tmp_path / case for case in ("empty", "older", "another", "damaged", "fallen")]
    for case in cases:
        for process in ("0", "1"):
            shutil.copytree(tmp_path / "sound", case / process)
    empty, older, another, damaged, _ = (case / "1" for case in cases)
    shutil.rmtree(empty)
    shutil.rmtree(older / "2")
    about = another / "2" / "about.json"
    said = json.loads(about.read_bytes())["about"] | {"data_position": 7}
    about.write_text(json.dumps({"about": said, "crc32": folder._checksum(said)}))
    for path in (damaged, cases[-1] / "0"):
        file = path / "2" / "state.npz"
        file.write_bytes(file.read_bytes()[:-1])
    reasons = [
        f"process 1: no checkpoint of step 2 in '{empty}': there are none",
        f"process 1: no checkpoint of step 2 in '{older}': there are 1",
        f"process 1: checkpoint of step 2 in '{another}' is not the one of that step that process 0 reads",
        f"process 1: checkpoint of step 2 in '{damaged}' is damaged or half-written",
        "2 1",
    ]
    assert [json.loads(line) for line in run_workers(WORKER, 2, tmp_path)] == [[4, reasons]] * 2

    with Checkpoints(tmp_path / "together") as checkpoints:
        trainer = trainer_of("bucketed on 3")
        for step, strategy in ((1, "zero3"), (2, "bucketed"), (3, "zero2")):
            assert checkpoints.about(step)["strategy"] == strategy
            state, position = checkpoints.restore(trainer, make_params(), step=step)
            assert position == step * BATCH
            assert_near(dict_of(trainer, state), uninterrupted(step))
    state, _ = advance(trainer, state, position, 1)
    assert_near(dict_of(trainer, state), uninterrupted(4))
