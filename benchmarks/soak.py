"""Soak: ``train`` goes on for an hour, while faults from a seeded list happen to it in the first three quarters.

The command is watched from outside: what it prints, its processes, and its checkpoints, one every 10 steps. The last
quarter is without faults, so that growth is seen. Then as many steps are trained undisturbed: the weights must be the
same, and the time that this would have taken, of the time that it took, is the goodput.

By hand is done what a scheduler or an operator would do: a job that has ended is started again, a full disk is cleared
once the run has ended, and ranks that nobody else ends are ended after a bound.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from jaxddp.cli.launch import child_command

from .benchmark import WRONG, Benchmark, Case, Options, Say
from .render import CHECK, Column, Row, by, new_figure, percent

KILL, STOP, FULL_DISK, PREEMPT, LAUNCHER = KINDS = (
    "rank killed (SIGKILL)", "rank stopped (SIGSTOP)", "disk full", "preempted (SIGTERM)", "launcher killed (SIGKILL)",
)  # fmt: skip
CHECKPOINT_EVERY, ENDLESS, STUCK_S = 10, 10**9, 10
END_BOUND_S, BACK_BOUND_S = 60.0, 300.0  # until ranks are ended by hand; until the soak gives up
# Growth in the quiet time that is called flat: of memory a share, as pages that were freed are kept and reused.
_FLAT = {"memory_mib": 0.05, "handles": 2.0, "threads": 2.0}
_WARM_UP_S, _SHORTEST_S = 30.0, 120.0  # of the quiet time
_MARK = "JAXDDP_SOAK"  # in the environment of all that a soak starts
FAULTS, WHOLE, USAGE = "Each fault", "The whole", "What processes use"
Fault = tuple[str, int, float]  # kind, rank that is killed or stopped, seconds since the recovery from the one before


class SoakSetup(NamedTuple):
    """A package's soak; ``faults`` are injected in place of those that are drawn, and 5 s follow the last."""

    package: str
    minutes: float
    num_ranks: int
    seed: int
    faults: tuple[Fault, ...] = ()


def draw_faults(seed: int, num_ranks: int, kinds: Sequence[str] = KINDS) -> Iterator[Fault]:
    """Draws faults without end, every kind once in each round: both packages get the same list."""
    rng = random.Random(seed)
    while True:
        yield from ((kind, rng.randrange(num_ranks), rng.uniform(2, 20)) for kind in rng.sample(kinds, len(kinds)))


def cases(options: Options) -> list[Case]:
    """A case for each package that is asked for."""
    minutes = options.minutes or (3.0 if options.quick else 60.0)
    num_ranks, seed = options.ranks or 2, options.seed or 0
    if num_ranks < 2:
        raise ValueError(f"ranks (={num_ranks}) must be at least 2: one rank waits for no other")
    if seed < 0:
        raise ValueError(f"seed (={seed}) must not be negative")
    packages = {"jax": ["jaxddp"], "torch": ["torchref"], "both": ["jaxddp", "torchref"]}[options.framework or "jax"]
    return [Case(package, SoakSetup(package, minutes, num_ranks, seed)) for package in packages]


