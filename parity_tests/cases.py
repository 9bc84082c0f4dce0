"""The table of cases: what is trained, how, on how many ranks, and how closely the weights must agree.

All parity tests take their cases from here, so a new strategy, optimizer or model is one line. Rank processes import
this file, so it imports no JAX.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from torchref.models.toy_test import TiedToy

NUM_STEPS = 20
GLOBAL_BATCH = 72  # divisible by every number of ranks below, with 1 and with 3 micro-batches
# One table of values for both packages: optax computes schedules in float32, torch in float64.
LEARNING_RATES = tuple(2e-3 * (1 - step / NUM_STEPS) for step in range(NUM_STEPS))
MAX_GRAD_NORM = 0.05  # clips every step of every model


class StrategyCase(NamedTuple):
    """A strategy and its options, which both packages spell alike where both have them."""

    name: str  # in jaxddp.STRATEGIES and torchref.STRATEGIES
    options: dict[str, Any] = {}
    jax_only: dict[str, Any] = {}
    torch_only: dict[str, Any] = {}

    @property
    def jax_options(self) -> dict[str, Any]:
        """Options for ``jaxddp.make_strategy``."""
        return self.options | self.jax_only

    @property
    def torch_options(self) -> dict[str, Any]:
        """Options for ``torchref.make_strategy``."""
        return self.options | self.torch_only


class Case(NamedTuple):
    """One run in each package and on one process of each framework; all must end with the same weights."""

    strategy: str
    optimizer: str
    num_ranks: int
    model: str
    dtype: str
    num_microbatches: int = 1
    max_grad_norm: float | None = None

    @property
    def id(self) -> str:
        """For pytest and the table."""
        extras = ["", f"-{self.num_microbatches}micro"][self.num_microbatches > 1]
        extras += ["", "-clipped"][self.max_grad_norm is not None]
        return f"{self.strategy}-{self.optimizer}-{self.num_ranks}ranks-{self.model}-{self.dtype}{extras}"


# Units of FSDP. TiedToy holds a matrix of its own and uses it only within its own forward.
_UNITS = {"shard_types": (nn.Linear, nn.Embedding, TiedToy)}

STRATEGIES = {
    "naive": StrategyCase("naive"),
    "flat": StrategyCase("flat"),
    "overlapped": StrategyCase("overlapped"),
    "bucketed(1KiB)": StrategyCase("bucketed", {"bucket_mb": 1 / 1024}),
    "bucketed(0.5KiB,4KiB)": StrategyCase("bucketed", {"bucket_mb": [0.5 / 1024, 4 / 1024]}),
    "bucketed(None)": StrategyCase("bucketed", {"bucket_mb": None}),
    "bucketed()": StrategyCase("bucketed"),
    "zero1(1KiB)": StrategyCase("zero1", {"bucket_mb": 1 / 1024}),
    "zero1()": StrategyCase("zero1"),
    "zero2(1KiB)": StrategyCase("zero2", {"bucket_mb": 1 / 1024}),
    # jaxddp shards by size: its default would keep these small parameters whole. FSDP shards by module type.
    "zero3(0)": StrategyCase("zero3", {}, {"min_shard_elements": 0}, _UNITS),
    "zero3(200)": StrategyCase("zero3", {"bucket_mb": 1 / 1024}, {"min_shard_elements": 200}, _UNITS),
}
OPTIMIZERS = ("sgd", "momentum", "adamw", "adamw_masked")
NUM_RANKS = (1, 2, 3, 4, 8)
MODELS = ("toy", "toy_tied", "toy_frozen", "toy_unused", "tiny")
DTYPES = ("float64", "float32")
AXES: Mapping[str, Sequence[Any]] = {
    "strategy": tuple(STRATEGIES),
    "optimizer": OPTIMIZERS,
    "num_ranks": NUM_RANKS,
    "model": MODELS,
    "dtype": DTYPES,
    "num_microbatches": (1, 3),
    "max_grad_norm": (None, MAX_GRAD_NORM),
}


# Pairs of values that are not in the selection: the transformer and eight ranks take long. Both meet one strategy of
# each family or nearly so, and the transformer meets two ranks.
MEET = {
    ("num_ranks", 8): ("naive", "bucketed(1KiB)", "zero1(1KiB)", "zero2(1KiB)", "zero3(200)"),
    ("model", "tiny"): ("bucketed(1KiB)", "zero2(1KiB)", "zero3(200)"),
}
LEFT_OUT = {
    (("strategy", strategy), other) for strategy in STRATEGIES for other, met in MEET.items() if strategy not in met
} | {(("num_ranks", num_ranks), ("model", "tiny")) for num_ranks in NUM_RANKS if num_ranks != 2}


def tolerance(case: Case) -> tuple[float, str]:
    """The largest difference allowed in any weight after ``NUM_STEPS`` steps, and its reason."""
    if case.dtype == "float64":
        return 1e-12, "float64: only the order of sums differs; a wrong result differs by far more"
    if case.optimizer.startswith("adamw"):
        return (1e-5, "float32 Adam: rounding of small gradients is magnified by their small moments; 2.1e-6 was seen")
    return 2e-6, "float32: order of sums, a few units in the last place of values of order 1; 4.4e-7 was seen"


def whole_product() -> list[Case]:
    """Every combination of the axes."""
    return [Case(*values) for values in itertools.product(*AXES.values())]


def reference(case: Case) -> Case:
    """What it is compared with: one device, to which strategies and micro-batches make no difference."""
    return case._replace(strategy="", num_ranks=1, num_microbatches=1)


def pairwise_selection() -> list[Case]:
    """A small selection in which every value of every axis meets every value of every other, but for ``LEFT_OUT``.

    Greedy: next comes the case with most pairs that are not covered yet, of these one whose reference is there.
    """
    bits: dict[Any, int] = {}  # of each pair of values
    candidates: dict[Case, tuple[int, Case]] = {}
    for case in whole_product():
        shown = list(itertools.combinations(zip(AXES, case, strict=True), 2))
        if LEFT_OUT.isdisjoint(shown):
            mask = sum(1 << bits.setdefault(pair, len(bits)) for pair in shown)
            candidates[case] = mask, reference(case)
    left, chosen, references = (1 << len(bits)) - 1, [], set()
    while left:
        found = {case: ((mask & left).bit_count(), wanted in references) for case, (mask, wanted) in candidates.items()}
        chosen.append(best := max(found, key=found.__getitem__))
        left &= ~candidates[best][0]
        references.add(reference(best))
    return chosen
