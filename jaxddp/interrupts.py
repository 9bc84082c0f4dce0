"""Ctrl-C that gets through.

Python raises ``KeyboardInterrupt`` wherever the main thread is. In a finalizer, or in what JAX has called at every
garbage collection, it is printed and dropped like any exception there, and the program goes on.
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

_AGAIN_S = 0.01  # by then the finalizer has returned; if not, the next one is dropped too, and sent again


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """Sends an interrupt again if it was dropped; all else that cannot be raised is reported as before.

    Yields:
        Nothing.
    """
    report = sys.unraisablehook

    def send_again(dropped: UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            report(dropped)
            return
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        timer = threading.Timer(_AGAIN_S, signal.pthread_kill, (main_thread, signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = report
