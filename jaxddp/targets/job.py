"""A running compilation for a target: the parent's side of ``process.py``.

A thread of the parent writes the request, waits for the answer and reaps the child. The child ends when the parent
ends in any way (its input is closed), when the parent is interrupted while it waits, and when the ``Pending`` is
garbage-collected.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..planning.chips import Target
from .program import MemoryStats, TargetError, TargetProgram, refusal

_SCRIPT = Path(__file__).with_name("process.py")
_free_cpus = threading.BoundedSemaphore(os.cpu_count() or 1)


class Pending:
    """A running compilation."""

    def __init__(
        self, target: Target, request: Mapping[str, Any], environment: Mapping[str, str], timeout_s: float
    ) -> None:
        """Starts the compilation as soon as a CPU is free."""
        self._job = _Job(target, pickle.dumps(request), environment, timeout_s)
        self._end = weakref.finalize(self, self._job.kill, "was cancelled")
        self._job.thread.start()

    def cancel(self) -> None:
        """Ends it; can be called again."""
        self._end()

    def result(self) -> TargetProgram:
        """Waits for the program; an exception while waiting ends the compilation.

        Raises:
            TargetMemoryError: If the program does not fit into the target's memory.
            TargetError: If it cannot be compiled, or not in time.
        """
        try:
            return self._job.result()
        except BaseException:
            self.cancel()
            raise


class _Job:
    """The child process and its thread; has no reference to its ``Pending``, so that this can be garbage-collected."""

    def __init__(self, target: Target, request: bytes, environment: Mapping[str, str], timeout_s: float) -> None:
        self._target, self._request = target, request
        self._environment, self._timeout_s = environment, timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._why_killed = ""
        self._lock = threading.Lock()
        self._outcome: TargetProgram | TargetError | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def result(self) -> TargetProgram:
        self.thread.join()
        assert self._outcome is not None
        if isinstance(self._outcome, TargetError):
            raise self._outcome
        return self._outcome

    def kill(self, why: str) -> None:
        with self._lock:
            self._why_killed = self._why_killed or why
            if self._process is not None:
                self._process.kill()

    def _run(self) -> None:
        with _free_cpus, tempfile.TemporaryFile() as printed:
            try:
                self._outcome = self._talk(printed)
            except (OSError, EOFError, pickle.UnpicklingError) as error:
                printed.seek(0)
                self._outcome = self._failure(error, printed.read().decode(errors="replace"))

    def _talk(self, printed: Any) -> TargetProgram | TargetError:
        with self._lock:
            if self._why_killed:
                raise EOFError
            # -P: the names of this folder's files must not hide other packages.
            command = [sys.executable, "-P", str(_SCRIPT)]
            process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed
            )
            self._process = process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(self._timeout_s, self.kill, (f"took longer than timeout_s (={self._timeout_s})",))
        timer.daemon = True
        timer.start()
        try:
            with process.stdout, process.stdin:
                process.stdin.write(len(self._request).to_bytes(8, "big") + self._request)
                process.stdin.flush()
                kind, content = pickle.load(process.stdout)
        finally:
            timer.cancel()
            # An answer that was cut off is a process that is ending by itself: its exit code says why.
            if sys.exc_info()[0] is None:
                process.kill()
            process.wait()
        if kind == "refused":
            return refusal(self._target, content)
        memory = MemoryStats(*(content["memory"].get(name, 0) for name in MemoryStats._fields))
        return TargetProgram(self._target, content["text"], memory, content["cost"])

    def _failure(self, error: Exception, printed: str) -> TargetError:
        spec = repr(self._target.spec)
        if self._why_killed:
            return TargetError(f"compiling for {spec} {self._why_killed}", printed)
        if self._process is None:
            return TargetError(f"no process could be started to compile for {spec}: {error}")
        lines = [line.strip() for line in printed.splitlines() if line.strip()]
        last = f": {lines[-1]}" if lines else ""
        return TargetError(
            f"the process that compiles for {spec} ended with code {self._process.returncode}{last}", printed
        )
