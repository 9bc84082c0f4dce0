"""Processes agree on the shapes of their batches, through the key-value store of ``jax.distributed``.

A process with a batch of new shapes publishes them, and reads those of the others before it compiles. One of the others
may have gone on with the old shapes and be blocked in a collective, so a thread in each process polls once a second and
publishes for it; batches are counted, so the thread knows whether its process is still to come. A step whose shapes are
known needs no communication.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed  # the store has no public name

_TIMEOUT_S = 3600  # for a process that neither comes nor goes on
_POLL_S = 1.0


class Agreement:
    """This process's part in the agreement, for the batches of all its trainers.

    Key ``jaxddp/batch/r/PROCESS`` holds, for round r, the number and shapes of the process's batch.
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

    def check(self, shapes: Any, describe: Callable[[], str], known: dict[Any, str]) -> None:
        """Counts a batch; if its shapes are new, compares them with those of the other processes.

        Args:
            shapes: Hashable.
            describe: Gives them as text.
            known: Shapes that were agreed on, with their text; updated here.

        Raises:
            ValueError: If another process has other shapes, or does not come.
        """
        with self._lock:
            self._number += 1
            self._is_asking = shapes not in known
            description = describe() if self._is_asking else known[shapes]
            self._said = f"batch {self._number} is {description}"
        if self._is_asking:
            try:
                self._compare()
            except ValueError:
                atexit.register(self._leave, self._round, self._number)  # before jax.distributed's shutdown
                raise
            finally:
                self._round, self._is_asking = self._round + 1, False
            known[shapes] = description

    def _compare(self) -> None:
        with contextlib.suppress(RuntimeError):  # another process was first
            self._client.key_value_set(self._key("first"), str(self._number))
        self._client.key_value_set(self._key(self._process), self._said)
        for process in range(jax.process_count()):
            try:
                said = self._client.blocking_key_value_get(self._key(process), 1000 * _TIMEOUT_S)
            except RuntimeError as error:
                said = f"none has come in {_TIMEOUT_S} s: {str(error).splitlines()[0]}"
            if said != self._said:
                raise ValueError(
                    "batch must be alike in all processes, with the same names, dtypes and shapes: in process"
                    f" {self._process}, {self._said}, and in process {process}, {said}"
                )

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
                    line = f"jaxddp: process {self._process} ended, because {left}"
                    print(line, file=sys.stderr, flush=True)
                    jax.distributed.shutdown()  # for which the other process waits
                    os._exit(1)  # the main thread waits for the other process in a collective

    def _leave(self, number: int, batch: int) -> None:
        """Ends processes that wait for this one in a collective, unless it has gone on."""
        if batch == self._number:
            with contextlib.suppress(RuntimeError):
                reason = f"in process {self._process}, {self._said}, unlike its own"
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
    client = distributed.global_state.client
    if client is None:
        raise ValueError("several processes must join a job before they train: call jaxddp.start_process")
    return Agreement(client)
