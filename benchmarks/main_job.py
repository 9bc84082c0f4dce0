"""The main job: a byte-level language model on real text, under every strategy, in both frameworks.

All runs start from the same weights and see the same batches, so all must end where single-process training ends.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from jaxddp.data import Corpus
from torchref.launch import launch

from . import jax_side, torch_side
from .console import progress_of
from .measure import Measured, Setup, SideResult, StrategySpec, largest_difference
from .picture import draw_steps
from .results import make_rows, terminal_table, write_rows

# Float32 Adam: a weight whose gradient is near 0 takes steps of 1e-3 whose sign the rounding decides. Over the 22 steps
# here some of 4.3 million weights were seen apart by up to 2e-4; a gradient of the wrong ranks moves them by 1e-2. Adam
# cannot see a gradient that is only too large: METRIC_TOLERANCE of results.py, on the norms, does.
TOLERANCE = 1e-3
MODEL, CONTEXT = "byte", 128
STRATEGIES = (
    StrategySpec("naive"),
    StrategySpec("flat"),
    StrategySpec("overlapped"),
    StrategySpec("bucketed", 4.0),
    StrategySpec("zero1", 4.0),
    StrategySpec("zero2", 4.0),
    StrategySpec("zero3"),
)


def text_setup(*, num_ranks: int, num_steps: int, batch_size: int, data: str | None) -> tuple[Setup, str]:
    """Describes the job.

    Args:
        num_ranks: Ranks in each framework.
        num_steps: Timed steps.
        batch_size: Sequences of the global batch.
        data: Text to train on; the standard library's sources when None.

    Returns:
        The setup, and its description in a line.

    Raises:
        ValueError: If the data does not serve, or the batch cannot be split.
    """
    check_batch_size(batch_size, num_ranks)
    corpus, num_warmup = Corpus(data, context=CONTEXT), 2
    batches = tuple(corpus.batch(step, batch_size) for step in range(num_warmup + num_steps))
    described = (
        f"{MODEL} language model on {corpus.source}, {corpus.num_bytes:,} bytes: {num_warmup} + {num_steps} steps of"
        f" {batch_size} x {CONTEXT} bytes, AdamW, {num_ranks} ranks"
    )
    return Setup(MODEL, STRATEGIES, num_ranks, batches, num_warmup), described


def check_batch_size(batch_size: int, num_ranks: int) -> None:
    """Raises ValueError if a batch cannot be split over the ranks."""
    if batch_size % num_ranks:
        raise ValueError(f"batch_size (={batch_size}) must be divisible by the number of ranks (={num_ranks})")


def run_main_job(folder: Path, console: Console, setup: Setup) -> bool:
    """Runs a setup in both frameworks, prints its table and fills its folder.

    Args:
        folder: Of this run.
        console: Where to print.
        setup: What to train.

    Returns:
        Whether every check holds.
    """
    ours = run_jax(setup, console)
    theirs = run_torch(setup, ours.weights, console)

    between = largest_difference(ours.trained, theirs.trained)
    rows = [
        *make_rows("main", "jaxddp", setup, ours, TOLERANCE),
        *make_rows("main", "torchref", setup, theirs, TOLERANCE),
    ]
    together = between <= TOLERANCE
    notes = [
        f"jaxddp: {ours.ranks}, {ours.backend}; torchref: {theirs.ranks}, {theirs.backend}",
        "planned and compiled: gradient collectives of one step (AR: all-reduce), from the bucket plan and as read back"
        " from the compiled program; torchref compiles nothing: as issued",
        f"loss: of the last batch, {rows[0].first_loss:.3f} nats at first; max diff: of any weight to single-process"
        f" training after {len(setup.batches)} steps, at most {TOLERANCE:.0e}",
        "exposed: step time minus that of the same step without communication, median over interleaved rounds",
        f"single-process JAX against single-process PyTorch: {between:.1e}, {'ok' if together else 'WRONG'}",
    ]
    console.print()
    console.print(
        terminal_table(rows, f"{setup.model} model, {setup.num_timed} timed steps, {ours.device} and {theirs.device}")
    )
    for note in notes:
        console.print(f"[dim]{note}[/dim]", soft_wrap=True)
    write_rows(folder, rows, notes)
    draw_steps(
        rows,
        folder / "steps.png",
        f"{setup.model} model, {ours.num_ranks} ranks: {ours.kind} (jaxddp), {theirs.kind} (torchref)",
    )
    console.print(f"\nwritten to {folder}: table.md, metrics.jsonl, steps.png", soft_wrap=True)
    return together and all(row.check == "ok" for row in rows)


def run_jax(setup: Setup, console: Console) -> SideResult:
    """Runs a setup in JAX, in a process of its own."""
    with progress_of(console, "jaxddp") as show:
        return launch(jax_side.run, setup, num_ranks=1, on_message=show)[0]


def run_torch(setup: Setup, weights: dict, console: Console) -> SideResult:
    """Runs a setup in PyTorch, a process for each rank; a step takes as long as its slowest rank."""
    import torch

    num_gpus = torch.cuda.device_count()
    num_ranks, backend = (min(setup.num_ranks, num_gpus), "nccl") if num_gpus else (setup.num_ranks, "gloo")
    with progress_of(console, "torchref") as show:
        sides = launch(torch_side.run, setup, weights, num_ranks=num_ranks, backend=backend, on_message=show)
    first = sides[0]
    for label in first.measured:
        of_ranks = [side.measured[label] for side in sides]
        first.measured[label] = Measured(
            planned=of_ranks[0].planned,
            found=of_ranks[0].found,
            metrics=of_ranks[0].metrics,
            reference=of_ranks[0].reference,
            max_weight_difference=max(measured.max_weight_difference for measured in of_ranks),
            seconds=[max(times) for times in zip(*(one.seconds for one in of_ranks), strict=True)],
            baseline_seconds=[max(times) for times in zip(*(one.baseline_seconds for one in of_ranks), strict=True)],
        )
    return first
