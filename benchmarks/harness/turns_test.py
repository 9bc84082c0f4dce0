"""Two frameworks whose processes are threads here: who runs when."""

import threading
import time
from contextlib import closing

import pytest

from benchmarks.harness.turns import Turns, join

NUM = {"jaxddp": 1, "torchref": 2}


class Processes:
    """Threads that take turns, and what they note while they have them."""

    def __init__(self, turns):
        self.turns, self.noted, self.threads, self.lock = turns, [], [], threading.Lock()

    def start(self, framework, num_rounds, delay_s=0.0):
        def run():
            time.sleep(delay_s)
            with join(self.turns.address, framework, lambda: None) as wait_for_turn:
                for index in range(num_rounds):
                    wait_for_turn()
                    self.note("begins", framework, index)
                    time.sleep(0.01)
                    self.note("ends", framework, index)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def note(self, *what):
        with self.lock:
            self.noted.append(what)

    def order(self):
        """Frameworks in the order of their rounds; nobody of another runs within one."""
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        running, order = {}, []
        for kind, framework, index in self.noted:
            running[framework] = running.get(framework, 0) + (1 if kind == "begins" else -1)
            assert sum(count > 0 for count in running.values()) <= 1, self.noted
            if kind == "begins" and order[-1:] != [(framework, index)]:
                order.append((framework, index))
        return order


@pytest.fixture
def processes():
    with closing(Turns(NUM)) as turns:
        yield Processes(turns)


def test_rounds_alternate_also_where_one_framework_is_late(processes):
    processes.start("torchref", 3)
    processes.start("torchref", 3)
    processes.start("jaxddp", 3, delay_s=0.2)
    assert processes.order() == [(name, index) for index in range(3) for name in NUM]


def test_one_that_has_ended_is_not_waited_for(processes):
    processes.start("torchref", 4)
    processes.start("torchref", 4)
    processes.start("jaxddp", 1)
    assert processes.order() == [("jaxddp", 0), *(("torchref", index) for index in range(4))]


def test_nor_one_that_never_comes(processes):
    processes.start("torchref", 2)
    processes.start("torchref", 2)
    time.sleep(0.1)
    assert not processes.noted  # it may still come
    processes.turns.leave("jaxddp")
    assert processes.order() == [("torchref", 0), ("torchref", 1)]


def test_who_waits_gives_signs_of_life_and_is_told_of_the_end(monkeypatch):
    monkeypatch.setattr("benchmarks.harness.turns._SIGN_OF_LIFE_S", 0.01)
    signs = []
    turns = Turns(NUM)

    def sign_of_life():
        signs.append(1)
        if len(signs) == 3:
            turns.close()

    with join(turns.address, "jaxddp", sign_of_life) as wait_for_turn:
        with pytest.raises(ConnectionError, match="has ended"):
            wait_for_turn()
    assert len(signs) >= 3


def test_a_framework_alone_has_no_turns():
    with join("", "jaxddp", lambda: None) as wait_for_turn:
        wait_for_turn()
