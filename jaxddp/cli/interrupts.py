"""Notes the signals of schedulers, so that a run can save before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What schedulers send before they end a job, and a terminal when it closes."""


class Signalled(Exception):
    """A run ended because of the signal ``number``, after it saved; the text says how far it came."""

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(text)
        self.number = number


@contextmanager
def noted_signals(is_in_job: bool) -> Iterator[list[int]]:
    """Gives the numbers of ``SIGNALS`` that come to the main thread, which do not end it; ignored ones stay so."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if is_in_job:  # JAX notes SIGTERM for all processes: multihost_utils.reached_preemption_sync_point
            signal.raise_signal(signal.SIGTERM)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS[1:] if is_in_job else SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
