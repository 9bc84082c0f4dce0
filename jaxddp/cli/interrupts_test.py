"""Interrupts that fall into a finalizer or a garbage collection still interrupt."""

import gc
import signal
import subprocess
import sys
import threading
import time

import pytest

from jaxddp.cli.interrupts import kept_interrupts


class _Finalized:
    def __init__(self, error):
        self.error = error

    def __del__(self):
        raise self.error


def test_one_in_a_finalizer_gets_through():
    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        _Finalized(KeyboardInterrupt())
        time.sleep(30)


def test_one_in_a_garbage_collection_gets_through():
    def interrupted(phase, info):
        gc.callbacks.remove(interrupted)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), kept_interrupts():
        gc.callbacks.append(interrupted)
        gc.collect()
        time.sleep(30)


def test_nothing_is_interrupted_after_the_end():
    with kept_interrupts():
        _Finalized(KeyboardInterrupt())
    time.sleep(0.1)


def test_other_exceptions_are_reported_as_before(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda dropped: reported.append(dropped.exc_type))
    with kept_interrupts():
        _Finalized(ValueError())
        thread = threading.Thread(target=lambda: _Finalized(KeyboardInterrupt()))  # nobody pressed Ctrl-C there
        thread.start()
        thread.join()
    _Finalized(KeyboardInterrupt())
    assert reported == [ValueError, KeyboardInterrupt, KeyboardInterrupt]


STARTS = """
import signal, sys
from jaxddp.cli.interrupts import ended_by_interrupts
with ended_by_interrupts():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:  # as a module may that tries to import another
        pass
print("went on")
"""


def test_an_interrupt_while_modules_are_imported_ends_the_process():
    result = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")
