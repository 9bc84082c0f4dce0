import numpy as np
import pytest

from jaxddp.comparison_test import assert_near, refusal
from jaxddp.training.data import Corpus

CONTEXT = 4


@pytest.fixture
def write(tmp_path):
    def write(content, name="text.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def counting(write):
    """A text whose byte at position i is i, so that a window can be told by its first token: 50 windows of 4."""
    return write(bytes(range(201)))


def first_tokens(batches):
    return [int(token) for batch in batches for token in batch["tokens"][:, 0]]


def assert_same(batch, other):
    assert batch.keys() == {"tokens", "targets"}
    assert_near(batch, other, atol=0)


def test_tokens_are_bytes_and_targets_are_the_bytes_after_them(counting):
    corpus = Corpus(counting, context=CONTEXT)
    batch = corpus.batch(0, 6)
    assert batch["tokens"].shape == batch["targets"].shape == (6, CONTEXT)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    np.testing.assert_array_equal(batch["tokens"], batch["tokens"][:, :1] + np.arange(CONTEXT))


def test_every_byte_but_the_first_is_predicted_exactly_once(counting):
    corpus = Corpus(counting, context=CONTEXT, holdout=0.1)
    train = [corpus.batch(step, 5)["targets"] for step in range(9)]
    held_out = [batch["targets"] for batch in corpus.validation_batches(1)]
    assert sorted(np.concatenate([*train, *held_out]).ravel()) == list(range(1, 201))


def test_each_epoch_holds_each_window_once_in_an_order_of_its_own_and_batches_wrap_into_the_next(counting):
    corpus = Corpus(counting, context=CONTEXT, holdout=0.1)
    row_by_row = first_tokens(corpus.batch(step, 1) for step in range(140))
    epochs = [row_by_row[:45], row_by_row[45:90], row_by_row[90:135]]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 180, CONTEXT)) != epoch
    assert len(set(map(tuple, epochs))) == 3
    assert first_tokens(corpus.batch(step, 7) for step in range(20)) == row_by_row
    # One batch larger than an epoch holds every window before it holds one again.
    assert first_tokens([corpus.batch(0, 140)]) == row_by_row


def test_batches_depend_on_seed_and_step_alone(counting):
    first, second = (Corpus(counting, context=CONTEXT) for _ in range(2))
    later = first.batch(5, 6, seed=3)
    first.batch(0, 6, seed=1)
    assert_same(second.batch(5, 6, seed=3), later)
    assert first_tokens([first.batch(5, 6, seed=4)]) != first_tokens([later])
    assert first_tokens([first.batch(6, 6, seed=3)]) != first_tokens([later])


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 12])
def test_ranks_get_consecutive_rows_of_the_one_global_batch(counting, num_ranks):
    data = Corpus(counting, context=CONTEXT)
    whole = data.batch(2, 12, seed=1)
    shards = [data.batch(2, 12, seed=1, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert {len(shard["tokens"]) for shard in shards} == {12 // num_ranks}
    assert_same({name: np.concatenate([shard[name] for shard in shards]) for name in whole}, whole)


def test_validation_is_the_tail_spread_over_the_batches_in_a_fixed_order(counting):
    corpus = Corpus(counting, context=CONTEXT, holdout=0.2)  # windows 40 to 49, whose first tokens are 160 to 196
    batches = list(corpus.validation_batches(4))
    assert [first_tokens([batch]) for batch in batches] == [[160, 168, 176, 184], [164, 172, 180, 188]]
    assert len(list(corpus.validation_batches(4, max_batches=1))) == 1
    assert_same(next(corpus.validation_batches(4, max_batches=1)), batches[0])
    assert list(corpus.validation_batches(11)) == []


def test_the_standard_library_is_mixed_and_read_without_tests_and_installed_packages(write, tmp_path, monkeypatch):
    for number in range(100):
        write(b"aaaa", f"asyncio/{number}.py")
        write(b"zzzz", f"zoneinfo/{number}.py")
    for left_out in ("site-packages/x.py", "test/x.py", "json/tests/x.py", "x.txt"):
        write(b"????", left_out)
    monkeypatch.setattr("jaxddp.training.data.sysconfig.get_path", lambda name: str(tmp_path))
    corpus = Corpus(context=1, holdout=0.2)
    assert corpus.num_bytes == 800 and "standard library" in corpus.source
    # In the order of paths, the held-out fifth would hold the letter z alone.
    for tokens in (next(corpus.validation_batches(160))["tokens"], corpus.batch(0, 639)["tokens"]):
        assert set(tokens.ravel()) == set(b"az")
        assert 0.2 < (tokens == ord("a")).mean() < 0.8
    assert_same(next(Corpus(context=1, holdout=0.2).validation_batches(160)), next(corpus.validation_batches(160)))


def test_a_batch_that_cannot_be_is_refused(counting):
    found = refusal(Corpus(counting, context=CONTEXT).batch, 0, 6, num_ranks=4)
    assert found == "batch_size (=6) must be divisible by num_ranks (=4)"


def test_text_that_cannot_be_is_refused(write, tmp_path):
    for path, message in (
        (tmp_path / "none", "/none' must be a regular file"),
        ("", "data path '' must be a regular file"),
        ("/dev/null", "data path '/dev/null' must be a regular file"),
        (write(b"abcd", "short/text.txt"), " (=4 bytes) must be longer than one context (=4 tokens)"),
    ):
        assert message in refusal(Corpus, path, context=4)
