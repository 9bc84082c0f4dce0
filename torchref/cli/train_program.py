"""``python -m torchref train``: trains a language model of bytes, as ``python -m jaxddp train`` does."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from jaxddp.checkpoint.weights import load_weights
from jaxddp.cli import train as command
from jaxddp.cli.launch import launch
from jaxddp.processes.job import find_job, visible_gpus
from jaxddp.processes.watchdog import begin_step, end_step
from jaxddp.training.data import Batch, Corpus

from ..agreement import check_alike, group_device
from ..checkpoint import Checkpoints
from ..communication.collectives import Issued, record
from ..interop import from_numpy
from ..launch import init_from_env
from ..models import build, loss_fn
from ..registry import make_training
from ..replicas import check_replicas
from ..strategy import DataParallel
from ..train import Trainer, local_rows


def add_parser(commands: Any) -> None:
    """Adds the command ``train`` to argparse's subparsers."""
    parser = commands.add_parser(
        "train",
        help="train a byte-level language model, and show what was communicated",
        description="Train a byte-level language model with data parallelism. Without --data the text is the Python "
        "standard library's own source. A rank is a process: those of the job under torchrun, srun or mpirun, else as "
        "many as --devices or --processes asks for, on this machine's GPUs or over Gloo on its CPU.",
    )
    command.add_flags(parser, without=["compute_dtype"])
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int | None:
    """Trains; outside a job it starts the processes of one, and gives the launcher's exit status."""
    options = command.options_of(arguments)
    if None not in (options.devices, options.processes) and options.devices != options.processes:
        raise ValueError(f"devices (={options.devices}) must be processes (={options.processes}): a rank is a process")
    job, asked = find_job(), options.devices or options.processes
    if job is None or (job.num_processes == 1 and (asked or 1) > 1):  # such as a shell of SLURM
        num_ranks = asked or len(visible_gpus()) or command.DEFAULT_SIMULATED_DEVICES
        options.check_batch_size(num_ranks)  # here, or each rank would say it
        return launch(["-m", "torchref", *sys.argv[1:]], num_ranks, max_restarts=options.max_restarts)
    train(options, command.say_on_first())
    dist.destroy_process_group()
    return None


def train(options: command.TrainOptions, say: Callable[[str], None]) -> list[command.StepReport]:
    """Trains a language model; arguments, what it returns and raises are those of ``jaxddp``'s."""
    corpus = Corpus(options.data, context=options.config.context)
    job = find_job()
    num_ranks = 1 if job is None else job.num_processes
    if options.devices not in (None, num_ranks):
        raise ValueError(f"devices (={options.devices}) must be the job's processes (={num_ranks}), a rank each")
    device = init_from_env(stuck_s=options.stuck_s)
    options.check_batch_size(dist.get_world_size())
    check_alike(options.alike(corpus))

    module = build(options.model, seed=options.seed)
    if options.weights is not None:
        from_numpy(load_weights(options.weights), module)
    num_params = sum(parameter.numel() for parameter in module.parameters())
    optimizer_cls = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[options.optimizer]
    net, optimizer = make_training(  # AdamW's weight decay is 0.01
        options.strategy, module.to(device), optimizer_cls, options.strategy_options, lr=options.learning_rate
    )
    trainer = Trainer(
        loss_fn, optimizer, net, num_microbatches=options.microbatches, max_grad_norm=options.max_grad_norm,
        nonfinite="ignore" if options.nonfinite == "raise" else "skip",
    )  # fmt: skip
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU device"
    say(f"{options.model} ({num_params:,} parameters) on {dist.get_world_size()} x {kind}, {options.strategy}")
    say(f"text: {corpus.source}, {corpus.num_bytes:,} bytes")

    return command.take_steps(options, corpus, _Training(trainer, net), Checkpoints, say)


class _Training:
    """A trainer, and the collectives of its last step."""

    is_noted_by_jax = False

    def __init__(self, trainer: Trainer, net: DataParallel) -> None:
        self._trainer, self._net, self._issued = trainer, net, list[Issued]()
        self.place = {"rank": dist.get_rank(), "num_ranks": dist.get_world_size()}

    def start(self, batch: Batch) -> None:
        """Nothing is compiled."""

    def collectives(self) -> tuple[Any, Any, str]:
        planned = self._net.planned_collectives(num_microbatches=self._trainer.num_microbatches)
        return planned, [(one.kind, one.num_bytes) for one in self._issued], "issued"

    @property
    def num_steps(self) -> int:
        return self._trainer.num_steps

    def step(self, batch: Batch) -> dict[str, float]:
        with record() as self._issued:
            metrics = self._trainer.step(_to_device(batch))
        if group_device().type == "cuda":
            torch.cuda.synchronize()
        return metrics

    def mean_loss(self, batches: Sequence[Batch]) -> float:
        begin_step(is_call=True)
        mine = [_to_device(local_rows(batch, self.place["rank"], self.place["num_ranks"])) for batch in batches]
        with torch.no_grad():
            total = torch.stack([loss_fn(self._trainer.net, batch) for batch in mine]).mean()
        dist.all_reduce(total)
        mean = float(total) / dist.get_world_size()
        end_step()
        return mean

    def check_replicas(self) -> None:
        check_replicas(self._trainer)

    def is_signalled(self, signals: Sequence[int]) -> bool:
        told = torch.tensor([len(signals)], device=group_device())
        begin_step(is_call=True)
        dist.all_reduce(told)  # all ranks agree on one
        was_told = bool(told)
        end_step()
        return was_told

    def save(self, folder: Checkpoints, position: Any) -> None:
        folder.save(self._trainer, self.num_steps, data_position=position)

    def restore(self, folder: Checkpoints) -> Any:
        return folder.restore(self._trainer)[1]


def _to_device(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array).to(group_device()) for name, array in batch.items()}
