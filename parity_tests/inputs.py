"""The batches that both packages train on, as NumPy arrays."""

import functools

import numpy as np

from .cases import GLOBAL_BATCH, NUM_STEPS

Arrays = dict[str, np.ndarray]


@functools.cache
def batches(model: str, dtype: str) -> tuple[Arrays, ...]:
    """The global batch of every step; toys regress noise, the transformer predicts random tokens."""
    rng = np.random.default_rng(20)

    def one() -> Arrays:
        if not model.startswith("toy"):
            tokens = rng.integers(0, 64, (GLOBAL_BATCH, 17), dtype=np.int32)
            return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        out_features = 10 if model == "toy_tied" else 5
        x, y = rng.normal(size=(GLOBAL_BATCH, 10)), rng.normal(size=(GLOBAL_BATCH, out_features))
        return {"x": x.astype(dtype), "y": y.astype(dtype)}

    return tuple(one() for _ in range(NUM_STEPS))


def largest_difference(ours: Arrays, theirs: Arrays) -> float:
    """Largest difference of any weight; the two must hold the same names and shapes."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    for name in ours:
        assert ours[name].shape == theirs[name].shape, name
    return max(float(np.max(np.abs(ours[name].astype(np.float64) - theirs[name]))) for name in ours)
