"""Time that a host takes away, on counters of these tests."""

import pytest

from benchmarks.harness import steal_time
from benchmarks.harness.steal_time import Ticks, in_words, steal_share, ticks


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """Gives the first line of what Linux counts."""
    monkeypatch.setattr(steal_time, "_STAT", tmp_path / "stat")
    return lambda *counted: (tmp_path / "stat").write_text(f"cpu  {' '.join(map(str, counted))}\ncpu0 1 2 3\n")


def test_the_share_is_of_what_was_counted_since(counters):
    counters(100, 0, 50, 840, 0, 0, 0, 10, 7, 7)
    since = ticks()
    assert since == Ticks(10, 1000)
    counters(130, 5, 55, 860, 5, 0, 5, 40, 9, 9)
    assert steal_share(since) == pytest.approx(30 / 100)
    assert steal_share(ticks()) == 0


def test_where_nothing_counts_nothing_was_taken(counters):
    assert ticks() == (0, 0) and steal_share(ticks()) == 0


def test_little_is_not_mentioned():
    assert in_words(0.03) == "" and in_words(0.314).startswith("31% of the processors' time ")
