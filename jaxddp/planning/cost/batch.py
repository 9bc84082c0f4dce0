"""Batches: what a step trains on, and how it is cut into what a rank can hold.

    global batch = micro-batch x accumulation steps x data-parallel ranks        in samples
    tokens       = global batch x sequence length

So the accumulation steps are global / (micro x ranks): global / ranks alone is samples per rank and step, which is the
same only at a micro-batch of one. "4M tokens" of "4K" sequences are 1,024 samples in binary units, 2^22 / 2^12, and
976.6 in decimal ones of 4,096.

References:
    The Ultra-Scale Playbook, section on data parallelism.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .checks import check_count, check_positive


def global_batch(micro_batch: Any, accumulation_steps: Any, num_data_ranks: Any) -> Any:
    """Gives the samples of one optimizer step.

    Args:
        micro_batch: Samples that a rank works on at once; a number or an array, as the others.
        accumulation_steps: Micro-batches of a step on each rank.
        num_data_ranks: Ranks that work on different samples.

    Returns:
        The product.

    Raises:
        ValueError: If a number is not whole, 1 or more.

    Example:
        >>> int(global_batch(micro_batch=2, accumulation_steps=4, num_data_ranks=128))
        1024
    """
    check_count(micro_batch=micro_batch, accumulation_steps=accumulation_steps, num_data_ranks=num_data_ranks)
    return np.asarray(micro_batch) * accumulation_steps * num_data_ranks


def accumulation_steps(global_batch: Any, micro_batch: Any, num_data_ranks: Any) -> Any:
    """Gives the micro-batches that a rank adds up in a step.

    Args:
        global_batch: Samples of a step.
        micro_batch: Samples that a rank works on at once.
        num_data_ranks: Ranks that work on different samples.

    Returns:
        Whole numbers.

    Raises:
        ValueError: If a number is not whole, 1 or more, or the batch is not a multiple of the others' product.

    Example:
        >>> int(accumulation_steps(global_batch=1024, micro_batch=2, num_data_ranks=128))
        4
    """
    check_count(global_batch=global_batch, micro_batch=micro_batch, num_data_ranks=num_data_ranks)
    at_once = np.asarray(micro_batch) * num_data_ranks
    batch, at_once = np.broadcast_arrays(np.asarray(global_batch), at_once)
    if (rest := batch % at_once != 0).any():
        raise ValueError(
            f"global_batch (={batch[rest].flat[0]}) must be a multiple of micro_batch x num_data_ranks "
            f"(={at_once[rest].flat[0]})"
        )
    return batch // at_once


def samples(tokens: Any, sequence_length: Any) -> Any:
    """Gives the samples that hold so many tokens; not rounded.

    Args:
        tokens: Of one step.
        sequence_length: Tokens of a sample.

    Returns:
        Their quotient.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> float(samples(2**22, 2**12)), round(float(samples(4e6, 4096)), 1)
        (1024.0, 976.6)
    """
    check_positive(tokens=tokens, sequence_length=sequence_length)
    return np.divide(tokens, sequence_length)
