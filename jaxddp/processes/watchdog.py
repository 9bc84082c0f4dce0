"""Ends a job of several processes when one of them is lost or stuck: the others would wait for it in a collective.

A thread in each process keeps the connection of the roll call to process 0, and says ten times a second how far its
process is: the step that it began, a call after it (an evaluation, a check of replicas), and in torch the number of
collectives that it started. Process 0 judges, and tells all, who end with a line each (docs/clusters.md has the rules);
the others judge process 0. No framework is imported.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple

from .job import Job, print_line

STATUS = 5  # of a process that another one's loss ends
GRACE_S = 5.0  # in which processes may fail by themselves, with words of their own
_BEAT_S = 0.1  # of up to 32 processes
_PAUSE_S = 4.0  # without a round of its own: this process was stopped, and perhaps all were
_OTHERS_S = 8.0  # for which process 0 stays for the others: XLA aborts processes that miss it
_START_S = 60.0  # at least, before a process has begun a step: it imports, which stops its threads, loads and compiles
_LAST_WORDS_S = 1.0  # in which whoever started the processes may end them, and name the one that was lost

_Count = Callable[[], int]
_Place = tuple[int, int, int]  # steps begun, calls after the last one, collectives started


class _Fault(NamedTuple):
    reason: str
    is_stuck: bool = False  # then stacks show more of it
    failed: int = -1  # the process that an error of its own ended


@dataclass
class _Process:
    """What is known of a process."""

    connection: Connection | Any = None  # of this one none
    heard: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)  # when it went further
    idle: float = field(default_factory=time.monotonic)  # when it was in no step
    place: _Place = 0, 0, 0
    ended: str | None = None  # the error, "" if there is none
    ended_at: float = 0.0
    is_gone: bool = False

    def hear(self, place: _Place, waits: bool, ended: str | None) -> None:
        self.heard = now = time.monotonic()
        if not waits:
            self.idle = now
        if place != self.place:
            self.place, self.moved = place, now
        if ended is not None and not self.ended:  # an error, then the end
            self.ended, self.ended_at = ended, self.ended_at or now


class _Watchdog:
    """This process's thread, and what it knows of the others."""

    def __init__(
        self, job: Job, connections: Mapping[int, Connection], stuck_s: float, count_collectives: _Count | None
    ) -> None:
        self._number, self._stuck_s, self._count_collectives = job.process_id, stuck_s, count_collectives
        self._mine = _Process()
        self._others = {number: _Process(connection) for number, connection in connections.items()}
        self._selector = selectors.DefaultSelector()
        for other in self._others.values():
            self._selector.register(other.connection, selectors.EVENT_READ, other)
        self._beat_s = _BEAT_S * max(1.0, job.num_processes / 32)
        self.begun = 0, 0  # steps, and calls after the last one
        self.is_in_step, self.is_done = False, lambda: True  # the latter of what the last step started
        self._ended: str | None = None
        self.status = 1  # of an error of this process's own
        self._has_told, self.is_ending = threading.Event(), threading.Event()
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        atexit.register(self.on_exit)  # before JAX's, which waits at its barrier
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, name="jaxddp watchdog", daemon=True).start()

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            fault = self._listen(self._beat_s)
            now, waits, ended = time.monotonic(), self.is_in_step or not self.is_done(), self._ended
            if now - before > _PAUSE_S:
                for one in (self._mine, *self._others.values()):
                    one.heard = one.moved = now
            before = now
            started = 0 if self._count_collectives is None else self._count_collectives()
            place = *self.begun, max(self._mine.place[2], started)
            self._mine.hear(place, waits, ended)
            self._tell({"place": place, "waits": waits, "ended": ended})
            if ended is not None:
                self._has_told.set()
            if fault is None and (fault := self._judge(now)):
                self._tell({"fault": fault})
            if fault is not None:
                self._end(fault)

    def _listen(self, seconds: float) -> _Fault | None:
        """Reads what the others say for so long, or until one is gone: XLA aborts soon after process 0 is."""
        until, fault = time.monotonic() + seconds, None
        while (left := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                one = key.data
                try:
                    said = json.loads(one.connection.recv_bytes())
                except (OSError, EOFError):
                    self._selector.unregister(one.connection)
                    one.is_gone, until = True, 0.0
                    continue
                if "fault" in said:
                    fault = _Fault(*said["fault"])
                else:
                    one.hear(tuple(said["place"]), said["waits"], said["ended"])
        return fault

    def _tell(self, said: dict[str, Any]) -> None:
        """Says it to all; but to one that is silent, and so may not read, only a fault: its buffer may become full."""
        for other in self._others.values():
            is_silent = time.monotonic() - other.heard > _PAUSE_S
            if not other.is_gone and ("fault" in said or not is_silent):
                with contextlib.suppress(OSError):
                    other.connection.send_bytes(json.dumps(said).encode())

    def _judge(self, now: float) -> _Fault | None:
        for number, other in self._others.items():
            if other.ended is None and other.is_gone:
                return _Fault(f"process {number} is gone, {_last_step(other)}")
            patience_s = self._patience_s(other)
            if other.ended is None and now - other.heard > patience_s:
                return _Fault(f"process {number} has not answered for {patience_s:g} s, {_last_step(other)}", True)
        if self._number != 0:
            return None
        everyone = {0: self._mine, **dict(sorted(self._others.items()))}
        newest = max(one.place for one in everyone.values())
        # Collectives are not compared: those of two processes alone, as send, need none of the others.
        missed = {
            number: one
            for number, one in everyone.items()
            if one.ended or (one.ended is not None and one.place[:2] < newest[:2])
        }
        for number, one in missed.items():
            if one.is_gone or now - one.ended_at > GRACE_S:
                if one.ended:
                    return _Fault(f"process {number} failed, {_last_step(one)}: {one.ended}", failed=number)
                began = f"others began {_name(newest, one.place)}"
                return _Fault(f"process {number} has ended, {_last_step(one)}, and {began}")
        live = {number: one for number, one in everyone.items() if one.ended is None}
        if missed or not live:
            return None
        behind = [str(number) for number, one in live.items() if one.place < newest]
        last = min(live.values(), key=lambda one: one.place)
        patience_s = self._patience_s(last)
        if behind and now - max(one.moved for one in everyone.values()) > patience_s:
            late = f"did not begin {_name(newest, last.place)} within {patience_s:g} s of the others"
            return _Fault(f"process {', '.join(behind)} {late}", is_stuck=True)
        is_first = newest[:2] <= (1, 0)  # which compiles
        if not is_first and now - max(max(one.moved, one.idle) for one in live.values()) > self._stuck_s:
            return _Fault(f"no process has finished {_name(newest)} within {self._stuck_s:g} s", is_stuck=True)
        return None

    def _patience_s(self, process: _Process) -> float:
        return self._stuck_s if process.place[0] else max(self._stuck_s, _START_S)

    def _end(self, fault: _Fault) -> None:
        self.is_ending.set()
        last = threading.Timer(_OTHERS_S + 2 * _LAST_WORDS_S, os._exit, (STATUS,))  # a stream may block
        last.daemon = True
        last.start()
        try:
            stderr = sys.__stderr__ or sys.stderr  # torch's excepthook replaces the other for as long as it runs
            print_line(f"jaxddp: {fault.reason}: process {self._number} ends", stderr)
            if fault.is_stuck:
                faulthandler.dump_traceback(stderr)
            sys.stdout.flush()
            if self._number == 0 or not self._others[0].is_gone:  # else XLA aborts this process at once
                time.sleep(_LAST_WORDS_S)
            deadline = time.monotonic() + _OTHERS_S
            while self._number == 0 and (now := time.monotonic()) < deadline:
                if all(one.is_gone or now - one.heard > _PAUSE_S for one in self._others.values()):
                    break
                self._listen(_BEAT_S)
        finally:
            os._exit(self.status if fault.failed == self._number else STATUS)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            self.say_end(" ".join(f"{kind.__name__}: {error}".split())[:300].rstrip(": "))
            wait_for_end()
        self._excepthook(kind, error, trace)

    def on_exit(self) -> None:
        self.say_end(self._ended or ("it ended within a step" if self.is_in_step else ""))
        is_jax = self._count_collectives is None  # whose barrier would abort all after five minutes
        while (is_jax or self._number == 0) and any(map(self._is_going_on, self._others.values())):
            time.sleep(_BEAT_S)

    def _is_going_on(self, other: _Process) -> bool:
        """Whether another process may do without this one, which has ended, or is to be judged."""
        needs_this = other.place[2] > self._mine.place[2] and other.place[:2] <= self._mine.place[:2]
        if other.ended is not None or other.is_gone or (needs_this and not self._ended):  # the last fails by itself
            return False
        return time.monotonic() - other.moved < self._patience_s(other) + GRACE_S

    def say_end(self, why: str) -> None:
        self._has_told.clear()
        self._ended = why
        if self._others:
            self._has_told.wait(1.0 + self._beat_s)

    def _forget(self) -> None:
        """Closes the connections in a child that was forked: they would outlive this process."""
        for other in self._others.values():
            other.connection.close()
        self._others = {}


def _name(place: _Place, missed: _Place = (-1, 0, 0)) -> str:
    """What a process began, by the first number in which another has less."""
    step, call, collectives = place
    if missed[0] < step:
        return f"step {step}" if not call else f"call {call} after step {step}"
    return f"call {call} after step {step}" if missed[1] < call else f"collective {collectives}, after step {step},"


def _last_step(process: _Process) -> str:
    return f"its last step {process.place[0]}"


_watchdog: _Watchdog | None = None


def watch(
    job: Job, connections: Mapping[int, Connection], stuck_s: float, count_collectives: _Count | None = None
) -> None:
    """Starts the thread, which takes over the connections; ``stuck_s`` without a word or a step forward end the job."""
    global _watchdog
    _watchdog = _Watchdog(job, connections, stuck_s, count_collectives)


def begin_step(is_call: bool = False) -> None:
    """Counts a training step of this process, or another call, that takes all processes of its job."""
    if _watchdog is not None:
        _watchdog.is_in_step = True
        step, call = _watchdog.begun
        _watchdog.begun = (step, call + 1) if is_call else (step + 1, 0)


def end_step(is_done: Callable[[], bool] = lambda: True) -> None:
    """Notes that a step has returned; ``is_done`` tells whether a device still waits in it for the others."""
    if _watchdog is not None:
        _watchdog.is_done, _watchdog.is_in_step = is_done, False


def leave(why: str, status: int) -> None:
    """Says that an error ends this process, whose exit status it is if the others end because of it."""
    if _watchdog is not None:
        _watchdog.status = status
        _watchdog.say_end(why)


def wait_for_end() -> None:
    """Called after an error: if it came of another process's loss, the thread ends this process with a line."""
    if _watchdog is not None:
        if _watchdog.is_ending.wait(2.0):
            time.sleep(60)
        _watchdog.is_in_step = False
