"""A training job under its launcher: what happens after each fault, as seen from outside.

Ranks report their steps through a named pipe, and the launcher's standard error is read, with the time of each line.
What is done by hand is what a scheduler or an operator would do: a job that has ended is started again, a full disk is
cleared once the run has ended, and what nobody else ends is ended after a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import usage
from .faults import FULL_DISK, KILL, LAUNCHER, PREEMPT, STOP, UNEXPECTED, Fault
from .guard import Workplace
from .program import Program

NOTICE_BOUND_S = 60.0  # after which a stopped rank is killed by hand
LEFT_BOUND_S = 20.0  # for which processes may outlive their launcher
BACK_BOUND_S = 240.0
START_BOUND_S = 300.0
_SAMPLE_S, _POLL_S = 2.0, 0.05
_ROOT = Path(__file__).parents[2]
# Without a disk of its own, ranks may not write larger files than this: checkpoints are, logs are not.
_FILE_BYTES = 2**18


class Job:
    """A program's processes. Their events and samples go to files: an hour of them takes tens of MiB of memory."""

    def __init__(self, program: Program, workplace: Workplace, records: Path) -> None:
        """Opens the pipe and the files of events, samples and what the launcher prints."""
        self._program, self._workplace, self._records = program, workplace, records
        self.launcher: subprocess.Popen[bytes] | None = None
        self.num_lines = 0  # of the launcher's standard error
        self._line_s: float | None = None  # when it had the first since the last fault
        self._pids: dict[int, int] = {}  # by rank, of those that were started last
        self._training: dict[int, int] = {}  # those whose steps are waited for
        self._step: tuple[int, int] | None = None  # pid and step of rank 0's last step
        self._first_step: dict[int, int] = {}  # of each of rank 0's processes
        self._last_step: dict[int, int] = {}  # of each process
        self.num_printed_bytes, self._launched_at = 0, time.time()
        self._known = usage.shared_memory()  # left by others, or by an earlier fault
        os.mkfifo(program.events)
        self._pipe = os.open(program.events, os.O_RDWR)  # it never ends for want of a writer
        self._has_ended = threading.Event()

    def __enter__(self) -> Job:
        """Starts the job, reads its events and samples what it uses."""
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._read_events, self._sample)]
        for thread in self._threads:
            thread.start()
        self.launch()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the job, and stops reading; the guard ends what is left."""
        self._has_ended.set()
        if self.launcher is not None:
            self.launcher.kill()
            self.launcher.wait()
        until(self._end_strays, LEFT_BOUND_S)
        os.write(self._pipe, b"\n")
        for thread in self._threads:
            thread.join()
        os.close(self._pipe)
        os.unlink(self._program.events)

    def launch(self) -> None:
        """Starts the launcher, as a scheduler would, for the first time or again."""
        temporary = self._workplace.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = os.environ | {usage.MARK: self._workplace.mark, "TMPDIR": str(temporary)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self._launched_at = time.time()
        self.launcher = subprocess.Popen(
            self._program.command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._note("launched")
        threading.Thread(target=self._read_lines, args=(self.launcher,), daemon=True).start()

    @property
    def step(self) -> int:
        """The last step of rank 0."""
        return 0 if self._step is None else self._step[1]

    def await_steps(self, count: int, until_s: float) -> str:
        """Waits until so many steps were taken by the processes that run.

        Returns:
            ``"steps"``, ``"time"`` once ``until_s`` of the monotonic clock is over, or ``"lost"`` if a process ended.
        """
        start, progress = self.step, (self._step, time.monotonic())
        self._training = dict(self._pids)
        while (now := time.monotonic()) < until_s:
            if self._step is not None and self.step - start >= count and len(self._pids) == self._program.num_ranks:
                return "steps"
            if self._step != progress[0]:
                progress = self._step, now
            assert self.launcher is not None
            is_lost = self.launcher.poll() is not None or not self._training.items() <= self._pids.items()
            if is_lost or now - progress[1] > START_BOUND_S:
                return "lost"
            time.sleep(_POLL_S)
        return "time"

    def endure(self, fault: Fault) -> dict[str, Any]:
        """Injects a fault, and waits until training goes on.

        Returns:
            A row: seconds until it was noticed, until all processes had ended and until the first step after it, the
            steps lost, and what was left behind.
        """
        assert self.launcher is not None
        old, launcher, num_lines = self._training or dict(self._pids), self.launcher, self.num_lines
        self._line_s = None
        pids, since, step = set(old.values()), time.monotonic(), self.step
        faulty = self._inject(fault)
        others = {*pids, launcher.pid} - {faulty}
        noticed_s: float | None = None
        ended_s: float | None = None
        launcher_ended_s: float | None = None
        by_hand, left = "", ""
        while True:
            now_s = time.monotonic() - since
            if noticed_s is None and not by_hand:
                if self._line_s is not None:
                    noticed_s = self._line_s - since
                elif not all(map(usage.is_alive, others)):
                    noticed_s = now_s
                elif fault.kind == STOP and now_s > NOTICE_BOUND_S:
                    by_hand = f"not noticed in {NOTICE_BOUND_S:g} s, then killed by hand"
                    self._kill({old[fault.rank]})
                if noticed_s is not None or by_hand:
                    self._note("noticed", since + (noticed_s or now_s))
            if ended_s is None and not any(map(usage.is_alive, pids)):
                ended_s = now_s
                self._note("ended")
                (self._workplace.folder / "disk" / "filler").unlink(missing_ok=True)
            if launcher.poll() is not None:
                launcher_ended_s = launcher_ended_s or now_s
                if ended_s is not None:  # as a scheduler would
                    self.launch()
                    launcher = self.launcher
                elif now_s - launcher_ended_s > LEFT_BOUND_S and not left:
                    left = self._left()
                    by_hand = f"ranks outlived their launcher by {LEFT_BOUND_S:g} s, then killed by hand"
                    self._end_strays()
            if ended_s is not None and self._step is not None and not pids & {self._step[0], *self._pids.values()}:
                break
            if now_s > BACK_BOUND_S and not by_hand.startswith("not back"):
                by_hand = f"not back after {BACK_BOUND_S:g} s, then all ended by hand"
                pids |= set(self._pids.values())
                self._kill({launcher.pid, *usage.descendants(launcher.pid)})
            elif now_s > 2 * BACK_BOUND_S:
                break
            time.sleep(_POLL_S)
        back_s = time.monotonic() - since
        taken = [self._last_step[pid] for pid in pids if pid in self._last_step]
        resumed = self._first_step.get(self._step[0], 1) - 1 if self._step is not None else 0
        left = left or self._left()
        self._end_strays()
        faults = [by_hand, f"left behind {left}" if left else "", fault.kind if fault.kind == UNEXPECTED else ""]
        check = "; ".join(filter(None, faults))
        return {
            "fault": fault.kind, "rank": fault.rank if fault.kind in (KILL, STOP) else None, "step": step,
            "noticed_s": noticed_s, "ended_s": ended_s, "back_s": back_s,
            "steps_lost": max(0, max(taken, default=step) - resumed), "lines": self.num_lines - num_lines,
            "left_behind": left or "nothing",
            "check": f"WRONG: {check}" if check and self._program.is_watched else check or "ok",
        }  # fmt: skip

    def finish(self) -> str:
        """Preempts the job for good, and waits for its end; what is left behind."""
        assert self.launcher is not None
        self._note("over")
        self.launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(NOTICE_BOUND_S)
        until(lambda: not self._strays(), LEFT_BOUND_S)
        self._launched_at = time.time()
        return self._left()

    def wait(self, timeout_s: float) -> int:
        """Waits for a job that ends by itself; its exit status."""
        assert self.launcher is not None
        try:
            return self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise OSError(f"training did not end within {timeout_s:g} s") from error

    def events(self) -> list[dict[str, Any]]:
        """The events of rank 0 and of the job, by time."""
        found = (event for event in _read(self._records / "events.jsonl") if not event.get("rank"))
        return sorted(found, key=lambda event: event["at_s"])

    def samples(self) -> list[dict[str, Any]]:
        """What the processes used."""
        return list(_read(self._records / "samples.jsonl"))

    def _inject(self, fault: Fault) -> int | None:
        """Does it, and gives the process that it hits if it is a single one."""
        assert self.launcher is not None
        if fault.kind == FULL_DISK:
            self._fill_disk()
        elif fault.kind == PREEMPT:
            self.launcher.terminate()
        elif fault.kind == LAUNCHER:
            self.launcher.kill()
            return self.launcher.pid
        elif fault.kind in (KILL, STOP):
            os.kill(pid := self._pids[fault.rank], signal.SIGKILL if fault.kind == KILL else signal.SIGSTOP)
            return pid
        return None

    def _fill_disk(self) -> None:
        disk = self._workplace.folder / "disk"
        if not self._workplace.has_disk:
            for pid in self._pids.values():
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FILE_BYTES, resource.RLIM_INFINITY))
            return
        with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))

    def _strays(self) -> set[int]:
        """Processes that the soak started, without the launcher that runs and those that it started."""
        assert self.launcher is not None
        current = {self.launcher.pid, *usage.descendants(self.launcher.pid)} if self.launcher.poll() is None else set()
        return usage.marked_processes(self._workplace.mark) - current

    def _left(self) -> str:
        """Processes, ports, shared memory and temporary folders of runs that are over; files are told once."""
        processes = self._strays()
        ports, memory = usage.listening_ports(processes), self._unused_memory()
        temporary = (self._workplace.folder / "tmp").iterdir()
        old = {path.name for path in temporary if path.stat().st_mtime < self._launched_at} - self._known
        self._known |= memory | old
        return ", ".join([
            *([f"{len(processes)} process{'es' * (len(processes) > 1)}"] if processes else []),
            *(f"port {port}" for port in sorted(ports)),
            *(f"/dev/shm/{name}" for name in sorted(memory)),
            *(f"temporary {name}" for name in sorted(old) if not name.startswith("torchinductor_")),  # torch's cache
        ])  # fmt: skip

    def _unused_memory(self) -> set[str]:
        """New files of /dev/shm that stay, and unused: those of other programs may only seem so for a moment."""
        unused = usage.shared_memory() - self._known

        def are_gone() -> bool:
            unused.intersection_update(usage.shared_memory())
            return not unused

        until(are_gone, LEFT_BOUND_S)
        return unused

    def _end_strays(self) -> bool:
        """Kills what runs without a launcher; whether nothing did."""
        self._kill(strays := self._strays())
        return not strays

    def _kill(self, pids: set[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _note(self, kind: str, at_s: float | None = None) -> None:
        """Adds an event of the job's own."""
        event = {"at_s": time.monotonic() if at_s is None else at_s, "kind": kind}
        self._add(event)
        with (self._records / "events.jsonl").open("a") as record:
            record.write(json.dumps(event) + "\n")

    def _add(self, event: dict[str, Any]) -> None:
        if event["kind"] == "started":
            self._pids[event["rank"]] = event["pid"]
        elif event["kind"] == "step":
            self._last_step[event["pid"]] = event["step"]
        if event["kind"] == "step" and event["rank"] == 0:
            self._first_step.setdefault(event["pid"], event["step"])
            self._step = event["pid"], event["step"]

    def _read_events(self) -> None:
        with (
            (self._records / "events.jsonl").open("a", buffering=1) as record,
            os.fdopen(os.dup(self._pipe), "r") as lines,
        ):
            for line in lines:
                if self._has_ended.is_set():
                    return
                self._add(json.loads(line))
                record.write(line)

    def _read_lines(self, launcher: subprocess.Popen[bytes]) -> None:
        assert launcher.stderr is not None
        with (self._records / "stderr.log").open("ab", buffering=0) as record, launcher.stderr as lines:
            for line in lines:
                self.num_lines += 1
                self._line_s = self._line_s or time.monotonic()
                self.num_printed_bytes += len(line)
                record.write(line)

    def _sample(self) -> None:
        with (self._records / "samples.jsonl").open("a", buffering=1) as record:
            while not self._has_ended.wait(_SAMPLE_S):
                for role, pid in self._roles():
                    if used := usage.usage_of(pid):
                        record.write(json.dumps({"at_s": time.monotonic(), "role": role, "pid": pid, **used}) + "\n")

    def _roles(self) -> Iterator[tuple[str, int]]:
        yield "soak itself", os.getpid()
        if (launcher := self.launcher) is not None and launcher.poll() is None:
            agent = "torchrun's agent"
            yield ("launcher" if self._program.is_watched else agent), launcher.pid
            yield from ((agent, pid) for pid in usage.children(launcher.pid) if self._program.is_watched)
        yield from ((f"rank {rank}", pid) for rank, pid in list(self._pids.items()))


def _read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        yield from map(json.loads, lines)


def until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Waits until something is so; whether it is."""
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return is_so()
