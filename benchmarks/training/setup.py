"""A training run under several strategies: what is trained, on which ranks, and whether it fits into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxddp import STRATEGIES
from jaxddp.models import SIZES
from jaxddp.registry import is_bucketed
from jaxddp.training.data import Batch, Corpus

from ..benchmark import Options
from ..ranks import FRAMEWORKS, PROCESS_BYTES, Ranks, choose_ranks, free_bytes

SILENT = " without communication"  # of the label of a step whose communication is removed
# What each framework does by itself.
PEERS = {
    "jaxddp": ("jit",),
    "torchref": ("DistributedDataParallel", "torch.compile", "ZeroRedundancyOptimizer", "fully_shard"),
}
NAMES = (*STRATEGIES, *PEERS["jaxddp"], *PEERS["torchref"])
OPTIONS = ("quick", "ranks", "on", "hosts", "rate_mbit", "steps", "batch_size", "model", "dtype")
DTYPES = ("f32", "tf32", "bf16")
BYTE_MODEL, QUICK_MODEL, GPU_MODEL = "byte", "byte_shallow", "seed_xl"
GPU_SEQUENCES, GPU_STEPS, GPU_QUICK_STEPS = 16, 30, 12  # a batch that fills a GPU; rounds are short there
DDP_CAP_MB, SMALL_CAP_MB = 25.0, 4.0
# Float32 Adam: a weight whose gradient is near 0 takes steps of 1e-3 whose sign the rounding decides. Over 12 steps
# some of 2.2 million weights were seen apart by up to 4e-4; a gradient of the wrong ranks moves them by 1e-2. Adam
# cannot see a gradient that is only too large: the tolerance of gradient norms does.
LEARNING_RATE, TOLERANCE = 1e-3, 1e-3
# Of random tokens, Adam makes steps of full size of roundings too, so there is no bound on single weights. At 1e-3
# seed_xl is chaotic: noise of 1e-7 in the gradients led its gradient norms apart by 150 % within 32 steps on a CPU, and
# on an H200, where XLA adds up an embedding's gradients in no fixed order, norms were apart by factors of 4 and more.
# At 1e-4 that noise leads them apart by 2e-6.
RANDOM_LEARNING_RATE = 1e-4
JAX_SHARE = 0.75  # of a GPU that JAX takes at most, unless XLA_PYTHON_CLIENT_MEM_FRACTION says so
_CONTEXT_BYTES = int(1.5 * 2**30)  # of a process on a GPU: CUDA's, NCCL's buffers and the libraries' kernels
Metrics = list[tuple[float, float]]  # loss and gradient norm of every round


class StrategySpec(NamedTuple):
    """A strategy as a row of a table: its name in both registries or among ``PEERS``, and its bucket cap."""

    name: str
    bucket_mb: float | None = None

    @property
    def label(self) -> str:
        """For tables."""
        return self.name if self.bucket_mb is None else f"{self.name} {self.bucket_mb:g} MiB"

    @property
    def options(self) -> dict[str, Any]:
        """Those of its factory."""
        return {} if self.bucket_mb is None else {"bucket_mb": self.bucket_mb}


class Run(NamedTuple):
    """A strategy's own copy of the training run, on each rank."""

    step: Callable[[int], tuple[float, float]]  # of a round: loss and gradient norm, once all of it is done
    weights: Callable[[], dict[str, np.ndarray]]  # whole, in float32, by the names of torch; every rank must ask
    planned: list[tuple[str, int]] | None = None  # ``(kind, bytes)`` of the planned collectives; None of a peer
    found: list[tuple[str, int]] | None = None  # those of the compiled program, or that torch's first step issued


@dataclass(frozen=True)
class TrainingSetup:
    """One training run, repeated under several strategies side by side; plain data, sent to the rank processes."""

    model: str  # a name that both packages' ``models.build`` know
    strategies: dict[str, tuple[StrategySpec, ...]]  # by framework
    ranks: Ranks
    batches: tuple[Batch, ...]  # global ones, one for each round; warm-up rounds come first and are not timed
    num_warmup: int = 2
    tolerance: float | None = None  # of any weight, to single-process training; None: of no single one
    must_learn: bool = False  # whether the loss has to fall; random tokens teach nothing
    dtype: str = "f32"  # or "tf32", products of float32 in TF32, or "bf16", all in bfloat16; in both frameworks
    learning_rate: float = LEARNING_RATE  # of AdamW, with weight decay 0.01
    with_baselines: bool = True  # whether each strategy also runs with its communication removed

    @property
    def frameworks(self) -> tuple[str, ...]:
        """Those that have something to run."""
        return tuple(one for one in FRAMEWORKS if self.strategies.get(one))

    @property
    def global_batch(self) -> int:
        """Examples of a batch over all ranks."""
        return len(next(iter(self.batches[0].values())))

    def baselines(self, framework: str) -> list[StrategySpec]:
        """The strategies that also run without communication: none on one rank, which has none; of peers one can."""
        able = (*STRATEGIES, "DistributedDataParallel") if self.with_baselines and self.ranks.num > 1 else ()
        return [one for one in self.strategies[framework] if one.name in able]

    @property
    def num_runs(self) -> int:
        """Training runs side by side: in each framework single-process training is one of them."""
        return sum(1 + len(self.strategies[one]) + len(self.baselines(one)) for one in self.frameworks)

    @property
    def needed_bytes(self) -> int:
        """Bytes that the runs need: of each GPU or rank of a job, or of all ranks together on CPUs."""
        copies = 4 * self.num_runs  # parameters, two moments and gradients
        held = copies * SIZES[self.model].num_params * (2 if self.dtype == "bf16" else 4)
        if self.ranks.kind == "gpus":
            return held + _CONTEXT_BYTES
        return (held + PROCESS_BYTES) * (1 if self.ranks.is_job else self.ranks.num)

    def groups(self) -> list[TrainingSetup]:
        """The parts that share processes and rounds: all, if both frameworks fit; a ValueError if one does not."""
        free = free_bytes(self.ranks.kind)
        if self.ranks.kind != "simulated" and self.needed_bytes <= free:
            return [self]
        # torch compiles nothing, so its rows come first
        parts = [replace(self, strategies={one: self.strategies[one]}) for one in reversed(self.frameworks)]
        for part in parts:
            most = int(free * JAX_SHARE) if self.ranks.kind == "gpus" and "jaxddp" in part.frameworks else free
            if (needed := part.needed_bytes) > most:
                raise ValueError(
                    f"model (={self.model}) must fit into memory: {part.num_runs} training runs side by side"
                    f" need {needed / 2**30:.1f} GiB, {most / 2**30:.1f} are free; name fewer strategies"
                )
        return parts


