"""The time of a step on its device, beside that on the wall clock: from the step's first operation there to its last.

| framework | measured by                                                                              |
|-----------|------------------------------------------------------------------------------------------|
| torch     | two CUDA events on the current stream, which waits for NCCL's streams before the second   |
| JAX       | the profiler: a trace for each step, with the operations on all streams of each GPU       |

Both include what the device waits for, such as other ranks and kernels that are launched late. What the host does
before the first launch and after the last operation is left out; torch's first event passes when it is recorded, just
before. The steps are taken after all timed rounds, so the profiler slows down nothing else. CPUs have no such time:
there the host computes, and XLA's profile lacks work that is handed to other threads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torchref.launch import report

from ..harness.jax_profile import Recorded, ran_on_gpu, read_trace
from .interleaving import Attempts

Start = Callable[[int], Any]  # starts the step of a batch, and reads nothing of it
NUM_STEPS = 5  # on GPUs; the first is a warm-up beside them


def time_on_device(
    starts: Mapping[str, Start],
    num_steps: int,
    num_batches: int,
    time_step: Callable[[Start, int], float],
    *,
    barrier: Callable[[], None],
    agree: Callable[[str], str],
    wait_for_turn: Callable[[], None],
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Times steps on the device, of each variant so many after one more; the variants take turns.

    ``time_step`` is ``by_events``, or ``by_profiler`` with its arguments; the options are those of ``interleave``.

    Returns:
        By label: the seconds of each step; and why others could not be timed.
    """
    report(("doing", f"training, {num_steps} steps timed on the device"))
    attempt = Attempts(agree)
    found: dict[str, list[float]] = {label: [] for label in starts}
    for index in range(1 + num_steps):
        wait_for_turn()
        for label, start in starts.items():
            if label in attempt.failed:
                continue
            barrier()
            seconds = attempt(label, partial(time_step, start, index % num_batches))
            if index and seconds is not None:
                found[label].append(seconds)
    return {label: seconds for label, seconds in found.items() if label not in attempt.failed}, attempt.failed


def by_events(start: Start, index: int) -> float:
    """Seconds of a step of torch on this rank's GPU.

    When ``start`` returns, all work on other streams, as NCCL's, is waited for by the current one.
    """
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    start(index)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def by_profiler(
    start: Start,
    index: int,
    *,
    barrier: Callable[[], None],
    is_on_device: Callable[[Recorded], bool] = ran_on_gpu,
) -> float:
    """Seconds of a step of JAX on this process's devices, on the slowest of them.

    ``barrier`` is called once the profiler has started, which takes longer on some ranks than on others.

    Raises:
        RuntimeError: If the profiler does not start; the step is taken nevertheless, since other ranks take it.
        ValueError: If it has recorded nothing on a device.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="device-time-") as folder:
        fault: Exception | None = None
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except Exception as error:
            fault = error
        try:
            barrier()
            jax.block_until_ready(start(index))
        finally:
            if fault is None:
                jax.profiler.stop_trace()
        if fault is not None:
            raise RuntimeError(f"the profiler does not start: {fault}") from fault
        recorded = (one for path in sorted(Path(folder).rglob("*.xplane.pb")) for one in read_trace(path))
        return longest_span(one for one in recorded if is_on_device(one))


def longest_span(events: Iterable[Recorded]) -> float:
    """Seconds from a device's first event to the end of its last, the longest of all; raises ValueError without any."""
    spans: dict[str, tuple[float, float]] = {}
    for plane, _, event in events:
        begin, end = event.start_ns, event.start_ns + event.duration_ns
        first, last = spans.get(plane, (begin, end))
        spans[plane] = min(first, begin), max(last, end)
    if not spans:
        raise ValueError("the profiler has recorded nothing on a device")
    return max(end - begin for begin, end in spans.values()) / 1e9
