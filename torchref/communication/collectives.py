"""NCCL's primitives by name, over a process group: the twin of `jaxddp.communication.collectives`.

Every rank of ``group`` (None: all ranks) calls the function with its own tensor, of one shape on all ranks; roots and
pairs count ranks within the group. Each is one collective operation.

| function       | input per rank | output per rank   | returns      |
|----------------|----------------|-------------------|--------------|
| all_reduce     | [...]          | [...], in place   | None         |
| reduce_scatter | [N k, ...]     | [k, ...]          | a new tensor |
| all_gather     | [k, ...]       | [N k, ...]        | a new tensor |
| broadcast      | [...]          | [...], in place   | None         |
| reduce         | [...]          | [...], 0 off root | a new tensor |
| send_recv      | [...]          | [...]             | a new tensor |

With ``async_op=True`` a call returns at once: ``Work`` instead of None, ``(tensor, Work)`` instead of a tensor. Touch
neither buffer before ``work.wait()``. The calls are not differentiable, and all ranks must issue the same ones in the
same order.

Tensors may be empty and have any strides. A tensor that is not contiguous is sent as a contiguous copy, because Gloo
ignores strides and silently gives wrong sums. Gloo implements reduce-scatter as an all-reduce and keeps a slice: it
sends twice as much, as counted on the loopback device.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from jaxddp.arguments import check_pairs, check_root
from jaxddp.communication.buckets import length_of_chunk

_Group: TypeAlias = ProcessGroup | None

# torch 2.13 renamed these two and warns about the old names.
_dist_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_dist_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(tensor: Tensor, group: _Group = None, async_op: bool = False) -> Work | None:
    """Sums over the ranks, in place; every rank gets the whole sum."""
    _note("all-reduce", tensor)
    buffer = _dense(tensor)
    return _in_place(tensor, buffer, _start(dist.all_reduce, buffer, group=group), async_op)


def reduce_scatter(tensor: Tensor, group: _Group = None, async_op: bool = False) -> Any:
    """Sums over the ranks; rank r gets the r-th of N equal parts of the sum; a ValueError if N does not divide it."""
    length, rank = length_of_chunk(tensor.shape, dist.get_world_size(group)), dist.get_rank(group)
    _note("reduce-scatter", tensor)
    chunk = tensor.new_empty(length, *tensor.shape[1:])
    if _num_silent:
        chunk.copy_(tensor.detach()[rank * length : (rank + 1) * length])
    return _new(chunk, _start(_dist_reduce_scatter, chunk, _dense(tensor), group=group), async_op)


def all_gather(tensor: Tensor, group: _Group = None, async_op: bool = False) -> Any:
    """Concatenates the ranks' tensors along dimension 0; every rank gets the whole; a ValueError if there is none."""
    length = length_of_chunk(tensor.shape, 1)
    full = tensor.new_empty(dist.get_world_size(group) * length, *tensor.shape[1:])
    _note("all-gather", full)
    if _num_silent:
        full.view(-1, *tensor.shape).copy_(tensor.detach())
    return _new(full, _start(_dist_all_gather, full, _dense(tensor), group=group), async_op)


def broadcast(tensor: Tensor, root: int = 0, group: _Group = None, async_op: bool = False) -> Work | None:
    """Gives every rank the root's tensor, in place; a ValueError if ``root`` is no rank of the group."""
    check_root(root, dist.get_world_size(group))
    _note("broadcast", tensor)
    buffer = _dense(tensor)
    return _in_place(tensor, buffer, _start(dist.broadcast, buffer, group_src=root, group=group), async_op)


def reduce(tensor: Tensor, root: int = 0, group: _Group = None, async_op: bool = False) -> Any:
    """Sums over the ranks; the root gets the sum, the others zeros; a ValueError as ``broadcast``."""
    check_root(root, dist.get_world_size(group))
    _note("reduce", tensor)
    # The library leaves partial sums in the buffers of the other ranks, so they work on a copy of their own.
    buffer = tensor.detach().clone(memory_format=torch.contiguous_format)
    work = _start(dist.reduce, buffer, group_dst=root, group=group)
    return _new(buffer if dist.get_rank(group) == root else torch.zeros_like(buffer), work, async_op)


