"""``python -m jaxddp train``: its options, and the loop that its program and the one of torchref share."""

import argparse
import contextlib
import importlib
import math
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from ..arguments import check_integer, check_positive
from ..communication.buckets import MIB
from ..plugins import import_jax
from ..processes.job import find_job, print_line
from ..sizes import SIZES
from ..table import count_kinds
from ..training.clock import stopwatch, summarize
from ..training.data import Corpus
from .launch import launch
from .parser import noted_signals

DEFAULT_SIMULATED_DEVICES = 4
_NUM_VALIDATION_BATCHES = 4
_CHECK_REPLICAS_EVERY = 100  # steps; before each checkpoint too
_MAX_SKIPS = 9  # in a row
_NUM_LINES = 20  # of steps, in a run
_MODELS = [name for name, config in SIZES.items() if config.vocab >= 256]  # that read bytes
_PATHS = ("data", "weights", "checkpoint")  # hosts may name them otherwise


def _flag(default: Any, kind: type, text: str, shown: str = "%(default)s", choices: Any = None) -> Any:
    metavar = {int: "N", float: "X", str: "NAME"}[kind]
    described = {"type": kind, "metavar": metavar, "help": f"{text} (default: {shown})", "choices": choices}
    return field(default=default, metadata=described)


@dataclass
class TrainOptions:
    """What to train and how: each field is a flag. A ValueError if numbers do not fit each other."""

    # The ranks.
    strategy: str = _flag("bucketed", str, "such as bucketed or zero2; a wrong name lists all")
    devices: int | None = _flag(None, int, "ranks", "those of the job, all accelerators, or 4 on the CPU")
    processes: int | None = _flag(None, int, "processes to start on this machine, which share the ranks", "none")
    max_restarts: int = _flag(0, int, "start the processes again when one fails, at most N times")
    stuck_s: float = _flag(600.0, float, "seconds for which one process may be silent or keep the others waiting")
    # The model and the text.
    model: str = _flag("byte", str, f"one of {', '.join(_MODELS)}", choices=_MODELS)
    weights: str | None = _flag(None, str, "file .npz of parameters under PyTorch's names", "drawn from --seed")
    data: str | None = _flag(None, str, "text file", "the Python standard library")
    seed: int = _flag(0, int, "seed of the initial parameters and of the order of the text")
    # The steps.
    steps: int = _flag(200, int, "training steps")
    batch_size: int = _flag(32, int, "examples per step, of all ranks together")
    microbatches: int = _flag(1, int, "parts into which each rank splits its examples, to save memory")
    bucket_mb: float | None = _flag(None, float, "bucket cap in MiB (2^20 bytes)", "1 for the first, then at least 25")
    compute_dtype: str | None = _flag(None, str, "compute in bfloat16, and update float32 masters", "float32",
        ("bfloat16", "float32"))  # fmt: skip
    optimizer: str = _flag("adamw", str, "adamw (weight decay 0.01), adam or sgd", choices=("adamw", "adam", "sgd"))
    learning_rate: float = _flag(1e-3, float, "constant learning rate")
    max_grad_norm: float | None = _flag(None, float, "clip the gradient's global norm to this", "no clipping")
    nonfinite: str = _flag("raise", str, "if loss or gradient become NaN or infinite: raise ends the run with status "
        "3; stop does so too, and keeps the state before as STEP.nonfinite; skip goes on without the update, at most "
        f"{_MAX_SKIPS} times in a row", choices=("raise", "skip", "stop"))  # fmt: skip
    # The checkpoints.
    checkpoint: str | None = _flag(None, str, "folder of checkpoints; the last step is always saved", "none is saved")
    checkpoint_every: int = _flag(50, int, "steps between validations, each with a checkpoint; 0: at the end only")
    resume: bool = field(default=False, metadata={"action": "store_true", "help": "go on from the newest checkpoint, "
        "if there is one, with any ranks and strategy: one command starts and restarts a run"})  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("devices", "processes", "steps", "batch_size", "microbatches"):
            check_integer(name, 1 if getattr(self, name) is None else getattr(self, name))
        check_integer("checkpoint_every", self.checkpoint_every, 0)
        check_positive("learning_rate", self.learning_rate)
        check_positive("stuck_s", self.stuck_s)
        if check_integer("seed", self.seed, 0) >= 2**63:
            raise ValueError(f"seed (={self.seed}) must be below 2^63")
        if self.resume and self.checkpoint is None:
            raise ValueError(f"resume (={self.resume}) must come with checkpoint, the folder to go on from")
        if self.max_restarts and self.checkpoint is not None and not self.resume:
            raise ValueError(f"max_restarts (={self.max_restarts}) must come with resume where there is a checkpoint")
        if self.devices and self.processes and self.devices % self.processes:
            raise ValueError(f"processes (={self.processes}) must divide devices (={self.devices})")
        if num_ranks := self.devices or self.processes:
            self.check_batch_size(num_ranks)
        if self.bucket_mb is not None and self.strategy in ("naive", "flat", "overlapped"):
            raise ValueError(f"strategy {self.strategy!r} has no buckets: leave out bucket_mb (={self.bucket_mb:g})")
        self.strategy_options = {} if self.bucket_mb is None else {"bucket_mb": self.bucket_mb}
        self.config = SIZES[self.model]

    def check_batch_size(self, num_ranks: int) -> None:
        """Raises a ValueError if the batch does not divide evenly."""
        if self.batch_size % (num_ranks * self.microbatches):
            pieces = f"devices x microbatches (={num_ranks} x {self.microbatches})"
            raise ValueError(f"batch_size (={self.batch_size}) must be divisible by {pieces}")

    def alike(self, corpus: Corpus) -> dict[str, Any]:
        """What must be the same in all processes of a run."""
        return {name: value for name, value in asdict(self).items() if name not in _PATHS} | {"text": corpus.crc32}


