"""Whether what processes use grows, and what they leave, from made-up samples and processes of our own."""

import os
import socket
import subprocess
import sys

from benchmarks.soak.usage import descendants, is_alive, listening_ports, longest_lives, usage_of


def life(pid, seconds, memory=lambda s: 100.0, handles=lambda s: 10, role="rank 0", start=0):
    return [
        {"at_s": start + s, "role": role, "pid": pid, "memory_mib": memory(s), "handles": handles(s), "threads": 5}
        for s in range(0, seconds + 1, 2)
    ]


def test_the_longest_life_of_each_role_is_judged():
    found = longest_lives([*life(1, 300), *life(2, 500, start=300), *life(9, 800, role="launcher")])
    assert [(one["role"], one["lived_s"], one["check"]) for one in found] == [
        ("rank 0", 500, "flat"), ("launcher", 800, "flat"),
    ]  # fmt: skip


def test_the_first_minute_may_grow():
    (found,) = longest_lives(life(1, 300, memory=lambda s: min(s, 60)))
    assert found["check"] == "flat" and abs(found["memory_mib_growth"]) < 1e-9


def test_growth_is_wrong():
    (found,) = longest_lives(life(1, 660, memory=lambda s: 100 + s / 60, handles=lambda s: 10 + s // 200))
    assert found["check"] == "WRONG: memory_mib, handles grow"
    assert round(found["memory_mib_growth"], 6) == 10


def test_a_short_life_is_not_judged():
    assert longest_lives(life(1, 100, memory=lambda s: s)) == [
        {"role": "rank 0", "lived_s": 100, "check": "too short to judge"}
    ]


def test_processes():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in descendants(os.getpid()) and is_alive(child.pid)
        assert usage_of(child.pid)["memory_mib"] > 0
        child.kill()
        child.poll()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(child.pid)  # though nobody has waited for it
    assert usage_of(child.pid) is None


def test_ports():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert listener.getsockname()[1] in listening_ports([os.getpid()])
    assert listener.fileno() == -1
