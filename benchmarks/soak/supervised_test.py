"""The process that injects the faults keeps nothing of what it sees, however long it looks."""

import gc
import json
import threading
import time
import tracemalloc
from types import SimpleNamespace

from benchmarks.soak import supervised
from benchmarks.soak.guard import Workplace
from benchmarks.soak.program import Program
from benchmarks.soak.usage import longest_lives

HOURS, STEPS = 2, 5_000


def test_two_hours_of_samples_and_steps_take_no_memory(tmp_path, monkeypatch):
    class Clock:
        """Whose waiting ends at once."""

        now, pid = 0.0, 0

        def wait(self, seconds):
            Clock.now += seconds
            return Clock.now > 3600 * HOURS

        def is_set(self):
            return False

    program = Program("none", 2, True, str(tmp_path / "events"), "", 0, "")
    job = supervised.Job(program, Workplace("", tmp_path, False), tmp_path)
    monkeypatch.setattr(supervised, "time", SimpleNamespace(monotonic=lambda: Clock.now))
    monkeypatch.setattr(supervised.usage, "usage_of", lambda pid: {"memory_mib": 100.0, "handles": 9, "threads": 5})
    monkeypatch.setattr(job, "_roles", lambda: [("soak itself", 1), ("launcher", 2), ("rank 0", 3), ("rank 1", 4)])
    monkeypatch.setattr(job, "_has_ended", Clock())

    def steps():
        with open(tmp_path / "events", "w", buffering=1) as pipe:
            for step in range(1, STEPS + 1):
                for rank in range(2):
                    event = {
                        "at_s": 0.1 * step,
                        "kind": "step",
                        "rank": rank,
                        "pid": 3 + rank,
                        "step": step,
                        "save_s": 0,
                    }
                    pipe.write(json.dumps(event) + "\n")
            for _ in range(6000):
                if job.step == STEPS:
                    break
                time.sleep(0.01)
            Clock.is_set = lambda self: True
            pipe.write("\n")

    writer, reader = (threading.Thread(target=one) for one in (steps, job._read_events))
    tracemalloc.start()
    try:
        job._sample()
        for thread in (writer, reader):
            thread.start()
        for thread in (writer, reader):
            thread.join()
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2**19, f"{kept / 2**20:.1f} MiB are kept"  # of 10 MiB and more as objects
    assert job.step == len(job.events()) == STEPS
    lives = longest_lives(job.samples())
    assert [one["role"] for one in lives] == ["soak itself", "launcher", "rank 0", "rank 1"]
    assert all(one["check"] == "flat" and one["lived_s"] == 3600 * HOURS - 2 for one in lives)


def test_a_file_in_shared_memory_is_left_behind_if_it_stays(tmp_path, monkeypatch):
    job = supervised.Job(
        Program("none", 2, True, str(tmp_path / "events"), "", 0, ""), Workplace("", tmp_path, False), tmp_path
    )
    looks = iter([{"mine", "other"}, {"mine", "other"}, {"mine"}])
    monkeypatch.setattr(supervised.usage, "shared_memory", lambda: next(looks, {"mine"}))
    monkeypatch.setattr(supervised, "LEFT_BOUND_S", 0.2)
    monkeypatch.setattr(job, "_known", {"old"})
    assert job._unused_memory() == {"mine"}
