"""Keeps Ctrl-C from being lost, and notes the signals of schedulers.

Python raises ``KeyboardInterrupt`` wherever the main thread is. If that is inside a finalizer, or in JAX's
garbage-collection callback, the exception is printed and dropped, and the program goes on.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from . import quiet

if TYPE_CHECKING:
    from sys import UnraisableHookArgs
    from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What schedulers send before they end a job, and a terminal when it closes."""

_AGAIN_S = 0.01  # the finalizer has returned by then; if not, the interrupt is dropped and sent again


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """Sends a dropped interrupt of the main thread again; other dropped exceptions are reported as usual."""
    report = sys.unraisablehook
    timers: list[threading.Timer] = []

    def send_again(dropped: UnraisableHookArgs) -> None:
        thread = threading.main_thread()
        is_ctrl_c = issubclass(dropped.exc_type, KeyboardInterrupt) and threading.current_thread() is thread
        if not is_ctrl_c or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            report(dropped)
            return
        timer = threading.Timer(_AGAIN_S, signal.pthread_kill, (thread.ident, signal.SIGINT))
        timer.daemon = True
        timers.append(timer)
        timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = report
        for timer in timers:
            timer.cancel()
            timer.join()


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Ends the process at Ctrl-C, with one line and status 130: modules that are being imported may drop it."""

    def end(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.write(quiet.standard_error, b"interrupted\n")
        os._exit(128 + number)

    is_ours = threading.current_thread() is threading.main_thread()
    is_ours = is_ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class Signalled(Exception):
    """A run ended because of a signal, after it saved what it had; the text says how far it came.

    Attributes:
        number: Of the signal.
    """

    def __init__(self, number: int, text: str = "") -> None:
        super().__init__(text)
        self.number = number


@contextmanager
def noted_signals(is_in_job: bool) -> Iterator[list[int]]:
    """Notes ``SIGNALS`` of the main thread instead of ending the process; signals that are ignored stay so.

    Where several processes train together (``is_in_job``), JAX notes SIGTERM for all of them
    (``multihost_utils.reached_preemption_sync_point``), and the other signals are passed on to it.

    Yields:
        The numbers of the signals that came.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if is_in_job:
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
