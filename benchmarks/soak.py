"""Soak: ``train`` goes on for an hour, while faults from a seeded list happen to it in the first three quarters.

The command is watched from outside: what it prints, its processes, and its checkpoints. Then as many steps are trained
undisturbed: the weights must be the same, and the time that they take is the goodput, as a share of the time that it
took. As a scheduler or an operator would, the soak starts a job again that has ended, and clears a full disk.
"""

import contextlib
import os
import random
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from jaxddp.cli.launch import child_command

from .benchmark import WRONG, Benchmark, Case, Options, Say
from .render import CHECK, Column, Row, by, percent

KILL, STOP, FULL_DISK, PREEMPT, LAUNCHER = KINDS = (
    "rank killed (SIGKILL)", "rank stopped (SIGSTOP)", "disk full", "preempted (SIGTERM)", "launcher killed (SIGKILL)",
)  # fmt: skip
CHECKPOINT_EVERY, ENDLESS, STUCK_S, _POLL_S = 10, 10**9, 10, 0.05
BACK_BOUND_S, LEFT_BOUND_S = 300.0, 60.0  # until the soak gives up; until what still runs was left behind
_WARM_UP_S, _SHORTEST_S = 30.0, 120.0  # of the quiet time
_MARK = "JAXDDP_SOAK"  # in the environment of all that a soak starts
EACH, WHOLE, USAGE = "Each fault", "The whole", "What processes use"  # each is in metrics.jsonl alone
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
    num_ranks, seed = options.ranks or 2, options.seed or 0
    if num_ranks < 2 or seed < 0:  # one rank waits for no other; train takes no such seed, and would never begin
        raise ValueError(f"ranks (={num_ranks}) must be at least 2, and seed (={seed}) at least 0")
    packages = {"jax": ["jaxddp"], "torch": ["torchref"], "both": ["jaxddp", "torchref"]}[options.framework or "jax"]
    return [Case(package, SoakSetup(package, options.minutes or 60.0, num_ranks, seed)) for package in packages]


def measure(case: Case, say: Say) -> Iterator[dict[str, Any]]:
    """Soaks a package: a row per fault, one of the whole, and one per process."""
    setup: SoakSetup = case.setup
    assert case.folder is not None  # where the logs go
    say(f"{setup.package}: {setup.minutes:g} minutes, {setup.num_ranks} ranks, faults of seed {setup.seed}")
    common = {"framework": setup.package, "num_ranks": setup.num_ranks, "seed": setup.seed}
    since_s, num_faults = time.monotonic(), 0
    end_s = since_s + 60 * setup.minutes
    with temporary_disk() as (folder, has_disk):
        kinds = [kind for kind in KINDS if has_disk or kind != FULL_DISK]
        with Job(setup, folder / "disk" / "ck", case.folder / f"{setup.package}.log", ENDLESS) as job:
            job.await_step(1)
            for kind, rank, seconds in setup.faults or draw_faults(setup.seed, setup.num_ranks, kinds):
                time.sleep(seconds)
                if time.monotonic() > end_s - 15 * setup.minutes:
                    break
                yield common | (row := job.endure(kind, rank))
                num_faults += 1
                say(f"{setup.package}: {kind} at step {row['step']}: back after {row['back_s']:.1f} s, {row['check']}")
            usage = list(usage_over(job.pids(), 5.0 if setup.faults else max(0.0, end_s - time.monotonic())))
            job.launcher.terminate()
            check, seconds = job.left_behind() or "ok", time.monotonic() - since_s
        step, found = newest_weights(setup.package, folder / "disk" / "ck")
        with Job(setup, folder / "again", case.folder / f"{setup.package}-undisturbed.log", step) as job:
            first, since_first_s = job.await_step(1), time.monotonic()
            job.await_step(step, BACK_BOUND_S + 10.0 * step)
            per_step_s = (time.monotonic() - since_first_s) / max(1, step - first)
        expected = newest_weights(setup.package, folder / "again")[1]
    difference = max(float(np.abs(found[name] - array).max()) for name, array in expected.items())
    yield common | {
        "table": WHOLE, "minutes": seconds / 60, "num_faults": num_faults, "step": step,
        "goodput": step * per_step_s / seconds, "max_weight_difference": difference,
        "check": f"{WRONG}other weights than those of an undisturbed run" if difference else check,
    }  # fmt: skip
    yield from (common | {"table": USAGE} | row for row in usage)


