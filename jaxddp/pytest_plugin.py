"""A pytest plugin: what a program communicates, as a test. It is there once the package is installed.

    def test_the_step_sends_one_all_reduce(assert_collectives):
        assert_collectives(train_step, (state, batch), [("all-reduce", 4096)], target="h100:8")

    def test_no_layer_is_gathered_twice(assert_collectives):
        assert_collectives(train_step, (state, batch), not_in_loops=["all-gather"], reduced_once=True, max_bytes=2**30)

A target needs no accelerator. JAX is imported when a fixture is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


@pytest.fixture(scope="session")
def assert_collectives() -> Callable[..., None]:
    """``(program, args, expected)`` fails if a program communicates anything else; see ``check_collectives``."""
    return check_collectives


def check_collectives(
    program: Any,
    args: Sequence[Any] = (),
    expected: Iterable[tuple[str, int]] | None = None,
    *,
    target: str | None = None,
    not_in_loops: Sequence[str] = (),
    reduced_once: bool = False,
    max_bytes: float | None = None,
) -> None:
    """Checks what a program communicates in one call.

    Args:
        program: As ``jaxddp.collectives`` takes it.
        args: Its arguments.
        expected: ``(kind, bytes of the full buffer)`` of every collective, in any order; those of a loop once for each
            iteration. None: any.
        target: Machines that are not here, such as ``h100:8``.
        not_in_loops: Kinds that must not stand in a loop.
        reduced_once: Whether no reduction may stand in a loop over micro-batches.
        max_bytes: Of the full buffers of all collectives together.

    Raises:
        AssertionError: If it communicates otherwise; the lines name the difference by kind, bytes and source.
        ValueError: As ``jaxddp.collectives``.
    """
    __tracebackhide__ = True
    from .instruments.collectives import collectives, in_bytes

    found = collectives(program, *args, target=target)
    if expected is not None:
        sources = {(one.kind, one.num_bytes): one.source or "no line" for one in found.found}
        wanted, sent = Counter(expected), Counter(found.pairs)
        lines = [f"  - {count} x {kind} of {size:,} bytes" for (kind, size), count in sorted((wanted - sent).items())]
        for (kind, size), count in sorted((sent - wanted).items()):
            lines.append(f"  + {count} x {kind} of {size:,} bytes: {sources[kind, size]}")
        if lines:
            raise AssertionError("\n".join(["other collectives than expected (- expected, + found):", *lines]))
    wrong = [one for kind in not_in_loops for one in found.in_loops(kind)]
    wrong += found.each_microbatch() if reduced_once else []
    if wrong:
        lines = [f"  {one.kind} of {one.num_bytes:,} bytes, {one.times} times: {one.source}" for one in wrong]
        raise AssertionError("\n".join(["collectives in a loop:", *dict.fromkeys(lines)]))
    if max_bytes is not None and found.num_bytes > max_bytes:
        raise AssertionError(f"{in_bytes(found.num_bytes)} are sent where {max_bytes:,} bytes are allowed\n{found}")
