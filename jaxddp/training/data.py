"""Text to train on: bytes of a file, cut into windows, in batches that depend only on the seed and the step.

A text of ``B`` bytes holds ``(B - 1) // T`` windows of ``T = context`` tokens; window ``i`` reads the bytes from
``i T`` on and predicts those from ``i T + 1`` on. The last windows are held out. The others are permuted again in every
epoch, and step ``s`` takes windows ``s b`` to ``(s + 1) b - 1`` of the concatenated epochs, of which rank ``r`` of
``N`` has rows ``r b / N`` to ``(r + 1) b / N - 1``: a run can be repeated on another number of ranks.
"""

import functools
import hashlib
import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

Batch = dict[str, np.ndarray]

_LEFT_OUT_OF_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Corpus:
    """Real text, one token a byte: the vocabulary is 256.

    Example:
        >>> Corpus(context=64).batch(0, 8)["tokens"].shape  # of the standard library's own sources
        (8, 64)
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, context: int = 128, holdout: float = 0.05):
        """Reads a file, or Python's standard library, into memory; a ValueError if it is none, or too short.

        ``context`` is in tokens; ``holdout`` is the fraction of windows kept for validation, at least one of them.
        """
        self.context = context
        if path is None:
            text, self.source = _standard_library()
        else:
            if not Path(path).is_file():  # a pipe could be read for ever
                raise ValueError(f"data path {str(path)!r} must be a regular file")
            text, self.source = Path(path).read_bytes(), str(path)
        num_windows = (len(text) - 1) // context
        if num_windows < 1:
            said = f"text of {self.source} (={len(text)} bytes)"
            raise ValueError(f"{said} must be longer than one context (={context} tokens)")
        self.num_bytes, self.crc32 = len(text), zlib.crc32(text)  # held-out part included
        self.num_validation_windows = min(max(round(num_windows * holdout), 1), num_windows - 1)
        self.num_windows = num_windows - self.num_validation_windows
        self._text = np.frombuffer(text, dtype=np.uint8)

    def batch(self, step: int, batch_size: int, *, seed: int = 0, rank: int = 0, num_ranks: int = 1) -> Batch:
        """Gives a rank's rows of the global batch of a step, from 0; a ValueError if the batch cannot be split.

        They are ``{"tokens": int32[batch_size / num_ranks, context], "targets": the same, one byte later}``.
        """
        if batch_size % num_ranks:
            raise ValueError(f"batch_size (={batch_size}) must be divisible by num_ranks (={num_ranks})")
        rows = np.arange(batch_size).reshape(num_ranks, -1)[rank] + step * batch_size
        epochs, positions = np.divmod(rows, self.num_windows)
        pairs = zip(epochs.tolist(), positions.tolist(), strict=True)
        return self._examples(np.array([_permutation(self.num_windows, seed, epoch)[at] for epoch, at in pairs]))

    def validation_batches(self, batch_size: int, max_batches: int | None = None) -> Iterator[Batch]:
        """Gives the held-out windows once, in whole batches, each of windows from all over the held-out part."""
        num_batches = self.num_validation_windows // batch_size
        first_windows = range(self.num_windows, self.num_windows + num_batches)[:max_batches]
        return (self._examples(first + np.arange(batch_size) * num_batches) for first in first_windows)

    def _examples(self, windows: np.ndarray) -> Batch:
        bytes_of_window = self._text[windows[:, None] * self.context + np.arange(self.context + 1)].astype(np.int32)
        return {"tokens": bytes_of_window[:, :-1], "targets": bytes_of_window[:, 1:]}


@functools.lru_cache(maxsize=2)  # a batch may lie across the end of an epoch
def _permutation(num_windows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_windows)


def _standard_library() -> tuple[bytes, str]:
    folder, names = Path(sysconfig.get_path("stdlib")), []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in _LEFT_OUT_OF_STDLIB]
        names += [Path(parent, name).relative_to(folder).as_posix() for name in files if name.endswith(".py")]
    # Sorted by name, the end of the text would be one package; a hash puts the files in a fixed order without one.
    names.sort(key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    texts = [text for name in names if b"\0" not in (text := (folder / name).read_bytes())]
    return b"".join(texts), f"Python {platform.python_version()} standard library ({len(texts):,} files)"
