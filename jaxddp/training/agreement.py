"""Processes agree on what they train and on their batches, through the key-value store of ``jax.distributed``.

Programs that differ would wait for each other in their collectives. So what must be alike is compared before the first
one: the model when a state is made, the batch and its plan before a step is compiled for it.

A process with a batch of new shapes publishes them, and reads those of the others before it compiles. One of the others
may have gone on with the old shapes and be blocked in a collective, so a thread in each process polls once a second and
publishes for it; batches are counted, so the thread knows whether its process is still to come. A step whose shapes are
known needs no communication.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax._src import distributed  # the store has no public name

from ..processes.roll_call import disagreement
from ..processes.stderr import print_line

_TIMEOUT_S = 3600  # for a process that neither comes nor goes on
_POLL_S = 1.0


class Agreement:
    """This process's part in the agreement, for the batches of all its trainers.

    Key ``jaxddp/batch/r/PROCESS`` holds, for round r, the number, shapes and plan of the process's batch.
    """

    def __init__(self, client: Any) -> None:
        """Starts the thread."""
        self._client, self._process = client, jax.process_index()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._number = self._round = 0
        self._said, self._is_asking = "", False
        self._answered: list[int] = []  # rounds in which the thread has answered
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        atexit.register(thread.join, 10 * _POLL_S)  # atexit runs the last one first
        atexit.register(self._stop.set)

    def check(self, shapes: Any, describe: Callable[[], dict[str, str]], known: dict[Any, dict[str, str]]) -> None:
        """Counts a batch; if its shapes are new, compares them and the plan with those of the other processes.

        Args:
            shapes: Hashable.
            describe: Describes them under ``"batch"``, and what else must be alike.
            known: Shapes that were agreed on, with their description; updated here.

        Raises:
            ValueError: If another process has others, or does not come.
        """
        description = known.get(shapes) or describe()
        with self._lock:
            self._number += 1
            self._is_asking = shapes not in known
            self._said = json.dumps({**description, "batch": f"number {self._number}, {description['batch']}"})
        if self._is_asking:
            try:
                self._compare()
            except ValueError as error:
                atexit.register(self._leave, self._round, self._number, str(error))  # before jax.distributed's shutdown
                raise
            finally:
                self._round, self._is_asking = self._round + 1, False
            known[shapes] = description

    def _compare(self) -> None:
        with contextlib.suppress(RuntimeError):  # another process was first
            self._client.key_value_set(self._key("first"), str(self._number))
        _compare(self._client, f"jaxddp/batch/{self._round}", self._said)

    def _watch(self) -> None:
        while not self._stop.wait(_POLL_S):
            number = self._round
            first = self._get(self._key("first"))
            with self._lock:
                is_beyond = first is not None and self._number >= int(first)
                if is_beyond and not self._is_asking and number == self._round:
                    self._client.key_value_set(self._key(self._process), self._said)
                    self._answered.append(self._round)
                    self._round += 1
            for number in self._answered:
                if (left := self._get(f"jaxddp/batch/{number}/left")) is not None:
                    line = f"jaxddp: process {self._process} ended: {left}"
                    print_line(line)
                    jax.distributed.shutdown()  # for which the other process waits
                    os._exit(1)  # the main thread waits for the other process in a collective

    def _leave(self, number: int, batch: int, reason: str) -> None:
        """Ends processes that wait for this one in a collective, unless it has gone on."""
        if batch == self._number:
            with contextlib.suppress(RuntimeError):
                self._client.key_value_set(f"jaxddp/batch/{number}/left", reason, allow_overwrite=True)

    def _get(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except RuntimeError:
            return None

    def _key(self, what: int | str) -> str:
        return f"jaxddp/batch/{self._round}/{what}"


@functools.cache
def agreement() -> Agreement:
    """The agreement of this process.

    Raises:
        ValueError: If it has not joined a job.
    """
    return Agreement(_client())


def check_alike(alike: Mapping[str, Any]) -> None:
    """Compares entries that must be the same in all processes; every process calls it, as often as the others.

    Raises:
        ValueError: If one differs, in every process; the line names the first such entry and the processes.
    """
    if jax.process_count() > 1:
        _compare(_client(), f"jaxddp/alike/{next(_calls)}", json.dumps(alike))


_calls = itertools.count()


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ValueError("several processes must join a job before they train: call jaxddp.start_process")
    return client


def _compare(client: Any, key: str, said: str) -> None:
    client.key_value_set(f"{key}/{jax.process_index()}", said)
    everyone = []
    for process in range(jax.process_count()):
        try:
            everyone.append(json.loads(client.blocking_key_value_get(f"{key}/{process}", 1000 * _TIMEOUT_S)))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"process {process} must come within {_TIMEOUT_S} s: {reason}") from error
    if fault := disagreement(everyone):
        raise ValueError(fault)
