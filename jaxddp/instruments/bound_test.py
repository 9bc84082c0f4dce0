import dataclasses

from jaxddp.instruments.schedule import Operation, Schedule
from jaxddp.instruments.simulate import lower_bound
from jaxddp.instruments.work import Work
from jaxddp.network import Network
from jaxddp.planning.chips import CHIPS

# One byte of memory traffic takes a second; so does one of an all-reduce of two ranks, and half a second a call.
CHIP = dataclasses.replace(CHIPS["h100"], flops_per_s={"float32": 1.0, "tf32": 1.0}, memory_bytes_per_s=1.0)
NETWORK = Network(gb_per_s=1e-9, latency_us=5e5)


def make_operation(name, phase, seconds, *operands):
    return Operation(name, phase, Work(num_bytes=seconds), operands=operands)


def make_step():
    """A chain f1 f2 | b2 b1 with gradients g2 and g1 at its links, each updated: u2, u1."""
    return Schedule(
        (
            make_operation("x", "forward", 0),
            make_operation("f1", "forward", 3, "x"),
            make_operation("f2", "forward", 4, "f1"),
            make_operation("b2", "backward", 2, "f2"),
            make_operation("g2", "backward", 6, "b2", "f1"),
            make_operation("b1", "backward", 1, "b2"),
            make_operation("u2", "optimizer", 5, "g2"),
            make_operation("g1", "backward", 2.5, "b1", "x"),
            make_operation("g1.part", "backward", 0, "g1"),
            make_operation("u1", "optimizer", 1, "g1.part", "u2"),
        )
    )


def test_terms():
    bound = lower_bound(make_step(), CHIP, NETWORK, 10, 2)
    assert bound.compute_s == 24.5
    assert bound.forward_s == 7
    assert bound.first_gradient_s == 5.5  # b2 b1 g1, not b2 g2 nor what stands before g1 in the schedule
    assert bound.all_reduce_s == 10.5


def test_communication_or_compute_is_the_bound_whichever_is_longer():
    assert lower_bound(make_step(), CHIP, NETWORK, 10, 2).step_s == 24.5  # 7 + 5.5 + 10.5 is less
    assert lower_bound(make_step(), CHIP, NETWORK, 100, 2).step_s == 7 + 5.5 + 100.5
    assert lower_bound(make_step(), CHIP, NETWORK, 100, 4).step_s == 7 + 5.5 + 150.5  # 2 (N-1)/N of the bytes


def test_two_levels():
    """Two hosts of four: the formula by hand, and of one level where there is one host, or one rank on each."""
    two_levels = Network(gb_per_s=1e-9, latency_us=5e5, host_gb_per_s=0.25e-9, devices_per_host=4)
    bound = lower_bound(make_step(), CHIP, two_levels, 100, 8)
    within, between = 2 * 3 / 4 * 100 / 1, 2 * 1 / 2 * (100 / 4) / 0.25
    assert (bound.all_reduce_s, bound.between_hosts_s) == (0.5 + within + between, between)
    assert bound.step_s == 7 + 5.5 + bound.all_reduce_s
    one_host = lower_bound(make_step(), CHIP, two_levels, 100, 4)
    assert (one_host.all_reduce_s, one_host.between_hosts_s) == (0.5 + within, 0)
    one_each = lower_bound(make_step(), CHIP, dataclasses.replace(two_levels, devices_per_host=1), 100, 8)
    assert one_each.all_reduce_s == 0.5 + one_each.between_hosts_s == 0.5 + 2 * 7 / 8 * 100 / 0.25


def test_the_first_gradient_is_the_one_that_depends_on_least():
    """Whatever the order, and shared work counts once for each gradient that needs it."""
    step = Schedule(
        (
            make_operation("f", "forward", 1),
            make_operation("shared", "backward", 3, "f"),
            make_operation("left", "backward", 1, "shared"),
            make_operation("right", "backward", 1, "shared"),
            make_operation("both", "backward", 1, "left", "right"),
            make_operation("apart", "backward", 7, "f"),
            make_operation("through", "forward", 9, "both"),  # not of the backward: costs, but is not counted
            make_operation("late", "backward", 0.5, "through"),
            make_operation("update", "optimizer", 1, "both", "apart", "late", "f"),
        )
    )
    assert lower_bound(step, CHIP, NETWORK, 1, 2).first_gradient_s == 6
    only_apart = dataclasses.replace(
        step, operations=(*step.operations[:-1], make_operation("update", "optimizer", 1, "apart"))
    )
    assert lower_bound(only_apart, CHIP, NETWORK, 1, 2).first_gradient_s == 7


def test_a_backward_in_a_loop_finishes_as_a_whole():
    body = (make_operation("b", "backward", 2), make_operation("c", "backward", 1, "b"))
    loop = Operation("loop", "backward", body=body, trips=4, operands=("f",))
    step = Schedule((make_operation("f", "forward", 1), loop, make_operation("u", "optimizer", 1, "loop")))
    bound = lower_bound(step, CHIP, NETWORK, 8, 2)
    assert (bound.compute_s, bound.forward_s, bound.first_gradient_s) == (14, 1, 12)
