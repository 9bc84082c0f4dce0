"""Soak: training goes on for an hour, while faults from a seeded list happen to it in the first three quarters.

Each side trains the same model under the same list: jaxddp's ``train`` or a program of torchref, with this project's
launcher and watchdog, and then, for a shorter time, the same program of torch under torchrun alone. The last quarter
is without faults, so that memory, file handles and threads are seen to grow if they do. At the end the weights must
be those of a run of as many steps that nothing happened to.

What is done by hand is what a scheduler or an operator would do: a job that has ended is started again, a full disk is
cleared once the run has ended, and what nobody else ends is ended after a bound.

Goodput is the share of the time in which steps were taken for the first time. A moment's part is that of the next
event:

| next event       | part                                                                                   |
|------------------|----------------------------------------------------------------------------------------|
| step             | useful steps if it was never taken before, else repeated steps; `save_s` of it: saving |
| compiled         | compilation, for the seconds that it took; what is before it is starting or restarting |
| started, ended   | start before the first step of all, restart after it                                   |
| noticed          | detection: a fault has happened, and nobody knows                                      |
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from .benchmark import FAILED, WRONG, Benchmark, Case, Options, Say
from .render import CHECK, Column, Row, by, new_figure, percent
from .soak_guard import MARK, descendants, marked_processes
from .soak_rank import ENDLESS, SIDES, Program, functions_of

KILL, STOP, FULL_DISK, PREEMPT, LAUNCHER = KINDS = (
    "rank killed (SIGKILL)", "rank stopped (SIGSTOP)", "disk full", "preempted (SIGTERM)", "launcher killed (SIGKILL)",
)  # fmt: skip
UNEXPECTED = "unexpected end"  # of a run to which nothing was done
PARTS = USEFUL, REPEATED, SAVING, START, COMPILATION, DETECTION, RESTART = (
    "useful steps", "repeated steps", "saving", "start", "compilation", "detection", "restart",
)  # fmt: skip
NOTICE_BOUND_S = 60.0  # after which a stopped rank is killed by hand
LEFT_BOUND_S = 20.0  # for which processes may outlive their launcher
BACK_BOUND_S, START_BOUND_S = 240.0, 300.0
CHECKPOINT_EVERY, STEP_S, MAX_RESTARTS, DISK_BYTES = 50, 0.1, 10_000, 64 * 2**20
_POLL_S, _SAMPLE_S = 0.05, 2.0
# Growth over a life that is called flat: of memory a share, as pages that were freed are kept and reused.
_FLAT = {"memory_mib": 0.05, "handles": 2.0, "threads": 2.0}
_WARM_UP_S, _SHORTEST_S = 60.0, 180.0  # of a life
FAULTS, GOODPUT, USAGE = "Each fault", "Goodput and its parts", "What processes use"


class Fault(NamedTuple):
    """A fault: which rank is killed or stopped, and after how many steps since the recovery from the one before."""

    kind: str
    rank: int
    after_steps: int


@dataclasses.dataclass(frozen=True)
class SoakSetup:
    """A side's soak; ``faults`` are injected in place of those that are drawn, and ``quiet_steps`` follow the last."""

    side: str
    minutes: float
    num_ranks: int
    seed: int
    faults: tuple[Fault, ...] = ()
    step_s: float = STEP_S
    quiet_steps: int = ENDLESS


def draw_faults(seed: int, num_ranks: int, kinds: Sequence[str] = KINDS) -> Iterator[Fault]:
    """Draws faults without end, every kind once in each round: every side gets the same list.

    Example:
        >>> import itertools
        >>> [fault.kind for fault in itertools.islice(draw_faults(0, 2), 5)].count(KILL)
        1
    """
    rng = random.Random(seed)
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            yield Fault(kind, rng.randrange(num_ranks), rng.randint(20, 200))


def cases(options: Options) -> list[Case]:
    """The sides: jaxddp, torchref or both for the minutes asked for, and torchrun alone for 3/8 of them."""
    minutes = options.minutes or (3.0 if options.quick else 60.0)
    sides = {"jax": SIDES[:1], "torch": SIDES[1:2], "both": SIDES[:2]}[options.framework or "jax"]
    num_ranks, seed = options.ranks or 2, options.seed or 0
    if num_ranks < 2:
        raise ValueError(f"ranks (={num_ranks}) must be at least 2: one rank waits for no other")
    if seed < 0:
        raise ValueError(f"seed (={seed}) must not be negative")
    times = [*((side, minutes) for side in sides), (SIDES[2], 0.375 * minutes)]
    return [Case(side, SoakSetup(side, of_side, num_ranks, seed)) for side, of_side in times]


