"""The error of both packages if ranks hold different values of what should be the same. No framework is imported."""


class ReplicaError(RuntimeError):
    """Ranks hold different values of what should be the same."""

    name: str  # of the first tensor that differs, such as "params.w"
    ranks: tuple[int, ...]  # those that do not hold what most ranks hold
    num_more: int  # how many more tensors differ
    step: int  # after which they were compared

    def __init__(self, name: str, ranks: tuple[int, ...], num_more: int, step: int) -> None:
        super().__init__(name, ranks, num_more, step)  # so that it can be pickled
        self.name, self.ranks, self.num_more, self.step = name, ranks, num_more, step

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks[:8])) + ", ..." * (len(self.ranks) > 8)
        more = f", as do {self.num_more} more" * (self.num_more > 0)
        return (
            f"{self.name} of rank{'s' * (len(self.ranks) > 1)} {ranks} differs from what most ranks hold after step "
            f"{self.step}{more}: a device or its memory may be faulty"
        )
