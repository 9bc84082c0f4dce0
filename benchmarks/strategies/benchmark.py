"""Every strategy in both frameworks, beside what the frameworks do by themselves, in the same interleaved rounds.

All runs of a framework start from the same weights and see the same batches, so all must end where single-process
training ends, and that must be the same in both frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from jaxddp import STRATEGIES as OURS
from jaxddp.environment import gpus
from jaxddp.models import SIZES
from jaxddp.registry import is_bucketed
from jaxddp.training.data import Corpus, RandomTokens

from ..harness.free_memory import PROCESS_BYTES, free_bytes
from ..harness.options import Options
from ..harness.ranks import Ranks, chosen_ranks
from ..harness.run import Run
from ..harness.values import Row
from ..report.section import Section, show
from ..traces import parts as traces
from ..training.arithmetic import check_dtype, param_bytes
from ..training.device_time import NUM_STEPS as NUM_ON_DEVICE
from ..training.frameworks import FRAMEWORKS, measure_both
from ..training.measure import PEERS, StrategySpec, TrainingSetup
from .section import section

MODEL, QUICK_MODEL = "byte", "byte_shallow"
DDP_CAP_MB, SMALL_CAP_MB = 25.0, 4.0
NAMES = (*OURS, *(name for names in PEERS.values() for name in names))
# Float32 Adam: a weight whose gradient is near 0 takes steps of 1e-3 whose sign the rounding decides. Over 12 steps
# some of 2.2 million weights were seen apart by up to 4e-4; a gradient of the wrong ranks moves them by 1e-2. Adam
# cannot see a gradient that is only too large: METRIC_TOLERANCE of training/steps.py, on the norms, does. Random tokens
# leave most embedding rows gradients of the size of their rounding, which Adam turns into steps of full size: there is
# no bound on weights, and losses and norms of all rounds were seen within 2e-5 of single-process training's.
TOLERANCE = 1e-3
NUM_WARMUP, NUM_STEPS, NUM_QUICK, BATCH_SIZE, NUM_RANKS = 2, 10, 4, 8, 2
# What fills a GPU; rounds are short there.
GPU_MODEL, GPU_BATCH_SIZE, GPU_STEPS, GPU_QUICK, GPU_IN_A_ROW = "seed_xl", 16, 30, 12, 10
_BUCKETED_PEERS = ("DistributedDataParallel", "torch.compile", "ZeroRedundancyOptimizer")


def describe(options: Options, names: Sequence[str] | None = None) -> tuple[TrainingSetup, str]:
    """Describes the comparison.

    Args:
        options: Ranks (2, or all GPUs), steps (10, or 4 in the short form; on GPUs 30 or 12), the batch size (8, or 16
            for each GPU), a model (byte, or byte_shallow in the short form; seed_xl on GPUs), text for a model of bytes
            (the standard library's sources), the arithmetic (f32), and strategies.
        names: Strategies and peers if the options name none; if None all, but torch.compile on GPUs alone, since it
            compiles for minutes on CPUs.

    Raises:
        ValueError: If a name is unknown, the data does not serve, the batch cannot be split, or what is trained side by
            side does not fit into memory.
    """
    setup, described = make_sized_setup(options, default_model(options), BATCH_SIZE, NUM_STEPS, NUM_QUICK)
    on_gpus = setup.ranks.kind == "gpus"
    names = names or [name for name in NAMES if on_gpus or name != "torch.compile"]
    names = tuple(dict.fromkeys(options.strategies or names))
    specs = tuple(spec_of(name, setup.model) for name in names)
    num_in_a_row = options.in_a_row or (GPU_IN_A_ROW if on_gpus else 0)
    setup = replace(setup, strategies=specs, num_in_a_row=num_in_a_row, with_traces=options.profile)
    return in_turns(setup), f"{described}; {', '.join(names)}"


def make_sized_setup(
    options: Options, model: str, batch_size: int, num_steps: int, num_quick: int
) -> tuple[TrainingSetup, str]:
    """Makes a setup of what the options ask for, and where they do not, of what fills the ranks.

    On GPUs these are the ``GPU_`` values, with a batch of so many for each; on CPUs those that are given, of which
    ``num_quick`` are the steps of the short form.

    Raises:
        ValueError: As ``make_setup`` and ``chosen_ranks``.
    """
    ranks = chosen_ranks(options.ranks, NUM_RANKS, options.on, batch_size=options.batch_size or 0)
    if on_gpus := ranks.kind == "gpus":
        model, batch_size, num_steps, num_quick = GPU_MODEL, GPU_BATCH_SIZE * ranks.num, GPU_STEPS, GPU_QUICK
    setup, described = make_setup(
        options.model or model, ranks, options.steps or (num_quick if options.quick else num_steps),
        options.batch_size or batch_size, data=options.data, dtype=options.dtype or "f32",
        num_warmup=1 if options.quick and not on_gpus else NUM_WARMUP,
    )  # fmt: skip
    return replace(setup, num_on_device=NUM_ON_DEVICE if on_gpus else 0), described


def default_model(options: Options) -> str:
    """The model if the options name none: one of half the blocks in the short form, which mostly compiles."""
    return QUICK_MODEL if options.quick else MODEL


def spec_of(name: str, model: str) -> StrategySpec:
    """A strategy or peer with DDP's bucket cap, or a smaller one where that would hold all gradients of the model.

    Raises:
        ValueError: If the name is unknown.
    """
    if name not in NAMES:
        raise ValueError(f"unknown strategy {name!r}: one of {', '.join(NAMES)}")
    cap = DDP_CAP_MB if SIZES[model].num_params * 4 > DDP_CAP_MB * 2**20 else SMALL_CAP_MB
    return StrategySpec(name, cap if is_bucketed(name) or name in _BUCKETED_PEERS else None)


def make_setup(
    model: str,
    ranks: Ranks,
    num_steps: int,
    batch_size: int,
    *,
    data: str | None = None,
    num_warmup: int = NUM_WARMUP,
    dtype: str = "f32",
) -> tuple[TrainingSetup, str]:
    """Makes a setup without strategies: bytes of text for the model of bytes, random tokens for others.

    ``num_steps`` are timed rounds, and ``data`` is a file or folder of text.

    Raises:
        ValueError: If the model is unknown, the data does not serve, the batch cannot be split, or ranks of the kind
            cannot compute so.
    """
    if model not in SIZES:
        raise ValueError(f"unknown model {model!r}: one of {', '.join(SIZES)}")
    check_batch_size(batch_size, ranks.num)
    check_dtype(dtype, ranks.kind)
    vocab, context = SIZES[model].vocab, SIZES[model].context
    if data is not None and vocab != 256:
        raise ValueError(f"data (={data}) must come with a model of bytes, such as {MODEL!r}, not {model!r}")
    reads_text = vocab == 256
    source: Corpus | RandomTokens = Corpus(data, context=context) if reads_text else RandomTokens(vocab, context)
    batches = tuple(source.batch(step, batch_size) for step in range(num_warmup + num_steps))
    setup = TrainingSetup(
        model, (), ranks, batches, num_warmup, tolerance=TOLERANCE if reads_text and dtype == "f32" else None,
        must_learn=reads_text, dtype=dtype,
    )  # fmt: skip
    described = (
        f"{model} language model on {source.source}: {num_warmup} + {num_steps} steps of {batch_size} x {context}"
        f" tokens, {dtype}, AdamW, {ranks.in_words}"
    )
    return setup, described


def check_memory(setup: TrainingSetup) -> None:
    """Raises ValueError, in a line, if the training runs that a setup keeps side by side would not fit into memory."""
    num_runs, needed = max(_needed(setup, framework) for framework in PEERS)
    if needed > (free := free_bytes(setup.ranks.kind)):
        raise ValueError(
            f"model (={setup.model}) must fit into memory: {num_runs} training runs side by side on {setup.ranks.num}"
            f" ranks need at least {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
        )


def in_turns(setup: TrainingSetup) -> TrainingSetup:
    """Lets the frameworks of a setup take turns where both fit into memory at once, and may share a GPU.

    Raises ValueError if the setup would not fit at all.
    """
    check_memory(setup)
    fits = sum(_needed(setup, framework)[1] for framework in PEERS) <= free_bytes(setup.ranks.kind)
    shares = setup.ranks.kind != "gpus" or all(gpu.compute_mode == "Default" for gpu in gpus())
    return replace(setup, takes_turns=fits and shares)


def _needed(setup: TrainingSetup, framework: str) -> tuple[int, int]:
    """Training runs that a framework keeps side by side, and their bytes: on a GPU, or on this host's CPUs."""
    num_runs = 1 + len(setup.of(framework)) * (1 + setup.with_baselines)
    # Parameters and AdamW's two moments of each; the gradients of one.
    needed = SIZES[setup.model].num_params * param_bytes(setup.dtype) * (3 * num_runs + 1)
    on_cpus = setup.ranks.kind != "gpus"
    return num_runs, setup.ranks.num_on_host * (needed + PROCESS_BYTES) if on_cpus else needed


def check_batch_size(batch_size: int, num_ranks: int) -> None:
    """Raises ValueError if a batch cannot be split over the ranks."""
    if batch_size % num_ranks:
        raise ValueError(f"batch_size (={batch_size}) must be divisible by the number of ranks (={num_ranks})")


def run(this: Run, setup: TrainingSetup, section: Callable[[Sequence[Row]], Section] = section) -> bool:
    """Runs a setup in both frameworks, prints its table and fills its folder."""
    measure_both(this, dict.fromkeys(FRAMEWORKS, setup))
    if setup.with_traces:
        traces.record(this, setup)
    return show(this, section(this.rows))