def check_batch(batch_size: int, num_ranks: int) -> None:
    """Raises ValueError if a batch cannot be split evenly."""
    if batch_size % num_ranks:
        raise ValueError(f"batch_size (={batch_size}) must be divisible by the number of ranks (={num_ranks})")


def spec_of(name: str, model: str) -> StrategySpec:
    """A strategy or peer with DDP's bucket cap, or a smaller one where that would hold all gradients of the model."""
    large = SIZES[model].num_params * 4 > DDP_CAP_MB * 2**20
    has_cap = name in PEERS["torchref"][:3] or is_bucketed(name)
    return StrategySpec(name, (DDP_CAP_MB if large else SMALL_CAP_MB) if has_cap else None)


def strategies_of(
    names: Iterable[str], model: str, caps_mb: Iterable[float] | None = None
) -> dict[str, tuple[StrategySpec, ...]]:
    """Strategies and peers by framework, with each of the caps where they take one: a peer runs in its own."""
    specs = [spec_of(name, model) for name in dict.fromkeys(names)]
    if caps_mb is not None:
        caps = sorted(set(caps_mb))
        specs = [one._replace(bucket_mb=cap) for one in specs for cap in (caps if one.bucket_mb else [None])]
    others = {"jaxddp": PEERS["torchref"], "torchref": PEERS["jaxddp"]}
    return {one: tuple(spec for spec in specs if spec.name not in others[one]) for one in FRAMEWORKS}


def make_setup(
    options: Options, *, model: str, batch_size: int, num_steps: int, num_warmup: int = 2, ranks: Ranks | None = None
) -> TrainingSetup:
    """Makes a setup without strategies of what the options ask for, and of defaults where they do not."""
    ranks = ranks or choose_ranks(options.ranks, options.on, default=2)
    if on_gpus := ranks.kind == "gpus":
        model, batch_size, num_warmup = GPU_MODEL, GPU_SEQUENCES * ranks.num, 2
        num_steps = GPU_QUICK_STEPS if options.quick else GPU_STEPS
    model, num_steps, dtype = options.model or model, options.steps or num_steps, options.dtype or "f32"
    batch_size = options.batch_size or -(-batch_size // ranks.num) * ranks.num
    check_batch(batch_size, ranks.num)
    if dtype == "tf32" and not on_gpus:
        raise ValueError(f"dtype (={dtype}) must be f32 or bf16 on CPUs: TF32 is an arithmetic of GPUs")
    vocab, context = SIZES[model].vocab, SIZES[model].context
    reads_text = vocab == 256
    batch_of = Corpus(context=context).batch if reads_text else partial(_random_tokens, vocab, context)
    batches = tuple(batch_of(step, batch_size) for step in range(num_warmup + num_steps))
    tolerance = TOLERANCE if reads_text and dtype == "f32" else None
    return TrainingSetup(
        model, {}, ranks, batches, num_warmup, tolerance, must_learn=reads_text, dtype=dtype,
        learning_rate=LEARNING_RATE if reads_text else RANDOM_LEARNING_RATE,
    )  # fmt: skip


def _random_tokens(vocab: int, context: int, step: int, batch_size: int) -> Batch:
    tokens = np.random.default_rng([0, step]).integers(0, vocab, (batch_size, context + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def in_words(setup: TrainingSetup) -> str:
    """A setup in a line."""
    rounds = f"{setup.num_warmup} + {len(setup.batches) - setup.num_warmup} rounds of {setup.global_batch} sequences"
    arithmetic = {"f32": "true float32", "tf32": "float32 with products in TF32", "bf16": "bfloat16"}[setup.dtype]
    return f"{setup.model}, {rounds}, AdamW, {arithmetic}, {setup.ranks.num} ranks"