def measure(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """Soaks a package: a row per fault, one of the whole, and one per process."""
    setup: SoakSetup = case.setup
    say(f"{setup.package}: {setup.minutes:g} minutes, {setup.num_ranks} ranks, faults of seed {setup.seed}")
    common = {"framework": setup.package, "num_ranks": setup.num_ranks, "seed": setup.seed}
    records, since_s, num_faults = case.folder or Path(tempfile.mkdtemp()), time.monotonic(), 0
    end_s = since_s + 60 * setup.minutes
    with temporary_disk() as (folder, has_disk):
        kinds = [kind for kind in KINDS if has_disk or kind != FULL_DISK]
        with Job(setup, folder / "disk" / "ck", records / f"{setup.package}.log", ENDLESS) as job:
            job.await_step(1)
            for kind, rank, seconds in setup.faults or draw_faults(setup.seed, setup.num_ranks, kinds):
                time.sleep(seconds)
                if time.monotonic() > end_s - 15 * setup.minutes:
                    break
                yield common | (row := job.endure(kind, rank))
                num_faults += 1
                say(f"{setup.package}: {kind} at step {row['step']}: back after {row['back_s']:.1f} s, {row['check']}")
            quiet_s = 5.0 if setup.faults else max(0.0, end_s - time.monotonic())
            usage = list(usage_over(job.pids(), quiet_s))
            left, seconds = job.finish(), time.monotonic() - since_s
        step, found = newest_weights(setup.package, folder / "disk" / "ck")
        with Job(setup, folder / "again", records / f"{setup.package}-undisturbed.log", step) as job:
            first = job.await_step(1)
            since_last_s = time.monotonic()
            job.await_step(step, BACK_BOUND_S + 10.0 * step)
            per_step_s = (time.monotonic() - since_last_s) / max(1, step - first)
        expected = newest_weights(setup.package, folder / "again")[1]
    difference = max(float(np.abs(found[name] - array).max()) for name, array in expected.items())
    wrong = [*(["other weights than those of an undisturbed run"] if difference else []), *([left] if left else [])]
    yield common | {
        "table": WHOLE, "minutes": seconds / 60, "num_faults": num_faults, "step": step,
        "goodput": step * per_step_s / seconds, "max_weight_difference": difference,
        "check": f"{WRONG}{'; '.join(wrong)}" if wrong else "ok",
    }  # fmt: skip
    yield from (common | {"table": USAGE} | row for row in usage)


@contextlib.contextmanager
def temporary_disk() -> Iterator[tuple[Path, bool]]:
    """A temporary folder, and whether ``disk`` in it is a disk of 256 MiB, which takes the right to mount."""
    with tempfile.TemporaryDirectory(prefix="jaxddp-soak-", ignore_cleanup_errors=True) as name:
        (disk := Path(name, "disk")).mkdir()
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "jaxddp-soak", disk], capture_output=True)
        try:
            yield Path(name), disk.is_mount()
        finally:
            if disk.is_mount():
                subprocess.run(["umount", "--lazy", disk], check=False)


def newest_weights(package: str, folder: Path) -> tuple[int, dict[str, np.ndarray]]:
    """The step and the parameters of the newest checkpoint."""
    step = newest_step(folder)
    if package == "jaxddp":
        arrays = dict(np.load(folder / str(step) / "state.npz"))
    else:
        import torch

        tensors = torch.load(folder / str(step) / "state.pt", weights_only=True)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return step, {name: array for name, array in arrays.items() if name.startswith("params.")}


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=0)


