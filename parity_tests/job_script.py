"""A training script as users start it: joins its job, trains under ZeRO-1, and process 0 writes the weights.

python -m parity_tests.job_script jaxddp|torchref FOLDER
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from .cases import Case
from .inputs import batches

CASE = Case("zero1(1KiB)", "adamw", 2, "toy", "float64")


def _train_jaxddp(folder: Path) -> dict:
    import jax

    import jaxddp
    from jaxddp.checkpoint.checkpoints import Checkpoints
    from jaxddp.checkpoint.interop import from_numpy, to_numpy

    from . import jax_side

    jax.config.update("jax_enable_x64", True)
    jaxddp.start_process()
    trainer = jax_side.make_trainer(CASE, jaxddp.data_mesh())
    weights = dict(np.load(folder / "initial.npz"))  # a process with other compiler options would round them otherwise
    state = trainer.init(from_numpy(weights, jax_side.initial_params(CASE.model, CASE.dtype)))
    for batch in batches(CASE.model, CASE.dtype):
        state, _ = trainer.step(state, jaxddp.local_rows(batch))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(trainer, state)
    weights = to_numpy(trainer.params(state))
    if jax.process_index() == 0:
        np.savez(folder / "weights.npz", allow_pickle=False, **weights)
    return {
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "local_devices": jax.local_device_count(),
    }


def _train_torchref(folder: Path) -> dict:
    import torch.distributed as dist

    from torchref.launch import init_from_env

    from . import torch_side

    weights = dict(np.load(folder / "initial.npz"))
    init_from_env()
    trained = torch_side.train_on_rank(CASE, weights)
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        np.savez(folder / "weights.npz", allow_pickle=False, **trained)
    dist.destroy_process_group()
    return {"process": rank, "processes": size, "devices": size, "local_devices": 1}


if __name__ == "__main__":
    framework, folder = sys.argv[1], Path(sys.argv[2])
    said = (_train_jaxddp if framework == "jaxddp" else _train_torchref)(folder)
    said["nccl_on"] = os.environ.get("NCCL_SOCKET_IFNAME")
    Path(folder, f"process-{said['process']}.json").write_text(json.dumps(said))