@contextlib.contextmanager
def temporary_disk() -> Iterator[tuple[Path, bool]]:
    """A temporary folder, and whether ``disk`` in it is a disk of 256 MiB, which takes the right to mount."""
    with tempfile.TemporaryDirectory(prefix="jaxddp-soak-", ignore_cleanup_errors=True) as name:
        (disk := Path(name, "disk")).mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "jaxddp-soak", disk], capture_output=True)
        try:
            yield Path(name), disk.is_mount()
        finally:
            subprocess.run(["umount", "--lazy", disk], capture_output=True)


def newest_weights(package: str, folder: Path) -> tuple[int, dict[str, np.ndarray]]:
    """The step and the parameters of the newest checkpoint."""
    path = folder / str(step := newest_step(folder))
    is_jax = package == "jaxddp"
    found: Any = np.load(path / "state.npz") if is_jax else torch.load(path / "state.pt", weights_only=True)
    return step, {name: np.asarray(one) for name, one in found.items() if name.startswith("params.")}


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=0)


class Job(contextlib.AbstractContextManager["Job"]):
    """A run of ``train``, seen from outside; what it starts has a mark, and ends with it."""

    def __init__(self, setup: SoakSetup, checkpoints: Path, log: Path, steps: int) -> None:
        self._checkpoints, self._log, self._mark = checkpoints, log, uuid.uuid4().hex
        self._filler = checkpoints.parent / "filler"
        options = {
            "processes": setup.num_ranks, "devices": setup.num_ranks, "max-restarts": ENDLESS, "stuck-s": STUCK_S,
            "model": "byte_shallow", "batch-size": 4 * setup.num_ranks, "steps": steps, "seed": setup.seed,
            "checkpoint": checkpoints, "checkpoint-every": CHECKPOINT_EVERY,
        }  # fmt: skip
        flags = [f"--{name}={value}" for name, value in options.items()]
        self._command = child_command(["-m", setup.package, "train", "--resume", *flags])
        self.launch()

    def __exit__(self, *_: object) -> None:
        self.launcher.kill()
        self.launcher.wait()
        _kill(self._marked())

    def launch(self) -> None:
        """Starts the launcher, as a scheduler would, for the first time or again."""
        with self._log.open("ab") as log:
            self.launcher = subprocess.Popen(
                self._command, env=os.environ | {_MARK: self._mark}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )  # fmt: skip

    def pids(self) -> dict[str, int]:
        """The launcher and the ranks, its children, by role."""
        launcher = self.launcher.pid
        ranks = {f"rank {rank}": pid for pid, (parent, rank) in self._marked().items() if rank and parent == launcher}
        return {"launcher": launcher} | ranks

    def wait(self, is_done: Callable[[], bool], since_s: float, bound_s: float = BACK_BOUND_S) -> float:
        """Waits until something holds; the seconds since a time, or OSError after too many."""
        while not is_done():
            time.sleep(_POLL_S)
            if time.monotonic() - since_s > bound_s:
                raise OSError(f"the job did not go on within {bound_s:g} s: see {self._log}")
        return time.monotonic() - since_s

    def await_step(self, step: int, bound_s: float = BACK_BOUND_S) -> int:
        """Waits for a checkpoint of this step or a later one; gives its step."""
        self.wait(lambda: newest_step(self._checkpoints) >= step, time.monotonic(), bound_s)
        return newest_step(self._checkpoints)

    def endure(self, kind: str, rank: int) -> dict[str, Any]:
        """Injects a fault, and waits for the first checkpoint of those that train after it; gives the row."""
        roles, before, left = self.pids(), self._log.stat().st_size, ""
        since_s, step = time.monotonic(), newest_step(self._checkpoints)
        ranks = [pid for role, pid in roles.items() if role != "launcher"]
        others = set(roles.values()) - {self._inject(kind, roles, rank)}

        def is_back() -> bool:
            nonlocal left
            if self.launcher.poll() is not None:
                left = self.left_behind() or left
                self.launch()
            return newest_step(self._checkpoints) > saved

        noticed_s = self.wait(lambda: self._log.stat().st_size > before or None in map(parent_of, others), since_s)
        ended_s = self.wait(lambda: {*map(parent_of, ranks)} <= {None}, since_s)
        saved = newest_step(self._checkpoints)
        self._filler.unlink(missing_ok=True)
        return {
            "table": EACH, "fault": kind, "rank": rank if kind in (KILL, STOP) else None, "step": step,
            "noticed_s": noticed_s, "ended_s": ended_s, "back_s": self.wait(is_back, since_s), "check": left or "ok",
        }  # fmt: skip

    def _inject(self, kind: str, roles: dict[str, int], rank: int) -> int | None:
        """Does it, and gives the process that it hits if it is a single one."""
        if kind == FULL_DISK:
            with self._filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                file.write(bytes(2**28))  # as much as fits
            return None
        signals = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP, PREEMPT: signal.SIGTERM, LAUNCHER: signal.SIGKILL}
        os.kill(pid := roles[f"rank {rank}" if kind in (KILL, STOP) else "launcher"], signals[kind])
        return None if kind == PREEMPT else pid

    def left_behind(self) -> str:
        """Ends what outlives the launcher, and says so; empty if there is nothing."""
        with contextlib.suppress(OSError):
            self.wait(lambda: not self._marked(), time.monotonic(), LEFT_BOUND_S)
        _kill(left := self._marked())
        return f"{WRONG}{len(left)} processes were left behind" if left else ""

    def _marked(self) -> dict[int, tuple[int, str]]:
        """The living processes that this job started, whoever their parents are: each one's parent and rank."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # another user's, or it has ended
                variables = (process / "environ").read_text(errors="replace").split("\0")
                if f"{_MARK}={self._mark}" in variables and (parent := parent_of(pid := int(process.name))) is not None:
                    found[pid] = parent, next((one[5:] for one in variables if one.startswith("RANK=")), "")
        return found


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def parent_of(pid: int) -> int | None:
    """The parent of a process that runs or is stopped; None of one that has ended, whether it was waited for or not."""
    with contextlib.suppress(OSError):
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state in "ZX" else int(parent)
    return None


def usage_over(pids: dict[str, int], seconds: float) -> Iterator[dict[str, Any]]:
    """What processes use after some seconds, and how much more than after the first 30 of them; a row for each."""
    time.sleep(warm_up_s := min(_WARM_UP_S, seconds))
    before = {role: _usage(pid) for role, pid in pids.items()}
    time.sleep(seconds - warm_up_s)
    for role, pid in pids.items():
        now = _usage(pid)
        growth = {f"{name}_growth": one - before[role][name] for name, one in now.items()}
        flat = {"memory_mib": 0.05 * now["memory_mib"], "handles": 2, "threads": 2}  # freed pages are kept and reused
        grown = [name for name, limit in flat.items() if growth[f"{name}_growth"] > limit]
        check = f"{WRONG}{', '.join(grown)} grow" if grown else "flat"
        yield {"role": role, **now, **growth, "check": check if seconds >= _SHORTEST_S else "too short to judge"}


def _usage(pid: int) -> dict[str, float]:
    """Resident memory in MiB, open file handles and threads of a process."""
    process = Path(f"/proc/{pid}")
    memory_mib = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    listed = {"handles": "fd", "threads": "task"}
    return {"memory_mib": memory_mib} | {name: len(os.listdir(process / of)) for name, of in listed.items()}


def sum_up(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The faults of each kind and package as one row."""
    for (kind, package), some in by([row for row in rows if row.get("fault")], "fault", "framework").items():
        bad = [row["check"] for row in some if row["check"] != "ok"]
        times = {name: [row[name] for row in some] for name in ("noticed_s", "ended_s", "back_s")}
        yield {
            "fault": kind, "framework": package, "tried": len(some),
            **{name: f"{median(each):.1f} - {max(each):.1f}" for name, each in times.items()},
            "check": f"{bad[0]} ({len(bad)} of {len(some)})" if bad else "ok",
        }  # fmt: skip


