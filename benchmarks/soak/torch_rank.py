"""A rank of torch: with torchref and its watchdog, or as torchrun's documentation has it, with neither."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from jaxddp.training.clock import stopwatch
from jaxddp.training.data import Corpus
from torchref import BucketedDDP, Checkpoints, Trainer
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
    checkpoints = Checkpoints(program.checkpoint)
    trainer = Trainer(loss_fn, optimizer, net)
    step = checkpoints.restore(trainer)[0] if checkpoints.latest_step() is not None else 0
    while step < program.steps:
        batch = corpus.batch(step, BATCH_SIZE, seed=program.seed, rank=dist.get_rank(), num_ranks=dist.get_world_size())
        optimizer.zero_grad()
        loss_fn(net, {name: torch.from_numpy(array) for name, array in batch.items()}).backward()
        if program.is_watched:
            net.finish_gradient_synchronization()
        optimizer.step()
        step += 1
        is_due = step == program.steps or (program.checkpoint_every and step % program.checkpoint_every == 0)
        save_s = stopwatch(checkpoints.save, trainer, step, wait=lambda _: None)[1] if is_due else 0.0
        events.step(step, save_s)
    dist.destroy_process_group()


def weights(folder: str) -> tuple[int, dict[str, np.ndarray]]:
    """The step and the parameters of the newest checkpoint."""
    module = build(MODEL)
    step, _ = Checkpoints(folder).restore(Trainer(loss_fn, torch.optim.AdamW(module.parameters()), module))
    return step, {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}


if __name__ == "__main__":
    main()
