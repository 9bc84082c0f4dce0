"""A pytest plugin: what a program communicates, as a test. It is there once the package is installed.

    def test_the_step_sends_one_all_reduce(assert_collectives):
        assert_collectives(train_step, (state, batch), [("all-reduce", 4096)], target="h100:8")

    def test_it_gathers_in_no_loop(assert_collectives):
        assert_collectives(train_step, (state, batch), not_in_loops=["all-gather"], reduced_once=True, max_bytes=2**30)

    def test_the_step_sends_what_it_sent(assert_collectives_match):
        assert_collectives_match(train_step, (state, batch), "step.collectives")      # written by --update-collectives

JAX is imported when a fixture is used.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: Any) -> None:
    """Adds the option that writes snapshots."""
    parser.addoption(
        "--update-collectives", action="store_true", help="write the snapshots of assert_collectives_match (jaxddp)"
    )


@pytest.fixture(scope="session")
def assert_collectives() -> Callable[..., None]:
    """``(program, args, expected)`` fails if a program communicates anything else; see ``check_collectives``."""
    return check_collectives


@pytest.fixture
def assert_collectives_match(request: Any) -> Callable[..., None]:
    """``(program, args, snapshot)`` fails if a program communicates other than the text file beside the test says."""

    def check(program: Any, args: Sequence[Any], snapshot: str, *, target: str | None = None) -> None:
        __tracebackhide__ = True
        found = [(_line(one), one) for one in _collectives(program, args, target).found]
        path = Path(request.path).parent / snapshot
        if request.config.getoption("--update-collectives"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{count} x {line}\n" for line, count in sorted(_counts(found).items())))
        if not path.exists():
            pytest.fail(f"{path} is missing: pytest --update-collectives writes it")
        lines = (text.partition(" x ") for text in filter(None, path.read_text().splitlines()))
        _fail_if_other(Counter({line: int(count) for count, _, line in lines}), found)

    return check


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
    """Checks what a program communicates in one call; an AssertionError names each difference.

    Args:
        program: As ``jaxddp.collectives`` takes it.
        args: Its arguments.
        expected: ``(kind, bytes of the full buffer)`` of every collective in every iteration, in any order. None: any.
        target: Machines that are not here, such as ``h100:8``.
        not_in_loops: Kinds that must not stand in a loop.
        reduced_once: Whether no reduction may stand in a loop that holds forward and backward, as over micro-batches.
        max_bytes: Of the full buffers of all collectives together.
    """
    __tracebackhide__ = True
    from .instruments.collectives import in_bytes
    from .network import KINDS

    if unknown := {*not_in_loops} - {*KINDS}:
        raise ValueError(f"not_in_loops (={not_in_loops!r}) must list kinds such as all-reduce, not {min(unknown)!r}")
    found = _collectives(program, args, target)
    if expected is not None:
        named = [(f"{one.kind} of {one.num_bytes:,} bytes", one) for one in found.found]
        _fail_if_other(Counter(f"{kind} of {num_bytes:,} bytes" for kind, num_bytes in expected), named)
    wrong = [one for kind in not_in_loops for one in found.in_loops(kind)]
    wrong += found.each_microbatch() if reduced_once else []
    if wrong:
        lines = [f"  {_line(one)}, {one.count} times: {one.source}" for one in dict.fromkeys(wrong)]
        raise AssertionError("\n".join(["collectives in a loop:", *lines]))
    if max_bytes is not None and found.num_bytes > max_bytes:
        raise AssertionError(f"{in_bytes(found.num_bytes)} are sent where {max_bytes:,} bytes are allowed\n{found}")


def _collectives(program: Any, args: Sequence[Any], target: str | None) -> Any:
    """What a program communicates; a warning says what could not be counted, since a test may pass without it."""
    from .instruments.collectives import collectives

    found = collectives(program, *args, target=target)
    for note in found.notes:
        warnings.warn(f"jaxddp: {note}", stacklevel=3)
    return found


def _counts(named: Sequence[tuple[str, Any]]) -> Counter[str]:
    return sum((Counter({name: one.count}) for name, one in named), Counter())


def _fail_if_other(expected: Counter[str], named: Sequence[tuple[str, Any]]) -> None:
    """Fails with each difference to the collectives that were found, which stand beside their names."""
    __tracebackhide__ = True
    found, sources = _counts(named), dict(named)
    lines = [f"  - {count} x {name}" for name, count in sorted((expected - found).items())]
    more = sorted((found - expected).items())
    lines += [f"  + {count} x {name}: {sources[name].source or 'no line'}" for name, count in more]
    if lines:
        raise AssertionError("\n".join(["other collectives than expected (- expected, + found):", *lines]))


def _line(one: Any) -> str:
    """A collective in words that stay the same when lines of code move."""
    from .instruments.collectives import loops_of

    axes = "?" if one.axes is None else ", ".join(one.axes)
    loops = f", in {loops_of(one)}" * bool(one.loops) + ", in a branch" * one.is_conditional
    size = f"{one.num_bytes} bytes {one.dtype}"
    return f"{one.kind} of {size} over {axes} ({one.num_ranks}), {one.phase}{loops}"
