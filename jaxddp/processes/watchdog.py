"""Ends a job of several processes when one of them is lost: the others would wait for it in a collective.

A thread in each process keeps the connection of the roll call to process 0, and sends a beat with the number of the
step that its process has begun. Process 0 judges, and tells all; the others judge process 0. What else takes all
processes, an evaluation or a check of replicas, is counted after its step, and is a step in this table:

| what happens to a process                                 | how it is noticed                    | after       |
|-----------------------------------------------------------|--------------------------------------|-------------|
| it is killed                                              | its connection ends                  | at once     |
| an exception ends it                                      | it says so                           | ``GRACE_S`` |
| it ends while others have begun a later step              | it says so                           | ``GRACE_S`` |
| it is stopped, its host goes down, its network is cut     | no beat                              | ``stuck_s`` |
| it sleeps or spins while others have begun a later step   | no process begins another step       | ``stuck_s`` |
| all wait in one step, as on a network that crawls         | no process ends it; not in the first | ``stuck_s`` |

Then every process that is in a step prints one line and ends with status 5, after ``stuck_s`` also the stacks of its
threads. A process outside of a step may be saving: it is let finish, and ends when it begins another step, or after
``stuck_s``; at once if JAX has lost process 0, because XLA would abort it. The thread needs no collective and nothing
of XLA's, whose own heartbeat takes a minute and a half and aborts. To a host that only a crawling network reaches,
the end of process 0 may come before its words: there XLA may abort a process first. No framework is imported.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from .job import Job
from .stderr import print_line

STATUS = 5  # of a process that another one's loss ends
GRACE_S = 5.0  # in which processes may fail by themselves, with words of their own
_BEAT_S = 0.5
_OTHERS_S = 8.0  # for which process 0 stays for the others
_LAST_WORDS_S = 1.0  # in which whoever started the processes may end them, and name the one that was lost


class _Process:
    """What is known of a process."""

    def __init__(self, connection: socket.socket | None) -> None:
        self.connection = connection
        self.unread = self.unsent = b""
        self.heard = self.moved = time.monotonic()  # when it last said something, and began a step
        self.idle = self.moved  # when it last said that it is in no step
        self.place = (0, 0)  # the last step that it has begun, and the last call after it
        self.failed: str | None = None
        self.log: str | None = None  # the file that it writes to
        self.has_left = self.is_gone = False
        self.since: float | None = None  # when it failed or left

    def hear(self, said: Mapping[str, Any], now: float) -> None:
        self.heard = now
        if not said.get("waits"):
            self.idle = now
        step, call = said.get("place", self.place)
        if (place := (int(step), int(call))) != self.place:
            self.place, self.moved = place, now
        self.log = said.get("log") or self.log
        self.failed = self.failed or said.get("failed")  # for good, whatever a beat that was made before says
        self.has_left = self.has_left or said.get("left", False)
        if self.since is None and (self.has_left or self.failed):
            self.since = now


class Watchdog:
    """This process's thread, and what it knows of the others."""

    def __init__(
        self, job: Job, connections: Mapping[int, socket.socket], stuck_s: float, needs_first: bool = False
    ) -> None:
        """Starts the thread, whose the connections of ``meet`` become.

        ``stuck_s`` are seconds without a beat, or with processes waiting in a step that another has not begun. With
        ``needs_first`` no process lives on without process 0, as under JAX, whose coordinator it is.
        """
        self._number, self._stuck_s, self._needs_first = job.process_id, stuck_s, needs_first
        self._mine = _Process(None)
        self._others = {number: _Process(connection) for number, connection in connections.items()}
        self._last_beat, self._is_ending = 0.0, threading.Event()
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._fault: tuple[str, bool] | None = None  # the reason, and whether stacks are wanted
        self._faulty_since = 0.0
        self._is_in_step, self._is_done = False, lambda: True  # the latter of what the last step started
        for connection in connections.values():
            connection.setblocking(False)
        self._excepthook, sys.excepthook = sys.excepthook, self._on_exception
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, name="jaxddp watchdog", daemon=True).start()

    def begin_step(self, is_call: bool = False) -> None:
        """Counts a step that this process begins, or a call after the last one."""
        self._is_in_step = True
        step, call = self._mine.place
        place = (step, call + 1) if is_call else (step + 1, 0)
        self._mine.hear({"place": place}, now := time.monotonic())
        if now - self._last_beat > _BEAT_S / 10 * max(1, len(self._others) / 32):
            self._beat(now)

    def end_step(self, is_done: Callable[[], bool] = lambda: True) -> None:
        """Notes that a step has returned; ``is_done`` tells whether a device still waits in it for the others."""
        self._is_done, self._is_in_step = is_done, False

    def wait_for_end(self) -> None:
        """Called after an error: if it came of another process's loss, the thread ends this process with a line."""
        if os.getpid() != self._pid:
            return
        self._is_in_step = True  # an update or a save may wait for the others as well
        if self._is_ending.wait(4 * _BEAT_S):
            time.sleep(60)
        self._is_in_step = False

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for other in self._others.values():
                assert other.connection is not None
                selector.register(other.connection, selectors.EVENT_READ, other)
            while True:
                if selector.get_map():
                    for key, _ in selector.select(_BEAT_S):
                        if not self._read(key.data):
                            selector.unregister(key.fileobj)
                else:
                    time.sleep(_BEAT_S)
                now, waits = time.monotonic(), self._is_in_step or not self._is_done()
                if now - self._mine.heard > 8 * _BEAT_S:  # this process itself was stopped, and perhaps all were
                    for one in (self._mine, *self._others.values()):
                        one.heard = one.moved = now
                self._mine.hear({"waits": waits}, now)
                if now - self._last_beat >= _BEAT_S:
                    self._beat(now, waits)
                if self._fault is None and (fault := self._judge(now)):
                    self._fault, self._faulty_since = fault, now
                    self._tell({"end": fault[0], "stacks": fault[1]})
                is_waiting = waits or now - self._faulty_since > self._stuck_s
                is_cut_off = self._needs_first and 0 in self._others and self._others[0].is_gone
                if self._fault is not None and (is_waiting or is_cut_off or self._fault[1]):
                    self._end(*self._fault)

    def _beat(self, now: float, waits: bool = False) -> None:
        self._last_beat = now
        mine = self._mine
        mine.log = _log
        self._tell({"place": mine.place, "waits": waits, "failed": mine.failed, "left": mine.has_left, "log": _log})

    def _read(self, other: _Process) -> bool:
        """Reads what a process says; False once its connection has ended."""
        assert other.connection is not None
        try:
            data = other.connection.recv(65536)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            other.is_gone = True
            return False
        *lines, other.unread = (other.unread + data).split(b"\n")
        for line in lines:
            said, now = json.loads(line), time.monotonic()
            if "end" in said and self._fault is None:
                self._fault, self._faulty_since = (said["end"], said["stacks"]), now
            other.hear(said, now)
        return True

    def _tell(self, said: dict[str, Any]) -> None:
        if os.getpid() != self._pid:  # a child that was forked
            return
        with self._lock:  # steps are told by the main thread
            for other in self._others.values():
                if other.connection is None or other.is_gone:
                    continue
                if not other.unsent or said.keys() & {"end"} or said.get("failed") or said.get("left"):
                    other.unsent += json.dumps(said).encode() + b"\n"
                with contextlib.suppress(OSError):  # a stopped process reads nothing
                    other.unsent = other.unsent[other.connection.send(other.unsent) :]

    def _judge(self, now: float) -> tuple[str, bool] | None:
        """What is wrong, and whether the stacks of all processes show more of it."""
        for number, other in self._others.items():
            if other.is_gone and not other.has_left:
                return f"process {number} is gone, {_last_step(other)}", False
            if not other.is_gone and other.since is None and now - other.heard > self._stuck_s:
                return f"process {number} has not answered for {self._stuck_s:g} s, {_last_step(other)}", True
        if self._number != 0:
            return None
        everyone = dict(sorted({**self._others, 0: self._mine}.items()))
        newest = max(one.place for one in everyone.values())
        name = f"step {newest[0]}" if newest[1] == 0 else f"call {newest[1]} after step {newest[0]}"
        for number, one in everyone.items():
            if one.since is not None and (one.is_gone or now - one.since > GRACE_S):
                if one.failed:
                    return f"process {number} failed, {_last_step(one)}: {one.failed}", False
                if one.place < newest:
                    return f"process {number} has ended, {_last_step(one)}, and others began {name}", False
        behind = [number for number, one in everyone.items() if one.place < newest and one.since is None]
        if behind and now - max(one.moved for one in everyone.values()) > self._stuck_s:
            numbers = ", ".join(map(str, behind))
            return f"process {numbers} did not begin {name} within {self._stuck_s:g} s of the others", True
        since = max((max(one.moved, one.idle) for one in everyone.values() if one.since is None), default=now)
        if any(one.since is not None and (one.failed or one.place < newest) for one in everyone.values()):
            return None  # it will be named within GRACE_S, and is what the others wait for
        if newest > (1, 0) and now - since > self._stuck_s:  # the first step compiles
            return f"no process has finished {name} within {self._stuck_s:g} s", True
        return None

    def _end(self, reason: str, shows_stacks: bool) -> None:
        self._is_ending.set()
        last = threading.Timer(_OTHERS_S + 2 * _LAST_WORDS_S, os._exit, (STATUS,))  # a stream may block
        last.daemon = True
        last.start()
        try:
            stderr = sys.__stderr__ or sys.stderr  # torch's excepthook replaces the other for as long as it runs
            print_line(f"jaxddp: {reason}: process {self._number} ends", stderr)
            if shows_stacks:
                faulthandler.dump_traceback(stderr)
            sys.stdout.flush()
            if not any(number == 0 and other.is_gone for number, other in self._others.items()):
                time.sleep(_LAST_WORDS_S)
            if self._number == 0:
                self._await_others()
        finally:
            os._exit(STATUS)  # at once without process 0: XLA aborts processes that miss it

    def _await_others(self) -> None:
        """Waits until the processes that answer have ended: without process 0 XLA would abort them."""
        deadline = time.monotonic() + _OTHERS_S
        while (now := time.monotonic()) < deadline:
            staying = [one for one in self._others.values() if not one.is_gone and now - one.heard < 8 * _BEAT_S]
            if not staying:
                return
            for other in staying:
                self._read(other)
            time.sleep(_BEAT_S / 10)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == self._pid and not issubclass(kind, KeyboardInterrupt):
            words = " ".join(f"{kind.__name__}: {error}".split())[:300].rstrip(": ")
            self._mine.hear({"failed": words}, now := time.monotonic())
            self._beat(now)
            with _without_sigterm():
                self.wait_for_end()
        self._excepthook(kind, error, trace)

    def _leave(self) -> None:
        failed = "it ended within a step" if self._is_in_step else None
        self._mine.hear({"left": True, "failed": failed}, now := time.monotonic())
        self._beat(now)

    def _forget(self) -> None:
        """Closes the connections in a child that was forked: they would outlive this process."""
        for other in self._others.values():
            if other.connection is not None:
                other.connection.close()