_SIDE, _TENTHS = Column("package", "framework"), "{:,.1f}".format
BENCHMARK = Benchmark(
    "soak", "training while ranks are killed and stopped: what faults cost, and what stays behind",
    ("ranks", "minutes", "seed", "framework"), cases, measure,
    {
        "Faults by kind, median - longest": (
            Column("fault"), _SIDE, Column("tried"), Column("time to detect", "noticed_s", "s"),
            Column("all ended", "ended_s", "s"), Column("time to recover", "back_s", "s"), CHECK,
        ),
        WHOLE: (
            _SIDE, Column("minutes", form=_TENTHS), Column("faults", "num_faults"), Column("steps", "step"),
            Column("goodput", form=percent), Column("max diff", "max_weight_difference", form=str), CHECK,
        ),
        USAGE: (
            Column("process", "role"), _SIDE, Column("memory", "memory_mib", "MiB", _TENTHS),
            Column("growth", "memory_mib_growth", "MiB", _TENTHS), Column("handles"),
            Column("growth", "handles_growth"), Column("threads"), Column("growth", "threads_growth"), CHECK,
        ),
    },
    check=sum_up,
    notes=(
        "time to detect: until another process or the launcher printed a line or ended; a full disk is noticed by the"
        " next save. time to recover: until the first checkpoint of those that train after it",
        "growth: over the quiet time at the end, without its first 30 s",
    ),
)  # fmt: skip