def measure(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """Runs a side: a row per fault, one of the whole, and one per kind of process."""
    setup: SoakSetup = case.setup
    say(f"{setup.side}: {setup.minutes:g} minutes, {setup.num_ranks} ranks, faults of seed {setup.seed}")
    common = {"framework": setup.side, "num_ranks": setup.num_ranks, "seed": setup.seed}
    records = (case.folder or Path(tempfile.mkdtemp())) / setup.side.replace(" ", "-").replace("/", "-")
    records.mkdir()
    with guarded() as (folder, mark, has_disk):
        program = Program(
            setup.side, setup.num_ranks, str(records / "events.jsonl"), str(folder / "disk" / "checkpoints"),
            CHECKPOINT_EVERY, str(records), step_s=setup.step_s, max_restarts=MAX_RESTARTS, seed=setup.seed,
        )  # fmt: skip
        Path(program.checkpoint).mkdir()
        since_s, seconds, num_faults = time.monotonic(), 60 * setup.minutes, 0
        with Job(program, folder, mark, records) as job:
            kinds = [kind for kind in KINDS if has_disk or kind != FULL_DISK]
            faults = setup.faults or draw_faults(setup.seed, setup.num_ranks, kinds)
            for row in _endured(job, faults, setup, since_s + 0.75 * seconds, since_s + seconds):
                num_faults += 1
                say(
                    f"{setup.side}: {row['fault']} at step {row['step']}: back after {row['back_s']:.1f} s,"
                    f" {row['check']}"
                )
                yield common | row
            left = job.finish()
            parts = job.goodput.parts
        whole = {
            "table": GOODPUT, "minutes": sum(parts.values()) / 60, "num_faults": num_faults, "parts_s": parts,
            "goodput": parts[USEFUL] / sum(parts.values()), "left_behind": left or "nothing",
            **_compare(program, folder, mark, records),
        }  # fmt: skip
        if left and program.is_watched and whole["check"] == "ok":
            whole["check"] = f"{WRONG}left behind {left}"
        yield common | whole
        yield from (common | {"table": USAGE} | row for row in job.longest_lives())


def _endured(
    job: Job, faults: Iterable[Fault], setup: SoakSetup, faulty_until_s: float, end_s: float
) -> Iterator[dict[str, Any]]:
    """Injects faults, waits for the end of the time, and gives the rows of the faults."""
    if job.await_steps(1, time.monotonic() + START_BOUND_S) != "steps":
        raise OSError(f"training did not start within {START_BOUND_S:g} s, or ended")
    for fault in faults:
        while (why := job.await_steps(fault.after_steps, faulty_until_s)) == "lost":
            yield job.endure(Fault(UNEXPECTED, 0, 0))
        if why == "time":
            break
        yield job.endure(fault)
    while job.await_steps(setup.quiet_steps, end_s) == "lost":
        yield job.endure(Fault(UNEXPECTED, 0, 0))


def _compare(program: Program, folder: Path, mark: str, records: Path) -> dict[str, Any]:
    """Trains as many steps as the newest checkpoint has, undisturbed, and compares the weights."""
    weights, undisturbed = functions_of(program.side)[1], folder / "undisturbed"
    (records / undisturbed.name).mkdir()
    undisturbed.mkdir()
    try:
        step, found = weights(program.checkpoint)
        again = dataclasses.replace(
            program, checkpoint=str(undisturbed), steps=step, checkpoint_every=0, step_s=0.0, max_restarts=0,
            log_dir=str(records / undisturbed.name), events=str(records / undisturbed.name / "events.jsonl"),
        )  # fmt: skip
        with Job(again, folder, mark, records / undisturbed.name) as job:
            status = job.launcher.wait(START_BOUND_S + 0.1 * step)
        same_step, expected = weights(str(undisturbed))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return {"check": f"{FAILED}{error}"}
    if status or same_step != step:
        return {"check": f"{FAILED}the undisturbed run ended with status {status} at step {same_step} of {step}"}
    difference = max(float(np.abs(found[name] - array).max()) for name, array in expected.items())
    check = "ok" if difference == 0 else f"{WRONG}other weights than those of an undisturbed run"
    return {"step": step, "max_weight_difference": difference, "check": check}


class Job:
    """A program's processes, seen from outside: ranks append their steps to a file, the launcher prints to another."""

    launcher: subprocess.Popen[bytes]

    def __init__(self, program: Program, folder: Path, mark: str, records: Path) -> None:
        """Makes the files."""
        self._program, self._folder, self._mark, self._records = program, folder, mark, records
        Path(program.events).touch()
        self._file = open(program.events, "rb")  # noqa: SIM115
        self._printed = records / "launcher.log"
        self._pids: dict[int, int] = {}  # by rank, of those that were started last
        self._last: tuple[int, int] | None = None  # pid and step of rank 0's last step
        self._first_step: dict[int, int] = {}  # of each of rank 0's processes
        self._last_step: dict[int, int] = {}  # of each process
        self._lives: dict[tuple[str, int], list[tuple[float, ...]]] = {}
        self._sampled_s, self._launched_at, self._known = 0.0, time.time(), set(os.listdir("/dev/shm"))
        self.goodput = Goodput()

    def __enter__(self) -> Job:
        """Starts the job."""
        self.launch()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the job; the guard ends what is left."""
        self.launcher.kill()
        self.launcher.wait()
        self._kill(self._strays())
        self._file.close()

    def launch(self) -> None:
        """Starts the launcher, as a scheduler would, for the first time or again."""
        (temporary := self._folder / "tmp").mkdir(exist_ok=True)
        environment = os.environ | {MARK: self._mark, "TMPDIR": str(temporary)}
        root = str(Path(__file__).parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        self._launched_at = time.time()
        with self._printed.open("ab") as printed:
            self.launcher = subprocess.Popen(
                self._program.command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=printed, start_new_session=True, cwd=self._folder,
            )  # fmt: skip
        self._note("launched")

    def poll(self) -> None:
        """Reads what ranks have said, and now and then what processes use."""
        time.sleep(_POLL_S)
        for line in self._file:
            event = json.loads(line)
            if event["kind"] == "started":
                self._pids[event["rank"]] = event["pid"]
            elif event["kind"] == "step":
                self._last_step[event["pid"]] = event["step"]
                if event["rank"] == 0:
                    self._first_step.setdefault(event["pid"], event["step"])
                    self._last = event["pid"], event["step"]
            if event["rank"] == 0:
                self.goodput.add(event)
        if time.monotonic() - self._sampled_s > _SAMPLE_S:
            self._sampled_s = time.monotonic()
            running = {f"rank {rank}": pid for rank, pid in self._pids.items()}
            for role, pid in (running | {"launcher": self.launcher.pid, "soak itself": os.getpid()}).items():
                if used := usage_of(pid):
                    self._lives.setdefault((role, pid), []).append((self._sampled_s, *used))

    def await_steps(self, count: int, until_s: float) -> str:
        """Waits until so many steps were taken by the processes that run.

        Returns:
            ``"steps"``, ``"time"`` once ``until_s`` of the monotonic clock is over, or ``"lost"`` if a process ended.
        """
        start, progress, training = self.step, (self._last, time.monotonic()), dict(self._pids)
        while (now := time.monotonic()) < until_s:
            self.poll()
            if self._last and self.step - start >= count and len(self._pids) == self._program.num_ranks:
                return "steps"
            if self._last != progress[0]:
                progress = self._last, now
            is_lost = self.launcher.poll() is not None or not training.items() <= self._pids.items()
            if is_lost or now - progress[1] > START_BOUND_S:
                return "lost"
        return "time"

    @property
    def step(self) -> int:
        """The last step of rank 0."""
        return self._last[1] if self._last else 0

    def endure(self, fault: Fault) -> dict[str, Any]:
        """Injects a fault, and waits until training goes on.

        Returns:
            A row: seconds until it was noticed, until all processes had ended and until the first step after it, the
            steps lost, and what was left behind.
        """
        old, num_printed, since, step = dict(self._pids), self._printed.stat().st_size, time.monotonic(), self.step
        pids, faulty = set(old.values()), self._inject(fault)
        others = {*pids, self.launcher.pid} - {faulty}
        noticed_s: float | None = None
        ended_s: float | None = None
        launcher_ended_s: float | None = None
        by_hand, left = "", ""
        while True:
            self.poll()
            now_s = time.monotonic() - since
            if noticed_s is None and not by_hand:
                if self._printed.stat().st_size > num_printed or not all(map(is_alive, others)):
                    noticed_s = now_s
                elif fault.kind == STOP and now_s > NOTICE_BOUND_S:
                    by_hand = f"not noticed in {NOTICE_BOUND_S:g} s, then killed by hand"
                    self._kill({old[fault.rank]})
                if noticed_s is not None or by_hand:
                    self._note("noticed")
            if ended_s is None and not any(map(is_alive, pids)):
                ended_s = now_s
                self._note("ended")
                (self._folder / "disk" / "filler").unlink(missing_ok=True)
            if self.launcher.poll() is not None:
                launcher_ended_s = launcher_ended_s or now_s
                if ended_s is not None:
                    self.launch()
                elif now_s - launcher_ended_s > LEFT_BOUND_S and not left:
                    left = self._left()
                    by_hand = f"ranks outlived their launcher by {LEFT_BOUND_S:g} s, then killed by hand"
                    self._kill(self._strays())
            if ended_s is not None and self._last and not pids & {self._last[0], *self._pids.values()}:
                break
            if now_s > BACK_BOUND_S and not by_hand.startswith("not back"):
                by_hand = f"not back after {BACK_BOUND_S:g} s, then all ended by hand"
                pids |= set(self._pids.values())
                self._kill({self.launcher.pid, *descendants(self.launcher.pid)})
            elif now_s > 2 * BACK_BOUND_S:
                break
        back_s = time.monotonic() - since
        taken = [self._last_step[pid] for pid in pids if pid in self._last_step]
        resumed = self._first_step.get(self._last[0], 1) - 1 if self._last else 0
        left = left or self._left()
        self._kill(self._strays())
        said = [by_hand, f"left behind {left}" if left else "", fault.kind if fault.kind == UNEXPECTED else ""]
        check = "; ".join(filter(None, said))
        return {
            "table": FAULTS, "fault": fault.kind, "rank": fault.rank if fault.kind in (KILL, STOP) else None,
            "step": step, "noticed_s": noticed_s, "ended_s": ended_s, "back_s": back_s,
            "steps_lost": max(0, max(taken, default=step) - resumed), "left_behind": left or "nothing",
            "check": f"{WRONG}{check}" if check and self._program.is_watched else check or "ok",
        }  # fmt: skip

    def finish(self) -> str:
        """Preempts the job for good, and waits for its end; what is left behind."""
        self._note("over")
        self.launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(NOTICE_BOUND_S)
        until(lambda: not self._strays(), LEFT_BOUND_S)
        self._launched_at = time.time()
        return self._left()

    def _inject(self, fault: Fault) -> int | None:
        """Does it, and gives the process that it hits if it is a single one."""
        if fault.kind == FULL_DISK:
            with (self._folder / "disk" / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))
        elif fault.kind == PREEMPT:
            self.launcher.terminate()
        elif fault.kind == LAUNCHER:
            self.launcher.kill()
            return self.launcher.pid
        elif fault.kind in (KILL, STOP):
            os.kill(pid := self._pids[fault.rank], signal.SIGKILL if fault.kind == KILL else signal.SIGSTOP)
            return pid
        return None

    def _strays(self) -> set[int]:
        """Processes that the soak started, without the launcher that runs and those that it started."""
        current = {self.launcher.pid, *descendants(self.launcher.pid)} if self.launcher.poll() is None else set()
        return marked_processes(self._mark) - current

    def _left(self) -> str:
        """Processes, ports, shared memory and temporary folders of runs that are over; files are told once."""
        processes = self._strays()
        new = set(os.listdir("/dev/shm")) - self._known
        until(lambda: not new & set(os.listdir("/dev/shm")), LEFT_BOUND_S)  # other programs' come and go
        new &= set(os.listdir("/dev/shm"))
        old = {path.name for path in (self._folder / "tmp").iterdir() if path.stat().st_mtime < self._launched_at}
        old = {name for name in old - self._known if not name.startswith("torchinductor_")}  # torch's cache
        self._known |= new | old
        return ", ".join([
            *([f"{len(processes)} process{'es' * (len(processes) > 1)}"] if processes else []),
            *(f"port {port}" for port in sorted(listening_ports(processes))),
            *(f"/dev/shm/{name}" for name in sorted(new)), *(f"temporary {name}" for name in sorted(old)),
        ])  # fmt: skip

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _note(self, kind: str) -> None:
        """Adds an event of the job's own."""
        self.goodput.add({"at_s": time.monotonic(), "kind": kind})

    def longest_lives(self) -> Iterator[dict[str, Any]]:
        """For each role the process that lived longest: the median of what it used, how it grew, whether that is flat.

        Growth is the slope of a least-squares line over the life, without its first minute, times its length.
        """
        roles = by([{"role": role, "life": np.array(life)} for (role, _), life in self._lives.items()], "role")
        for (role,), some in roles.items():
            life = max((one["life"] for one in some), key=lambda life: life[-1, 0] - life[0, 0])
            row = {"role": role, "lived_s": float(life[-1, 0] - life[0, 0])}
            if row["lived_s"] < _SHORTEST_S:
                yield row | {"check": "too short to judge"}
                continue
            warm, grown = life[life[:, 0] - life[0, 0] >= _WARM_UP_S], []
            for place, (name, limit) in enumerate(_FLAT.items(), 1):
                slope = np.polyfit(warm[:, 0] - warm[0, 0], warm[:, place], 1)[0]
                row[name], growth = median(warm[:, place].tolist()), float(slope * (warm[-1, 0] - warm[0, 0]))
                row[f"{name}_growth"] = growth
                grown += [name] if growth > limit * (row[name] if name == "memory_mib" else 1) else []
            yield row | {"check": f"{WRONG}{', '.join(grown)} grow" if grown else "flat"}


class Goodput:
    """Divides the time from the first to the last event of rank 0 and of the job: ``parts``, in seconds."""

    def __init__(self) -> None:
        """Starts with nothing."""
        self.parts, self._since_s, self._newest = dict.fromkeys(PARTS, 0.0), 0.0, 0

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds an event, and the time since the one before."""
        seconds, self._since_s = event["at_s"] - (self._since_s or event["at_s"]), event["at_s"]
        starting, kind = RESTART if self._newest else START, event["kind"]
        if kind == "step":
            self.parts[SAVING] += (saving := min(seconds, event["save_s"]))
            self.parts[USEFUL if event["step"] > self._newest else REPEATED] += seconds - saving
            self._newest = max(self._newest, event["step"])
        elif kind == "compiled":
            self.parts[COMPILATION] += (compiling := min(seconds, event["seconds"]))
            self.parts[starting] += seconds - compiling
        else:
            self.parts[DETECTION if kind == "noticed" else starting] += seconds


@contextlib.contextmanager
def guarded() -> Iterator[tuple[Path, str, bool]]:
    """A temporary folder, the mark of the soak's processes, and whether ``disk`` in it is a disk that can be filled.

    A process of its own ends all marked processes, however the soak ends.
    """
    mark, folder = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="jaxddp-soak-"))
    (disk := folder / "disk").mkdir()
    guard = [sys.executable, str(Path(__file__).with_name("soak_guard.py")), mark, str(folder)]
    with subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True) as process:  # it outlives Ctrl-C
        assert process.stdin is not None
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "jaxddp-soak", str(disk)]
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(mount, capture_output=True)
        try:
            yield folder, mark, disk.is_mount()
        finally:
            process.stdin.close()
            process.wait(60)


def until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Waits until something is so; whether it is."""
    deadline = time.monotonic() + seconds
    while not is_so() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return is_so()


def is_alive(pid: int) -> bool:
    """Whether a process runs or is stopped; one that has ended and was not waited for is not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def usage_of(pid: int) -> tuple[float, ...]:
    """Resident memory in MiB, open file handles and threads of a process; empty if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        counts = [len(os.listdir(f"/proc/{pid}/{folder}")) for folder in ("fd", "task")]
        return (pages * os.sysconf("SC_PAGE_SIZE") / 2**20, *counts) if pages else ()
    return ()


def listening_ports(pids: Iterable[int]) -> set[int]:
    """TCP ports at which processes listen."""
    sockets = set()
    for path in (path for pid in pids for path in Path(f"/proc/{pid}/fd").glob("*")):
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(path))
    tables = (path.read_text() for name in ("tcp", "tcp6") if (path := Path("/proc/self/net", name)).exists())
    rows = [line.split() for table in tables for line in table.splitlines()]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def sum_up(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The faults of each kind and side as one row."""
    for (kind, side), some in by([row for row in rows if row.get("fault")], "fault", "framework").items():
        behind = [row["left_behind"] for row in some if row["left_behind"] != "nothing"]
        odd = sorted(
            (row["check"] for row in some if row["check"] != "ok"), key=lambda check: not check.startswith(WRONG)
        )
        row: dict[str, Any] = {
            "fault": kind, "framework": side, "tried": len(some),
            "steps_lost": sum(r["steps_lost"] for r in some) / len(some),
            "noticed": sum(r["noticed_s"] is not None for r in some),
            "left_behind": f"{behind[0]} ({len(behind)} of {len(some)})" if behind else "nothing",
            "check": f"{odd[0]} ({len(odd)} of {len(some)})" if odd else "ok",
        }  # fmt: skip
        for name in ("noticed_s", "ended_s", "back_s"):
            times = [r[name] for r in some if r[name] is not None]
            row[name] = (median(times), max(times)) if times else None
        yield row


def plot(rows: Sequence[Row]) -> Iterable[Any]:
    """The parts of each side as shares of its time."""
    wholes = [row for row in rows if row.get("parts_s")]
    if wholes:
        figure, axes = new_figure("Where the time went", height=1 + 0.5 * len(wholes))
        left = np.zeros(len(wholes))
        for part in PARTS:
            shares = np.array([100 * row["parts_s"][part] / sum(row["parts_s"].values()) for row in wholes][::-1])
            axes[0][0].barh([row["framework"] for row in wholes][::-1], shares, left=left, label=part)
            left += shares
        axes[0][0].set_xlabel("% of the time")
        figure.legend(loc="outside lower center", ncols=len(PARTS))
        yield figure


def _seconds(value: Any) -> str:
    return " - ".join(f"{one:.1f}" for one in value) if isinstance(value, list | tuple) else f"{value:,.1f}"


def _times(unit: str) -> tuple[Column, ...]:
    names = (("time to detect", "noticed_s"), ("all ended", "ended_s"), ("time to recover", "back_s"))
    return (
        *(Column(name, key, unit, _seconds) for name, key in names),
        Column("steps lost", "steps_lost", form=_seconds),
    )


def _part(name: str) -> Callable[[Row], float | None]:
    return lambda row: (row.get("parts_s") or {}).get(name)


_HEAD = (Column("fault"), Column("side", "framework"))
BENCHMARK = Benchmark(
    "soak", "training while ranks are killed and stopped: what faults cost, and what stays behind",
    ("quick", "ranks", "minutes", "seed", "framework"), cases, measure,
    {
        "Faults by kind": (
            *_HEAD, Column("tried"), Column("noticed"), *_times("s, median - longest"),
            Column("left behind", "left_behind"), CHECK,
        ),
        GOODPUT: (
            Column("side", "framework"), Column("minutes", form=_seconds), Column("faults", "num_faults"),
            Column("steps", "step"), Column("goodput", form=percent),
            *(Column(part, _part(part), "s", _seconds) for part in PARTS),
            Column("max diff", "max_weight_difference", form=str), CHECK,
        ),
        USAGE: (
            Column("process", "role"), Column("side", "framework"), Column("lived", "lived_s", "s", _seconds),
            *(Column(name, key, form=_seconds) for what in _FLAT
              for name, key in ((what.replace("_mib", ", MiB"), what), ("growth", f"{what}_growth"))), CHECK,
        ),
        FAULTS: (
            *_HEAD, Column("rank"), Column("at step", "step"), *_times("s"), Column("left behind", "left_behind"),
            CHECK,
        ),
    },
    plot, sum_up,
    (
        "time to detect: until another process or the launcher printed a line or ended; a full disk is noticed by the"
        " next save. time to recover: until the first step after the restart. steps lost are repeated",
        "processes: of each kind the one that lived longest; growth: slope over its life, without its start",
    ),
)  # fmt: skip
