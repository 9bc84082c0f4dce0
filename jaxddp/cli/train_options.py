"""The options of a training run, which ``torchref`` shares, checked without a framework."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from ..sizes import SIZES, TransformerConfig

DEFAULT_SIMULATED_DEVICES = 4
OPTIMIZERS = ("adamw", "adam", "sgd")
NUM_BYTE_VALUES = 256
NONFINITE = ("raise", "skip", "stop")
_CHOICES = {
    "nonfinite": NONFINITE,
    "replicas": ("stop", "restore"),
    "failed_save": ("stop", "continue"),
    "compute_dtype": ("bfloat16", "float16", "float32"),
}


@dataclass(frozen=True)
class TrainOptions:
    """What to train and how: the command line's options, with the same names and defaults.

    Raises:
        ValueError: If a number is out of range, or the optimizer is unknown.
    """

    strategy: str = "bucketed"
    devices: int | None = None
    simulate: bool = False
    steps: int = 200
    data: str | None = None
    model: str = "byte"
    weights: str | None = None
    bucket_mb: float | None = None
    compression: str = "none"
    compute_dtype: str | None = None
    batch_size: int = 32
    microbatches: int = 1
    learning_rate: float = 1e-3
    optimizer: str = "adamw"
    max_grad_norm: float | None = None
    seed: int = 0
    eval_every: int = 50
    eval_batches: int = 4
    checkpoint: str | None = None
    checkpoint_every: int = 50
    keep: int = 3
    resume: bool = False
    allow_changes: bool = False
    nonfinite: str = "raise"
    max_skips: int = 10
    check_replicas_every: int = 100
    replicas: str = "stop"
    failed_save: str = "stop"
    stuck_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("devices", "steps", "batch_size", "microbatches", "eval_batches", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} (={value}) must be a positive integer")
        for name, rarely in (
            ("eval_every", "evaluates at the end only"),
            ("checkpoint_every", "saves at the end only"),
            ("check_replicas_every", "checks before saving only"),
        ):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} (={value}) must not be negative; 0 {rarely}")
        if self.max_skips < 0:
            raise ValueError(f"max_skips (={self.max_skips}) must not be negative")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) is not None and value not in choices:
                raise ValueError(f"{name} (={value!r}) must be one of {', '.join(choices)}")
        if not 0 < self.stuck_s < math.inf:
            raise ValueError(f"stuck_s (={self.stuck_s}) must be a positive finite number")
        if self.replicas == "restore" and self.checkpoint is None:
            raise ValueError(f"replicas (={self.replicas!r}) must come with checkpoint, the folder to restore from")
        if self.allow_changes and not self.resume:
            raise ValueError(f"allow_changes (={self.allow_changes}) must come with resume")
        if self.resume and self.checkpoint is None:
            raise ValueError(f"resume (={self.resume}) must come with checkpoint, the folder to go on from")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed (={self.seed}) must be at least 0 and below 2^31")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate (={self.learning_rate}) must be a positive finite number")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm (={self.max_grad_norm}) must be positive")
        if self.compute_dtype == "float16" and self.nonfinite != "skip":
            raise ValueError(f"nonfinite (={self.nonfinite!r}) must be 'skip' in float16, which overflows now and then")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}: one of {', '.join(OPTIMIZERS)}")
        if self.devices is not None:
            self.check_batch_size(self.devices)

    def check_batch_size(self, num_ranks: int) -> None:
        """Checks that the batch divides evenly.

        Raises:
            ValueError: If ``batch_size`` is not divisible by ``num_ranks x microbatches``.
        """
        if self.batch_size % (num_ranks * self.microbatches):
            raise ValueError(
                f"batch_size (={self.batch_size}) must be divisible by devices x microbatches "
                f"(={num_ranks} x {self.microbatches})"
            )

    def fingerprint(self) -> dict[str, Any]:
        """The options that must be alike in all processes of a run: all but paths, which hosts may name otherwise."""
        return {name: value for name, value in asdict(self).items() if name not in ("data", "weights", "checkpoint")}

    @property
    def config(self) -> TransformerConfig:
        """The model's sizes.

        Raises:
            ValueError: If no model of that name reads bytes.
        """
        readable = [name for name, config in SIZES.items() if config.vocab >= NUM_BYTE_VALUES]
        if self.model not in SIZES:
            raise ValueError(f"unknown model {self.model!r}: one of {', '.join(readable)}")
        if self.model not in readable:
            raise ValueError(
                f"model {self.model!r} has a vocabulary of {SIZES[self.model].vocab}, too small for bytes "
                f"(={NUM_BYTE_VALUES} values): one of {', '.join(readable)}"
            )
        return SIZES[self.model]