def add_parser(commands: Any) -> None:
    """Adds the command ``train`` to argparse's subparsers."""
    parser = commands.add_parser(
        "train",
        help="train a byte-level language model, and show what was communicated",
        description="Train a byte-level language model with data parallelism. Without --data the text is the Python "
        "standard library's own source. Without accelerators, and with JAX_PLATFORMS=cpu, the CPU poses as several "
        "devices. Under torchrun, srun or mpirun the processes of the job train together.",
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int | None:
    """Trains, or starts the processes of a job that do; the launcher's exit status."""
    options = options_of(arguments)
    job, asked = find_job(), options.processes
    if job is not None and job.num_processes > 1 and asked not in (None, job.num_processes):
        raise ValueError(f"processes (={asked}) must be those of the job (={job.num_processes})")
    # A job of one, such as a shell of SLURM, starts others as no job does. The processes get the same command.
    if asked is not None and (job is None or asked > job.num_processes):
        return launch(["-m", "jaxddp", *sys.argv[1:]], asked, max_restarts=options.max_restarts)
    if options.max_restarts and options.processes is None:
        raise ValueError(f"max_restarts (={options.max_restarts}) must come with processes")
    import_jax()  # late, so that the help needs no JAX
    importlib.import_module(".train_program", __package__).train(options, say_on_first())
    return None


def add_flags(parser: argparse.ArgumentParser, without: Sequence[str] = ()) -> None:
    """Adds a flag for each field of ``TrainOptions``."""
    for one in fields(TrainOptions):
        if one.name not in without:
            parser.add_argument(f"--{one.name.replace('_', '-')}", default=one.default, **one.metadata)


def options_of(arguments: argparse.Namespace) -> TrainOptions:
    """The options of a command line."""
    given = vars(arguments)
    return TrainOptions(**{one.name: given[one.name] for one in fields(TrainOptions) if one.name in given})


def say_on_first() -> Callable[[str], None]:
    """Prints a line, in process 0 of a job."""
    job = find_job()
    is_first = job is None or job.process_id == 0
    return lambda line: print(line, flush=True) if is_first else None


class StepReport(NamedTuple):
    """What is reported after a step."""

    step: int  # steps taken, from 1
    loss: float  # nats per byte, of the global batch, before the update
    validation_loss: float | None = None  # nats per byte, after the update, if there is a validation after this step
    seconds: float = 0.0


def take_steps(
    options: TrainOptions, corpus: Corpus, training: Any, checkpoints: Any, say: Callable[[str], None]
) -> list[StepReport]:
    """Trains up to the last step, and reports each; all processes of a job take the same branches.

    ``training`` is the ``_Training`` of either program. Raises a FloatingPointError after numbers that are not finite,
    unless ``nonfinite`` skips them, a ReplicaError if ranks differ, a ValueError for another run's checkpoint.
    """
    reports: list[StepReport] = []
    num_skips = 0  # in a row
    ended_by: int | None = None  # a signal
    held_out = [*corpus.validation_batches(options.batch_size, _NUM_VALIDATION_BATCHES)]
    data = {"seed": options.seed, "text_crc32": corpus.crc32}  # of which checkpoints say what was taken
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(checkpoints(options.checkpoint, warn=say)) if options.checkpoint else None
        num_batches = 0 if folder is None else _resume(options, data, training, folder, say)
        if training.num_steps >= options.steps:
            return []
        training.start(corpus.batch(0, options.batch_size, seed=options.seed))
        signals = stack.enter_context(noted_signals(training.is_noted_by_jax))
        while ended_by is None and training.num_steps < options.steps:
            batch = corpus.batch(num_batches, options.batch_size, seed=options.seed, **training.place)
            metrics, seconds = stopwatch(training.step, batch)  # it waits itself
            step, num_batches = training.num_steps, num_batches + 1
            position = data | {"examples": num_batches * options.batch_size}
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])

            found = f"loss (={loss}) and gradient norm (={norm})"
            num_skips = 0 if math.isfinite(loss) and math.isfinite(norm) else num_skips + 1
            if num_skips > (_MAX_SKIPS if options.nonfinite == "skip" else 0):
                if folder is not None and options.nonfinite != "raise":  # else the state before is gone
                    training.check_replicas()
                    path = f"{options.checkpoint}/{step}.nonfinite"  # where --resume does not find it
                    with checkpoints(path) as aside:
                        if is_new := aside.latest_step() is None:
                            training.save(aside, position)
                    say(f"the state before is kept in {path}" if is_new else f"{path} keeps that of an earlier run")
                raise FloatingPointError(f"{found} of step {step} must be finite")
            if step < options.steps and training.is_signalled(signals):
                ended_by = signals[0] if signals else signal.SIGTERM

            is_last = ended_by is not None or step == options.steps
            is_due = step == options.steps or (options.checkpoint_every > 0 and step % options.checkpoint_every == 0)
            if is_last or is_due or step % _CHECK_REPLICAS_EVERY == 0:
                training.check_replicas()
            validation_loss = None
            if held_out and is_due and ended_by is None:
                validation_loss = training.mean_loss(held_out)
                if not math.isfinite(validation_loss):
                    raise FloatingPointError(f"validation loss (={validation_loss}) after step {step} must be finite")
            if folder is not None and (is_last or (is_due and num_skips == 0)):
                training.save(folder, position)
            reports.append(StepReport(step, loss, validation_loss, seconds))
            if line := f"step {step} is skipped: {found} are not finite" if num_skips else progress(options, reports):
                say(line)
        if folder is not None:
            say(f"checkpoints in {options.checkpoint}: steps {', '.join(map(str, folder.steps()))}")
    if ended_by is not None:
        print_line(f"ended by {signal.Signals(ended_by).name} after {training.num_steps} of {options.steps} steps")
        sys.exit(128 + ended_by)
    for line in summary(options, reports, *training.collectives()):
        say(line)
    return reports


