"""The question that a plan answers: which model, on which devices, used in which way.

The devices are R replicas of X Y ranks: Y cut each matrix (tensor parallelism), X share the training state by the given
ZeRO stage and work on different tokens, as the replicas do. Stage 3 gathers parameters (FSDP); the others sum gradients
in the backward as data parallelism does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .cost.checks import check_choice, check_count
from .cost.memory import FP32, STAGES, PerParameter
from .cost.scaling import Assumptions
from .cost.workload import Workload
from .machine import Cluster


@dataclass(frozen=True)
class Job:
    """What is to be planned.

    Attributes:
        workload: The model.
        cluster: The machine.
        fsdp: X.
        tp: Y.
        tokens: B; the least compute-bound batch when None.
        sequence_length: Tokens that cannot be parted: those of a sequence, 1 where there are none.
        stage: What the X ranks share: 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also parameters.
        per_parameter: Bytes of the training state.
        assumptions: Of the compute-bound conditions.
        accumulation_steps: K; the fewest that fit when None.
        num_gathered_units: Units whose parameters are there at once at stage 3: the one in use and those fetched ahead.

    Raises:
        ValueError: If a number is out of range, the ranks do not divide the devices, or the tokens are no whole
            sequences on each data rank, as many in each micro-batch.
    """

    workload: Workload
    cluster: Cluster
    fsdp: int
    tp: int = 1
    tokens: int | None = None
    sequence_length: int = 1
    stage: int = 3
    per_parameter: PerParameter = FP32
    assumptions: Assumptions = field(default_factory=Assumptions)
    accumulation_steps: int | None = None
    num_gathered_units: int = 2

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_count(fsdp=self.fsdp, tp=self.tp, sequence_length=self.sequence_length)
        check_count(num_gathered_units=self.num_gathered_units)
        check_choice(STAGES, stage=self.stage)
        if self.accumulation_steps is not None:
            check_count(accumulation_steps=self.accumulation_steps)
        if self.cluster.num_devices % (self.fsdp * self.tp):
            raise ValueError(
                f"fsdp x tp (={self.fsdp} x {self.tp}) must divide the {self.cluster.num_devices} devices of "
                f"{self.cluster.name}"
            )
        if self.tokens is not None:
            check_count(tokens=self.tokens)
            pieces = self.least_tokens * (self.accumulation_steps or 1)
            if self.tokens < pieces or (self.sequence_length > 1 and self.tokens % pieces):
                rule = "at least" if self.sequence_length == 1 else "a multiple of"
                raise ValueError(
                    f"tokens (={self.tokens}) must be {rule} sequence length x data ranks x accumulation steps "
                    f"(={self.sequence_length} x {self.num_data_ranks} x {self.accumulation_steps or 1})"
                )

    @property
    def dp(self) -> int:
        """R."""
        return self.cluster.num_devices // (self.fsdp * self.tp)

    @property
    def num_data_ranks(self) -> int:
        """X R, the groups that work on different tokens."""
        return self.fsdp * self.dp

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered for every micro-batch."""
        return self.stage == 3 and self.fsdp > 1

    @property
    def ranks(self) -> tuple[int, int, int]:
        """Sizes of the groups that gather parameters, cut matrices and sum gradients."""
        return (self.fsdp, self.tp, self.dp) if self.gathers else (1, self.tp, self.num_data_ranks)

    @property
    def least_tokens(self) -> int:
        """Of a step in which each data rank works on one sequence."""
        return self.num_data_ranks * self.sequence_length
