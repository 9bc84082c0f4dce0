"""Keeps Ctrl-C from being lost.

Python raises ``KeyboardInterrupt`` wherever the main thread is. If that is inside a finalizer, or in JAX's
garbage-collection callback, the exception is printed and dropped, and the program goes on.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

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
