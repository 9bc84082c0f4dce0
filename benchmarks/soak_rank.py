"""A rank of the soak: jaxddp's ``train`` itself, or a loop of torch with or without torchref; it tells of its steps.

    soak_rank.py '{"side": "jaxddp", ...}'

It is a script for ``python -m jaxddp launch`` and for torchrun.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SIDES = ("jaxddp", "torchref", "torchrun alone")
BATCH_SIZE = 8
STUCK_S = 10.0  # longer than a step or a save takes on a busy machine
ENDLESS = 10**9  # steps


@dataclasses.dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        side: One of ``SIDES``, or the path of a module with ``train(program, tell)`` and ``weights(folder)``.
        events: A file to which ranks append.
        checkpoint: Folder.
        checkpoint_every: Steps; 0 for only at the end.
        step_s: Least seconds of a step, the rest of which is slept, as a host sleeps while an accelerator computes.
    """

    side: str
    num_ranks: int
    events: str
    checkpoint: str
    checkpoint_every: int
    log_dir: str
    steps: int = ENDLESS
    step_s: float = 0.0
    max_restarts: int = 0
    seed: int = 0

    @property
    def is_watched(self) -> bool:
        """Whether it has this project's launcher and watchdog, or torchrun alone."""
        return self.side != "torchrun alone"

    @property
    def command(self) -> list[str]:
        """What starts all ranks."""
        script = [__file__, json.dumps(dataclasses.asdict(self))]
        if self.is_watched:
            launch = ["-m", "jaxddp", "launch", "--ranks", str(self.num_ranks), "--log-dir", self.log_dir]
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_ranks}"]
        return [sys.executable, *launch, f"--max-restarts={self.max_restarts}", *script]


class Tell:
    """Tells the soak what a rank does, and keeps the pace of its steps."""

    def __init__(self, program: Program) -> None:
        """Opens the file."""
        self._file, self._step_s = os.open(program.events, os.O_WRONLY | os.O_APPEND), program.step_s
        self._rank, self._next_s = int(os.environ["RANK"]), 0.0
        self.write("started")

    def write(self, kind: str, **fields: Any) -> None:
        """Writes an event in one piece, so that none is cut off by a kill."""
        event = {"at_s": time.monotonic(), "kind": kind, "rank": self._rank, "pid": os.getpid(), **fields}
        os.write(self._file, json.dumps(event).encode() + b"\n")

    def step(self, step: int, save_s: float) -> None:
        """Tells of a step, and of the time for which it was held up by a save; waits until the next may begin."""
        self.write("step", step=step, save_s=save_s)
        time.sleep(max(0.0, self._next_s - time.monotonic()))
        self._next_s = time.monotonic() + self._step_s


def functions_of(side: str) -> tuple[Callable[[Program, Tell], Any], Callable[[str], tuple[int, Any]]]:
    """What trains a side, and what reads the step and the parameters of its newest checkpoint."""
    if side in SIDES:
        return (train_jax, weights_of_jax) if side == "jaxddp" else (train_torch, weights_of_torch)
    spec = importlib.util.spec_from_file_location("side", side)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train, module.weights


def config() -> Any:
    """The model."""
    from jaxddp.sizes import TransformerConfig

    return TransformerConfig(vocab=256, context=64, width=128, num_layers=1, num_heads=4, hidden=512)


def train_jax(program: Program, tell: Tell) -> int:
    """Trains; the exit status is that of the command ``train``."""
    from jaxddp.__main__ import main
    from jaxddp.cli.quiet import import_jax
    from jaxddp.sizes import SIZES

    import_jax()
    from jaxddp.cli import train_program

    SIZES["soak"], train = config(), train_program.train

    def train_and_tell(options: Any, say: Callable[[str], None]) -> Any:
        def say_too(text: str) -> None:
            say(text)
            if text.startswith("compiled in "):
                tell.write("compiled", seconds=float(text.split()[2]))

        return train(options, say_too, lambda report: tell.step(report.step, report.save_s))

    setattr(train_program, "train", train_and_tell)  # noqa: B010
    options = {
        "model": "soak", "steps": program.steps, "batch-size": BATCH_SIZE, "seed": program.seed, "stuck-s": STUCK_S,
        "checkpoint": program.checkpoint, "checkpoint-every": program.checkpoint_every,
    }  # fmt: skip
    return main(["train", "--resume", *(f"--{name}={value}" for name, value in options.items())])


def weights_of_jax(folder: str) -> tuple[int, dict[str, np.ndarray]]:
    """Of the newest checkpoint."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jaxddp.checkpoint import Checkpoints
    from jaxddp.checkpoint.interop import to_numpy
    from jaxddp.models import build

    with Checkpoints(folder) as checkpoints:
        step = checkpoints.latest_step()
        assert step is not None
        return step, to_numpy(checkpoints.restore_params(build(config())[1]))


def train_torch(program: Program, tell: Tell) -> int:
    """Trains with torchref and its watchdog, or as torchrun's documentation has it, with neither."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from jaxddp.training.data import Corpus
    from torchref import BucketedDDP, Checkpoints, Trainer
    from torchref.launch import init_from_env
    from torchref.models import build, loss_fn

    if program.is_watched:
        init_from_env("gloo", stuck_s=STUCK_S)
    else:
        dist.init_process_group("gloo")
    module, corpus = build(config(), seed=program.seed), Corpus(context=config().context)
    net: Any = BucketedDDP(module) if program.is_watched else DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    checkpoints, trainer = Checkpoints(program.checkpoint), Trainer(loss_fn, optimizer, net)
    step = checkpoints.restore(trainer)[0] if checkpoints.latest_step() is not None else 0
    while step < program.steps:
        batch = corpus.batch(step, BATCH_SIZE, seed=program.seed, rank=dist.get_rank(), num_ranks=program.num_ranks)
        optimizer.zero_grad()
        loss_fn(net, {name: torch.from_numpy(array) for name, array in batch.items()}).backward()
        if program.is_watched:
            net.finish_gradient_synchronization()
        optimizer.step()
        step += 1
        since_s = time.monotonic()
        if step == program.steps or (program.checkpoint_every and step % program.checkpoint_every == 0):
            checkpoints.save(trainer, step)
        tell.step(step, time.monotonic() - since_s)
    dist.destroy_process_group()
    return 0


def weights_of_torch(folder: str) -> tuple[int, dict[str, np.ndarray]]:
    """Of the newest checkpoint."""
    import torch

    from torchref import Checkpoints, Trainer
    from torchref.models import build, loss_fn

    module = build(config())
    step, _ = Checkpoints(folder).restore(Trainer(loss_fn, torch.optim.AdamW(module.parameters()), module))
    return step, {name: tensor.detach().numpy() for name, tensor in module.named_parameters()}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    asked = Program(**json.loads(sys.argv[-1]))
    sys.exit(functions_of(asked.side)[0](asked, Tell(asked)))
