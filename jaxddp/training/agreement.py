"""Processes agree on what they train and on their batches, through the key-value store of ``jax.distributed``.

Programs that differ would wait for each other in their collectives. So the model is compared when a state is made, the
batch and its plan before a step is compiled for new shapes; a process whose shapes alone are new raises.
"""

import contextlib
import itertools
import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax._src import distributed  # the store has no public name

from ..processes.job import find_job
from ..processes.roll_call import disagreement
from ..processes.watchdog import begin_step, end_step, wait_for_end

BATCH_S = 300.0  # for a process whose batch has new shapes as well; the watchdog is first if it waits for less
_calls = itertools.count()


def warn_if_alone() -> None:
    """Warns in a process that a launcher has started with others, of which JAX knows nothing."""
    job = None
    with contextlib.suppress(ValueError):  # variables that describe no job
        job = find_job()
    if job is not None and job.num_processes > 1 and jax.process_count() == 1:
        alone = f"this process trains alone, one of {job.num_processes} that {job.launcher} has started"
        warnings.warn(f"{alone}: call jaxddp.start_process() before anything else uses JAX", stacklevel=3)


def check_alike(alike: Mapping[str, Any], timeout_s: float = 3600.0) -> None:
    """Compares entries that must be the same in all processes, each of which calls it as often as the others.

    A ValueError names the first that differs and the processes; so does one that waits in vain, or has joined no job.
    """
    if jax.process_count() == 1:
        return
    if distributed.global_state.client is None:
        raise ValueError("several processes must join a job before they train: call jaxddp.start_process")
    everyone = []
    begin_step(is_call=True)  # which a process that has ended does not come to
    try:
        for text in gather_texts(json.dumps(alike, default=str), timeout_s):
            everyone.append(json.loads(text))
    except RuntimeError as error:
        wait_for_end()
        name, value = next(iter(alike.items()))
        other = f"process {len(everyone)}, not here within {timeout_s:g} s: {str(error).splitlines()[0]}"
        raise ValueError(f"{name} (={value!r}) must be compared with {other}") from error
    end_step()
    if fault := disagreement(everyone):
        raise ValueError(fault)


def gather_texts(text: str, timeout_s: float) -> Iterator[str]:
    """Gathers a text of every process, by its number; as ``check_alike``, but the error is JAX's RuntimeError."""
    client: Any = distributed.global_state.client
    key = f"jaxddp/texts/{next(_calls)}"
    client.key_value_set(f"{key}/{jax.process_index()}", text)
    for process in range(jax.process_count()):
        yield client.blocking_key_value_get(f"{key}/{process}", round(1000 * timeout_s))
