"""A rank of torch: with torchref and its watchdog, or as torchrun's documentation has it, with neither.

A checkpoint is written by rank 0 beside the one before, and then takes its place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from jaxddp.training.clock import stopwatch
from jaxddp.training.data import Corpus
from torchref import BucketedDDP
from torchref.launch import init_from_env
from torchref.models import build, loss_fn

from .program import BATCH_SIZE, MODEL, STUCK_S, Events, parse


def main() -> None:
    """Trains."""
    program = parse()
    events = Events(program)
    if program.is_watched:
        init_from_env("gloo", stuck_s=STUCK_S)
    else:
        dist.init_process_group("gloo")
    module, corpus = build(MODEL, seed=program.seed), Corpus(context=MODEL.context)
    net: Any = BucketedDDP(module) if program.is_watched else DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    step, path = 0, _path(program.checkpoint)
    if path.exists():
        saved = torch.load(path)
        step = saved["step"]
        module.load_state_dict(saved["module"])
        optimizer.load_state_dict(saved["optimizer"])

    def save() -> None:
        partial = path.with_suffix(".partial")
        torch.save({"step": step, "module": module.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        os.replace(partial, path)

    while step < program.steps:
        batch = corpus.batch(step, BATCH_SIZE, seed=program.seed, rank=dist.get_rank(), num_ranks=dist.get_world_size())
        optimizer.zero_grad()
        loss_fn(net, {name: torch.from_numpy(array) for name, array in batch.items()}).backward()
        if program.is_watched:
            net.finish_gradient_synchronization()
        optimizer.step()
        step += 1
        is_due = step == program.steps or (program.checkpoint_every and step % program.checkpoint_every == 0)
        save_s = stopwatch(save, wait=lambda _: None)[1] if is_due and dist.get_rank() == 0 else 0.0
        events.step(step, save_s)
    dist.destroy_process_group()


def weights(folder: str) -> tuple[int, dict[str, np.ndarray]]:
    """The step and the parameters of the newest checkpoint."""
    saved = torch.load(_path(folder))
    return saved["step"], {name: tensor.numpy() for name, tensor in saved["module"].items()}


def _path(folder: str) -> Path:
    return Path(folder, "newest.pt")


if __name__ == "__main__":
    main()
