"""The queue of collectives in flight."""

import torch

from torchref.communication.reduction import InFlight


class Work:
    def __init__(self, done):
        self.wait = lambda: done.append(self)


def test_the_third_collective_waits_for_the_first():
    done, in_flight = [], InFlight()
    works = [Work(done) for _ in range(4)]
    arrived = [in_flight.add(work, index, torch.empty(0)) for index, work in enumerate(works)]
    assert arrived == [[], [], [0], [1]]
    assert done == works[:2]
    assert in_flight.wait() == [2, 3]
    assert done == works
    assert in_flight.wait() == []


def test_collectives_without_a_handle_arrive_in_order_too():
    in_flight = InFlight()
    assert [in_flight.add(None, name, torch.empty(0)) for name in "abc"] == [[], [], ["a"]]
    in_flight.forget()
    assert in_flight.wait() == []