def send_recv(tensor: Tensor, pairs: Sequence[tuple[int, int]], group: _Group = None, async_op: bool = False) -> Any:
    """Sends along ``pairs`` (from rank, to rank) at once; every rank gets what was sent to it, else zeros.

    A pair of one rank is a copy. A ValueError if a rank is not in the group, or sends or is sent to more than once.
    """
    check_pairs(pairs, dist.get_world_size(group))
    _note("send-recv", tensor)
    rank, sent = dist.get_rank(group), _dense(tensor)
    received = torch.zeros_like(sent)
    sends, receives = [], []
    for source, target in pairs:
        if source == target == rank:
            received.copy_(sent)
        elif source == rank:
            sends.append(dist.P2POp(dist.isend, sent, group=group, group_peer=target))
        elif target == rank:
            receives.append(dist.P2POp(dist.irecv, received, group=group, group_peer=source))
    # Receives first: Gloo announces a receive on the connection that its own bytes take, so after a send the
    # announcement waits for them. An exchange of 8 MiB at 1 Gbit/s took 137 ms sends first, and takes 75.
    works = dist.batch_isend_irecv([*receives, *sends]) if receives or sends else []
    return _new(received, Pending(works), async_op)


class Pending(Work):
    """Several handles as one; the first ``wait`` then calls ``finish``."""

    def __init__(self, works: Sequence[Work], finish: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._works, self._finish = works, finish

    def wait(self, timeout: Any = None) -> bool:
        """Waits for all of them."""
        works, self._works = self._works, []  # a second wait for a send would never return
        for work in works:
            work.wait() if timeout is None else work.wait(timeout)
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True


class Issued(NamedTuple):
    """One collective that was issued on this rank."""

    kind: str  # all-reduce, reduce-scatter, all-gather, broadcast, reduce or send-recv
    num_bytes: int  # of the full buffer: the input of a reduce-scatter, the output of an all-gather


_recorders: list[list[Issued]] = []


@contextlib.contextmanager
def record() -> Iterator[list[Issued]]:
    """Lists the collectives that this rank issues through this module, from any thread; the list grows meanwhile."""
    issued: list[Issued] = []
    _recorders.append(issued)
    try:
        yield issued
    finally:
        _recorders[:] = [other for other in _recorders if other is not issued]  # not remove(): lists may be equal


_num_silent = 0  # of ``silent`` blocks; autograd's threads see it too


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Sends nothing inside: every rank takes its own part for the sum, and copies of it for the ranks' parts.

    Training is wrong. Exposed communication is the time of a step minus that of the same step without communication.
    """
    global _num_silent
    _num_silent += 1
    try:
        yield
    finally:
        _num_silent -= 1


def is_silent() -> bool:
    """Whether the caller is inside ``silent``."""
    return _num_silent > 0


def _dense(tensor: Tensor) -> Tensor:
    """The elements as memory holds them, in order: backends know neither strides nor lazy conjugates and negatives."""
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


def _note(kind: str, full: Tensor) -> None:
    for issued in _recorders:
        issued.append(Issued(kind, full.nbytes))


def _start(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Work:
    return Pending([]) if _num_silent else call(*args, async_op=True, **kwargs)


def _new(result: Tensor, work: Work, async_op: bool) -> Any:
    if async_op:
        return result, work
    work.wait()
    return result


def _in_place(tensor: Tensor, buffer: Tensor, work: Work, async_op: bool) -> Work | None:
    if buffer.data_ptr() != tensor.data_ptr():
        work = Pending([work], lambda: tensor.detach().copy_(buffer))
    if async_op:
        return work
    work.wait()
    return None