def _resume(options: TrainOptions, data: dict[str, Any], training: Any, folder: Any, say: Callable[[str], None]) -> int:
    """Restores the newest checkpoint, if there is one and it continues this run; gives the batches that it has seen."""
    folder.reserve()  # no other job saves there meanwhile
    if (step := folder.latest_step()) is None:
        if options.resume:
            say(f"no checkpoint in {options.checkpoint} yet: starting at step 0")
        return 0
    if not options.resume:
        raise ValueError(f"checkpoint (={options.checkpoint!r}) holds step {step}: resume, or another folder")
    saved = training.restore(folder)
    if not isinstance(saved, dict) or saved.keys() != {*data, "examples"}:
        raise ValueError(f"checkpoint (={options.checkpoint!r}) must be one of this command, not of another program")
    for name, given in data.items():
        if given != saved[name]:
            raise ValueError(f"{name} (={given}) must be {saved[name]}, as in the checkpoint, to go on in the data")
    if saved["examples"] % options.batch_size:
        raise ValueError(f"batch_size (={options.batch_size}) must divide the examples taken (={saved['examples']})")
    complete = f"complete: {training.num_steps} of {options.steps} steps are taken"
    say(complete if training.num_steps >= options.steps else f"resumed at step {training.num_steps}")
    return saved["examples"] // options.batch_size


def progress(options: TrainOptions, reports: Sequence[StepReport]) -> str | None:
    """A line about the last step: after a validation, after the first step, and about 20 times in a run."""
    last, steps = reports[-1], options.steps
    if last.validation_loss is None and last.step not in (1, steps) and last.step % math.ceil(steps / _NUM_LINES):
        return None
    line = f"step {last.step:{len(str(steps))}}/{steps}  loss {last.loss:.3f}  {_tokens_per_s(options, reports[-20:])}"
    if (loss := last.validation_loss) is None:
        return line
    return f"{line}  validation {loss:.3f} nats, {loss / math.log(2):.3f} bits per byte"


def summary(options: TrainOptions, reports: Sequence[StepReport], planned: Any, found: Any, how: str) -> list[str]:
    """Lines about a run that has taken all its steps; planned and found collectives are (kind, bytes) of a step."""
    wanted, said = (
        f"{count_kinds(of, names={})}, {sum(size for _, size in of) / MIB:.1f} MiB" for of in (planned, found)
    )
    said = f"{said}, NOT AS PLANNED" if sorted(planned) != sorted(found) else "the same"
    return [
        f"collectives  planned {wanted} per step; {how}: {said}",
        f"step time    {summarize([one.seconds for one in reports])}",
        f"throughput   {_tokens_per_s(options, reports)} ({options.batch_size} x {options.config.context} per step)",
    ]


def _tokens_per_s(options: TrainOptions, reports: Sequence[StepReport]) -> str:
    median_s = summarize([one.seconds for one in reports]).median_ms / 1e3
    return f"{options.batch_size * options.config.context / median_s:,.0f} tokens/s"