@contextlib.contextmanager
def _without_sigterm() -> Iterator[None]:
    """Ignores SIGTERM: a launcher that ends the others of a lost process would end this one before it has said why."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None of a handler that is not Python's


def _last_step(process: _Process) -> str:
    return f"its last step {process.place[0]}" + (f", its log {process.log}" if process.log else "")


_watchdog: Watchdog | None = None
_log: str | None = None  # of this process


def name_log(path: str) -> None:
    """Tells the other processes where this one's log is, for the line in which they say that it is lost."""
    global _log
    _log = path


def watch(job: Job, connections: Mapping[int, socket.socket], stuck_s: float, needs_first: bool = False) -> None:
    """Starts to watch the processes of a job; arguments are those of ``Watchdog``."""
    global _watchdog
    _watchdog = Watchdog(job, connections, stuck_s, needs_first)


def begin_step(is_call: bool = False) -> None:
    """Counts a training step of this process, or another call, that takes all processes of its job."""
    if _watchdog is not None:
        _watchdog.begin_step(is_call)


def end_step(is_done: Callable[[], bool] = lambda: True) -> None:
    """Notes that a training step, or another call, has returned; arguments are those of ``Watchdog.end_step``."""
    if _watchdog is not None:
        _watchdog.end_step(is_done)


def wait_for_end() -> None:
    """Called after an error of a collective, which is no more than a consequence if another process is gone."""
    if _watchdog is not None:
        _watchdog.wait_for_end()
