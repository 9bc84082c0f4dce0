"""Which gradients are reduced together, in which order, and who owns whole parameters. Both packages use this file.

Tensors come in the order in which the backward finishes their gradients; buckets close as they fill; a tensor is never
split; a bucket holds one dtype.

References:
    Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020 (section 4.2).
    Graham, Bounds on Multiprocessing Timing Anomalies, SIAM Journal on Applied Mathematics 1969 (``assign_owners``).
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

MIB = 2**20
DEFAULT_BUCKET_MB = 25.0
DEFAULT_FIRST_BUCKET_MB = 1.0
DEFAULT_SHARE = 1 / 8  # of all bytes, the largest cap: 11 calls of a large model, DDP's make 34 (seed_xl) to 243 (xl)
DEFAULT_GROWTH = 4  # of caps until there: the network is not idle while the first of the large buckets fills

BucketMb = float | Sequence[float] | Literal["default"] | None
Rule = Literal["before", "torch"]


class TensorSpec(NamedTuple):
    """Name, shape and dtype of one tensor, such as ``TensorSpec("layers.0.kernel", (256, 1024), "float32")``."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return self.num_elements * dtype_bytes(self.dtype)


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype whose gradients share one buffer, in buffer order."""

    tensors: tuple[TensorSpec, ...]

    @property
    def dtype(self) -> str:
        """Dtype of the buffer."""
        return self.tensors[0].dtype

    @property
    def num_elements(self) -> int:
        """Length of the buffer."""
        return sum(tensor.num_elements for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True)
class BucketPlan:
    """What a step should communicate."""

    buckets: tuple[Bucket, ...]  # in launch order
    after_backward: bool = False  # whether all wait for the last gradient; else each starts when its own are ready
    # Names of tensors with a constant gradient, such as the zeros of an unused parameter: no reduction is needed.
    constants: tuple[str, ...] = ()
    gathers: tuple[Bucket, ...] = ()  # in which updated parameters are gathered, where they are updated by shards
    kind: str = "all-reduce"  # or "reduce-scatter": the collective by which a bucket is summed
    each_microbatch: bool = False  # whether each one's gradients are reduced; else they are added up and reduced once

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in communication order."""
        return tuple(tensor.name for bucket in self.buckets for tensor in bucket.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(bucket.num_bytes for bucket in self.buckets)


def plan_buckets(
    tensors: Iterable[TensorSpec],
    bucket_mb: BucketMb = "default",
    *,
    rule: Rule = "before",
    after_backward: bool = False,
) -> BucketPlan:
    """Groups tensors into buckets of at most ``bucket_mb`` MiB; a ValueError if a cap is not positive and finite.

    A larger tensor gets its own bucket, each dtype fills its own, and tensors without elements are left out. Buckets
    are launched in the order in which their last tensor is ready.

    Args:
        tensors: In the order in which their gradients become ready.
        bucket_mb: Cap in MiB; a list of caps for the first, second, ... bucket, the last of which repeats; None for
            one bucket; ``"default"`` for PyTorch's 25 MiB after a first bucket of 1 MiB.
        rule: ``"before"`` closes a bucket before a tensor would exceed the cap; ``"torch"`` after it has reached it.
        after_backward: Recorded in the plan.

    Example:
        >>> tensors = [TensorSpec(name, (256, 1024), "float32") for name in "dcba"]  # 1 MiB each
        >>> [[t.name for t in bucket.tensors] for bucket in plan_buckets(tensors, [1, 3]).buckets]
        [['d'], ['c', 'b', 'a']]
    """
    if rule not in ("before", "torch"):
        raise ValueError(f"rule (={rule!r}) must be 'before' or 'torch'")
    caps = _caps_bytes(bucket_mb)
    opened: dict[str, tuple[int, int]] = {}  # number of a dtype's open bucket, and the bytes in it
    buckets: dict[tuple[str, int], list[TensorSpec]] = {}  # by dtype and number
    for tensor in tensors:
        dtype, size = tensor.dtype, tensor.num_bytes
        if not size:
            continue
        number, held = opened.get(dtype, (0, 0))
        cap = caps[min(number, len(caps) - 1)]
        if rule == "before" and 0 < held and held + size > cap:
            number, held = number + 1, 0
        bucket = buckets.pop((dtype, number), [])
        bucket.append(tensor)
        buckets[dtype, number] = bucket  # at the end of the dictionary: buckets are in the order of their last tensors
        held += size
        if rule == "torch" and held >= cap:
            number, held = number + 1, 0
        opened[dtype] = number, held
    return BucketPlan(tuple(map(Bucket, map(tuple, buckets.values()))), after_backward)


def plan_all_reduces(
    tensors: Iterable[TensorSpec], bucket_mb: BucketMb = "default", *, rule: Rule = "before"
) -> BucketPlan:
    """``plan_buckets`` with default caps that grow with the model, for ``bucketed``.

    They are PyTorch's 1 and 25 MiB for the first two buckets, and then four times the one before, up to an eighth of
    all gradients' bytes or 25 MiB; PyTorch's with ``rule="torch"``. ZeRO copies its buckets, so it keeps small ones.
    """
    tensors = list(tensors)
    if bucket_mb == "default" and rule == "before":
        share_mb = sum(one.num_bytes for one in tensors) * DEFAULT_SHARE / MIB
        bucket_mb = [DEFAULT_FIRST_BUCKET_MB, DEFAULT_BUCKET_MB]
        while bucket_mb[-1] < share_mb:
            bucket_mb.append(min(bucket_mb[-1] * DEFAULT_GROWTH, share_mb))
    return plan_buckets(tensors, bucket_mb, rule=rule)


def plan_per_tensor(tensors: Iterable[TensorSpec], *, after_backward: bool = False) -> BucketPlan:
    """Plans one bucket per tensor, in the given order; raises as ``plan_buckets``."""
    return plan_buckets(tensors, 1 / MIB, after_backward=after_backward)  # no tensor has less than a byte


def dtype_bytes(dtype: str) -> int:
    """Bytes per element of a dtype, from its name, which must hold a width, such as ``"float8_e4m3fn"``."""
    if dtype == "bool":
        return 1
    width = re.search(r"\d+", dtype)
    if width is None:
        raise ValueError(f"dtype (={dtype!r}) must be a name with a width, like 'float32'")
    return max(1, int(width.group()) // 8)


def chunk_elements(num_elements: int, num_ranks: int) -> int:
    """Elements of one rank's chunk of a tensor of n, which is padded to N chunks of ceil(n / N)."""
    return -(-num_elements // num_ranks)


def length_of_chunk(shape: Sequence[int], num_ranks: int) -> int:
    """The length of the equal parts of dimension 0, one a rank."""
    if not shape:
        raise ValueError(f"shape (={tuple(shape)}) must have a dimension 0 to cut or join along")
    if shape[0] % num_ranks:
        raise ValueError(f"dimension 0 (={shape[0]}) must be divisible by num_ranks (={num_ranks})")
    return shape[0] // num_ranks


def tpu_width(width: int) -> int:
    """Elements of a rank's row as XLA's collectives for TPUs take it: in tiles of 8 x 128.

    Of more than some 1,900 tiles a rank XLA makes an all-reduce, unless a power of two divides them into pieces of no
    more. So their number is rounded up to a multiple of one, by 0.2 % at most.

    Example:
        >>> tpu_width(1000), tpu_width(7425 * 1024) // 1024
        (1024, 7432)
    """
    tiles, step = -(-width // 1024), 1
    while tiles > 1024 * step:
        step *= 2
    return -(-tiles // step) * step * 1024


def bucket_width(bucket: Bucket, num_ranks: int) -> int:
    """Length of a row of a bucket's ``[num_ranks, width]`` buffer: the sum of its tensors' chunks."""
    return sum(chunk_elements(tensor.num_elements, num_ranks) for tensor in bucket.tensors)


def assign_owners(costs: Sequence[tuple[int, ...]], loads: Sequence[tuple[int, ...]]) -> list[int]:
    """Assigns whole parameters to ranks: the largest first, each to the rank that has least so far.

    The fullest rank then has at most 1/N of everything plus the largest parameter. Of several numbers in ``costs``, one
    for each parameter, the others decide ties. ``loads`` are what each rank has already.
    """
    totals, owners = list(loads), [0] * len(costs)
    for place in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # stable: equal ones keep their order
        owner = owners[place] = min(range(len(totals)), key=totals.__getitem__)
        totals[owner] = tuple(map(sum, zip(totals[owner], costs[place], strict=True)))
    return owners


def _caps_bytes(bucket_mb: BucketMb) -> list[float]:
    if bucket_mb is None:
        return [math.inf]
    if bucket_mb == "default":
        return [DEFAULT_FIRST_BUCKET_MB * MIB, DEFAULT_BUCKET_MB * MIB]
    caps = [*bucket_mb] if isinstance(bucket_mb, Sequence) else [bucket_mb]
    if not caps or not all(isinstance(cap, int | float) and 0 < cap < math.inf for cap in caps):
        raise ValueError(f"bucket_mb (={bucket_mb!r}) must be a positive number of MiB, a list of them, or None")
    return [cap * MIB for cap in caps]