class Job:
    """A run of ``train``, seen from outside; what it starts has a mark, and ends with it."""

    launcher: subprocess.Popen[bytes]

    def __init__(self, setup: SoakSetup, checkpoints: Path, log: Path, steps: int) -> None:
        """Makes the command."""
        self._checkpoints, self._log, self._mark = checkpoints, log, f"{_MARK}={uuid.uuid4().hex}"
        options = {
            "processes": setup.num_ranks, "devices": setup.num_ranks, "max-restarts": ENDLESS, "stuck-s": STUCK_S,
            "model": "byte_shallow", "batch-size": 4 * setup.num_ranks, "steps": steps, "seed": setup.seed,
            "checkpoint": checkpoints, "checkpoint-every": CHECKPOINT_EVERY,
        }  # fmt: skip
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._command = ["-m", setup.package, "train", "--resume", *flags]

    def __enter__(self) -> Job:
        """Starts the job."""
        self.launch()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the job, and whatever it started."""
        self.launcher.kill()
        self.launcher.wait()
        _kill(self._marked())

    def launch(self) -> None:
        """Starts the launcher, as a scheduler would, for the first time or again."""
        root = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {_MARK: self._mark.partition("=")[2], "PYTHONPATH": root}
        with self._log.open("ab") as log:
            self.launcher = subprocess.Popen(
                child_command(self._command), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def step(self) -> int:
        """Of the newest checkpoint."""
        return newest_step(self._checkpoints)

    def pids(self) -> dict[str, int]:
        """The launcher and the ranks, its children, by role."""
        found = {"launcher": self.launcher.pid}
        for pid in self._marked():
            with contextlib.suppress(OSError, StopIteration):
                if int(_stat(pid)[1]) == self.launcher.pid:
                    rank = next(one for one in _environment(pid) if one.startswith("RANK="))
                    found[f"rank {rank[5:]}"] = pid
        return found

    def await_step(self, step: int, seconds: float = BACK_BOUND_S) -> int:
        """Waits for a checkpoint of this step or a later one, and gives its step."""
        deadline = time.monotonic() + seconds
        while self.step < step:
            time.sleep(0.05)
            if time.monotonic() > deadline:
                raise OSError(f"no checkpoint of step {step} or later came: see {self._log}")
        return self.step

    def endure(self, kind: str, rank: int) -> dict[str, Any]:
        """Injects a fault, and waits for the first checkpoint of those that train after it.

        Returns:
            A row: seconds until it was noticed, until all ranks had ended and until training was back, and what was
            left behind.
        """
        roles, num_printed, since, step = self.pids(), self._log.stat().st_size, time.monotonic(), self.step
        old = {pid for role, pid in roles.items() if role != "launcher"}
        others = set(roles.values()) - {self._inject(kind, roles, rank)}
        noticed_s: float | None = None
        ended_s: float | None = None
        said: list[str] = []
        saved = step
        while ended_s is None or self.step <= saved:
            time.sleep(0.05)
            now_s = time.monotonic() - since
            if noticed_s is None and not said:
                if self._log.stat().st_size > num_printed or not all(map(is_alive, others)):
                    noticed_s = now_s
            if ended_s is None and not any(map(is_alive, old)):
                ended_s, saved = now_s, self.step
                (self._checkpoints.parent / "filler").unlink(missing_ok=True)
            elif ended_s is None and now_s > END_BOUND_S and not said:
                said = [f"ranks were ended by hand after {END_BOUND_S:g} s"]
                _kill(old)
            if ended_s is not None and self.launcher.poll() is not None:
                said += [left] if (left := self._left()) else []
                self.launch()
            if now_s > BACK_BOUND_S:
                raise OSError(f"{kind} at step {step}: not back after {BACK_BOUND_S:g} s, see {self._log}")
        return {
            "table": FAULTS, "fault": kind, "rank": rank if kind in (KILL, STOP) else None, "step": step,
            "noticed_s": noticed_s, "ended_s": ended_s, "back_s": time.monotonic() - since,
            "check": f"{WRONG}{'; '.join(said)}" if said else "ok",
        }  # fmt: skip

    def _inject(self, kind: str, roles: dict[str, int], rank: int) -> int | None:
        """Does it, and gives the process that it hits if it is a single one."""
        if kind == FULL_DISK:
            with (self._checkpoints.parent / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(2**16))
            return None
        signals = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP, PREEMPT: signal.SIGTERM, LAUNCHER: signal.SIGKILL}
        os.kill(pid := roles[f"rank {rank}" if kind in (KILL, STOP) else "launcher"], signals[kind])
        return None if kind == PREEMPT else pid

    def finish(self) -> str:
        """Preempts the job for good; what is left behind."""
        self.launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(END_BOUND_S)
        return self._left()

    def _left(self) -> str:
        """What the launcher has left behind, within 20 s of its end."""
        deadline = time.monotonic() + 20
        while (left := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.1)
        _kill(left)
        return f"{len(left)} processes were left behind" if left else ""

    def _marked(self) -> set[int]:
        """The processes that this job started, whoever their parents are."""
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return {pid for pid in pids if is_alive(pid) and self._mark in _environment(pid)}


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _environment(pid: int) -> list[str]:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return []


def is_alive(pid: int) -> bool:
    """Whether a process runs or is stopped; one that has ended and was not waited for is not."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0] not in "ZX"
    return False


def usage_over(pids: dict[str, int], seconds: float) -> Iterator[dict[str, Any]]:
    """What processes use after some seconds, and how much more than at their start; a row for each."""
    is_long = seconds >= _SHORTEST_S
    time.sleep(_WARM_UP_S if is_long else 0)
    before = {role: _usage(pid) for role, pid in (pids | {"soak itself": os.getpid()}).items()}
    time.sleep(seconds - _WARM_UP_S if is_long else seconds)
    for role, pid in (pids | {"soak itself": os.getpid()}).items():
        now = _usage(pid)
        growth = {name: now[name] - before[role][name] for name in _FLAT}
        limits = {name: limit * (now[name] if name == "memory_mib" else 1) for name, limit in _FLAT.items()}
        grown = [name for name in _FLAT if growth[name] > limits[name]]
        check = "too short to judge" if not is_long else f"{WRONG}{', '.join(grown)} grow" if grown else "flat"
        yield {"role": role, **now, **{f"{name}_growth": one for name, one in growth.items()}, "check": check}


def _usage(pid: int) -> dict[str, float]:
    """Resident memory in MiB, open file handles and threads of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    counts = {name: len(os.listdir(f"/proc/{pid}/{what}")) for name, what in (("handles", "fd"), ("threads", "task"))}
    return {"memory_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20, **counts}


def sum_up(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The faults of each kind and package as one row."""
    for (kind, package), some in by([row for row in rows if row.get("fault")], "fault", "framework").items():
        bad = [row["check"] for row in some if row["check"] != "ok"]
        row: dict[str, Any] = {"fault": kind, "framework": package, "tried": len(some)}
        for name in ("noticed_s", "ended_s", "back_s"):
            times = [r[name] for r in some if r[name] is not None]
            row[name] = (median(times), max(times)) if times else None
        yield row | {"check": f"{bad[0]} ({len(bad)} of {len(some)})" if bad else "ok"}


def plot(rows: Sequence[Row]) -> Iterable[Any]:
    """How long training took to be back after each fault."""
    for (package,), some in by([row for row in rows if row.get("fault") and row.get("step")], "framework").items():
        figure, axes = new_figure(f"{package}: until training was back", height=3)
        axes[0][0].scatter([row["back_s"] for row in some], [row["fault"] for row in some])
        axes[0][0].set_xlabel("s")
        yield figure


def _seconds(value: Any) -> str:
    return " - ".join(f"{one:.1f}" for one in value) if isinstance(value, list | tuple) else f"{value:,.1f}"


_SIDE = Column("package", "framework")
_TIMES = tuple(
    Column(title, f"{key}_s", "s", _seconds)
    for title, key in (("time to detect", "noticed"), ("all ended", "ended"), ("time to recover", "back"))
)
_USED = tuple(
    Column(title, key, form=_seconds)
    for what, title in (("memory_mib", "memory, MiB"), ("handles", "handles"), ("threads", "threads"))
    for title, key in ((title, what), ("growth", f"{what}_growth"))
)
BENCHMARK = Benchmark(
    "soak", "training while ranks are killed and stopped: what faults cost, and what stays behind",
    ("quick", "ranks", "minutes", "seed", "framework"), cases, measure,
    {
        "Faults by kind, median - longest": (Column("fault"), _SIDE, Column("tried"), *_TIMES, CHECK),
        WHOLE: (
            _SIDE, Column("minutes", form=_seconds), Column("faults", "num_faults"), Column("steps", "step"),
            Column("goodput", form=percent), Column("max diff", "max_weight_difference", form=str), CHECK,
        ),
        USAGE: (Column("process", "role"), _SIDE, *_USED, CHECK),
        FAULTS: (Column("fault"), _SIDE, Column("rank"), Column("at step", "step"), *_TIMES, CHECK),
    },
    plot, sum_up,
    (
        "time to detect: until another process or the launcher printed a line or ended; a full disk is noticed by the"
        " next save. time to recover: until the first checkpoint of those that train after it",
        "growth: over the quiet time at the end, without its first 30 s",
    ),
)  # fmt: skip
