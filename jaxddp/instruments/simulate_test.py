import dataclasses
import random

import pytest

from jaxddp.instruments.schedule import Collective, Operation, Schedule
from jaxddp.instruments.simulate import device_seconds, lower_bound, matmul_flops_per_s, simulate
from jaxddp.instruments.work import MatmulKind, Work
from jaxddp.network import Network
from jaxddp.planning.chips import CHIPS

# One byte of memory traffic takes a second, and so does one byte of an all-reduce of two ranks.
CHIP = dataclasses.replace(CHIPS["h100"], flops_per_s={"float32": 1.0, "tf32": 1.0}, memory_bytes_per_s=1.0)
BYTES_FACTOR = {"all-reduce": 1, "all-gather": 2}  # two ranks send half of an all-gather
PAIR = (0, 1)


def compute(name, seconds, phase="backward"):
    return Operation(name, phase, Work(num_bytes=seconds))


def start(name, transfer_s, kind="all-reduce", group=PAIR, is_sync=False, seconds=0.0):
    collective = Collective(kind, transfer_s * BYTES_FACTOR[kind], group)
    return Operation(name, "backward", Work(num_bytes=seconds), collective, waits_for=name if is_sync else "")


def done(name):
    return Operation(f"{name}-done", waits_for=name)


def run(operations, latency_s=0.0):
    return simulate(Schedule(tuple(operations), 2), CHIP, Network(gb_per_s=1e-9, latency_us=latency_s * 1e6))


def test_a_step_by_hand():
    operations = [compute("f", 2, "forward"), start("a", 3), compute("b", 1), start("z", 4), done("a"), compute("o", 5)]
    step = run(operations, latency_s=1)
    assert [(s.name, s.lane, s.kind, s.start_s, s.end_s) for s in step.spans] == [
        ("f", "compute", "forward", 0, 2),
        ("b", "compute", "backward", 2, 3),
        ("a", "communication", "all-reduce", 2, 6),
        ("o", "compute", "backward", 6, 11),
        ("z", "communication", "all-reduce", 6, 11),
    ]
    assert (step.step_s, step.compute_s, step.communication_s, step.exposed_s) == (11, 8, 9, 3)


def random_program(rng, depth=0):
    operations, open_starts = [], []
    for i in range(rng.randint(1, 8)):
        name, choice = f"{depth}.{i}", rng.random()
        kind, group = rng.choice(list(BYTES_FACTOR)), (PAIR if rng.random() < 0.8 else (0,))
        if choice < 0.35:
            operations.append(compute(name, rng.randint(0, 5)))
        elif choice < 0.6:
            operations.append(start(name, rng.randint(0, 6), kind, group))
            open_starts.append(name)
        elif choice < 0.75:
            operations.append(start(name, rng.randint(0, 6), kind, group, True, rng.choice([0, 0, 2])))
        elif choice < 0.85 and depth < 2:
            body = random_program(rng, depth + 1)
            operations.append(Operation(name, body=tuple(body), trips=rng.randint(0, 3)))
        elif open_starts:
            operations.append(done(open_starts.pop(rng.randrange(len(open_starts)))))
    return operations


def unrolled(operations, latency_s, ids):
    """Instructions of one step, loops with collectives written out: compute, start and wait, each with its number."""
    names = {}
    for op in operations:
        inner = [one for _ in range(op.trips if op.body else 0) for one in unrolled(op.body, latency_s, ids)]
        yield from inner if op.communicates else ()
        seconds = 0 if op.communicates else sum(value for _, _, value in inner)
        yield "compute", op.name, seconds + int(op.work.num_bytes)
        if op.starts:
            names[op.name] = next(ids)
            alone, half = len(op.starts.group) == 1, op.starts.kind == "all-gather"
            latency = 0 if alone else latency_s // 2 if half else latency_s
            transfer = 0 if alone else op.starts.num_bytes // BYTES_FACTOR[op.starts.kind]
            yield "start", op.name, (names[op.name], latency, transfer)
        if op.waits_for in names:
            yield "wait", op.name, names[op.waits_for]


def tick_by_tick(operations, latency_s):
    """Does what the simulator claims to do, one second at a time, in whole numbers."""
    program = list(unrolled(operations, latency_s, iter(range(10**6))))
    queue, flows, spans, ended = [], {}, [], set()
    time, place, busy_until, ticks_of_communication = 0, 0, 0, 0
    while True:
        progress = True
        while progress:  # all that happens at this very moment
            progress = False
            if queue:
                flow = flows[queue[0]]
                flow.setdefault("began", time)
                if flow["left"] == 0:
                    spans.append((flow["name"], "communication", flow["began"], time))
                    ended.add(queue.pop(0))
                    progress = True
            if place < len(program) and time >= busy_until and not progress:
                what, name, value = program[place]
                if what == "compute":
                    busy_until = time + value
                    spans += [(name, "compute", time, busy_until)] if value else []
                elif what == "start":
                    number, latency, transfer = value
                    flows[number] = {"name": name, "left": latency + transfer}
                    queue.append(number)
                elif value not in ended:
                    continue
                place, progress = place + 1, True
        if place == len(program) and time >= busy_until and not queue:
            return time, ticks_of_communication, sorted(spans)
        if queue:
            flows[queue[0]]["left"] -= 1
            ticks_of_communication += 1
        time += 1


def test_random_programs_do_what_they_do_tick_by_tick():
    rng = random.Random(1)
    for _ in range(400):
        operations, latency_s = random_program(rng), rng.choice([0, 2, 4])
        step = run(operations, latency_s)
        step_s, communication_s, spans = tick_by_tick(operations, latency_s)
        assert sorted((s.name, s.lane, s.start_s, s.end_s) for s in step.spans) == spans  # whole seconds: exact
        assert (step.step_s, step.communication_s) == (step_s, communication_s)
        assert step.compute_s == sum(end - start for _, lane, start, end in spans if lane == "compute")


@pytest.mark.parametrize(
    ("chip", "dtype", "precision", "teraflops_per_s"),
    [
        ("h100", "f32", "default", 494.7),
        ("h100", "f32", "high", 494.7 / 3),
        ("h100", "f32", "highest", 66.9),
        ("v5p", "f32", "highest", 459 / 6),
        ("a100", "f8e4m3fn", "default", 19.5),  # not published: the slowest that is
    ],
)
def test_matrix_products_run_at_the_published_rate(chip, dtype, precision, teraflops_per_s):
    # A product and two quotients, each rounded by at most 1.1e-16 of it.
    kind = MatmulKind(dtype, precision)
    assert matmul_flops_per_s(kind, CHIPS[chip]) == pytest.approx(teraflops_per_s * 1e12, rel=1e-15)
    assert device_seconds(Work({kind: 1e15}), CHIPS[chip]) == pytest.approx(1e3 / teraflops_per_s, rel=1e-15, abs=0)


def test_an_operation_takes_as_long_as_its_flops_or_its_bytes():
    half_a_second = {MatmulKind("bf16", "default"): 989.4e12 / 4, MatmulKind("f32", "default"): 494.7e12 / 4}
    h100, v5p = CHIPS["h100"], CHIPS["v5p"]
    assert device_seconds(Work(half_a_second, num_bytes=3.35e12 / 4), h100) == 0.5
    assert device_seconds(Work(half_a_second, num_bytes=3.35e12), h100) == 1
    assert device_seconds(Work(half_a_second, vector_flops=66.9e12 / 4), h100) == 0.75
    assert device_seconds(Work(vector_flops=1e15, num_bytes=2.765e12), v5p) == 1  # its vector units are not published
    assert device_seconds(Work(), h100) == 0


def test_what_a_loop_computes_is_done_one_after_the_other():
    """A second for FLOPs and a second for bytes are two in each round, not one as if they were at once."""
    product = Operation("product", "backward", Work({MatmulKind("bf16", "default"): 989.4e12}))
    moved = Operation("moved", "backward", Work(num_bytes=3.35e12))
    loop = Operation("loop", "backward", body=(product, moved), trips=3)
    step = simulate(Schedule((loop,), 1), CHIPS["h100"], SLOW)
    assert step.step_s == step.compute_s == 6 and len(step.spans) == 1
    assert lower_bound(Schedule((loop,), 1), CHIPS["h100"], SLOW, 0, 1).compute_s == 6


SLOW = Network(gb_per_s=1e-9, latency_us=5e5)


def make_operation(name, phase, seconds, *operands):
    return Operation(name, phase, Work(num_bytes=seconds), operands=operands)


def scheduled(*operations):
    """Of lines of name, phase, seconds and operands."""
    return Schedule(tuple(make_operation(name, of, float(s), *on) for name, of, s, *on in map(str.split, operations)))


def test_communication_or_compute_is_the_bound_whichever_is_longer():
    """A chain f1 f2 | b2 b1 with gradients g2 and g1 at its links, each updated: u2, u1."""
    step = scheduled(
        "x forward 0", "f1 forward 3 x", "f2 forward 4 f1", "b2 backward 2 f2", "g2 backward 6 b2 f1",
        "b1 backward 1 b2", "u2 optimizer 5 g2", "g1 backward 2.5 b1 x", "g1.part backward 0 g1",
        "u1 optimizer 1 g1.part u2",
    )  # fmt: skip
    bound = lower_bound(step, CHIP, SLOW, 10, 2)
    assert (bound.compute_s, bound.forward_s, bound.all_reduce_s) == (24.5, 7, 10.5)
    assert bound.first_gradient_s == 5.5  # b2 b1 g1, not b2 g2 nor what stands before g1 in the schedule
    assert bound.step_s == 24.5  # 7 + 5.5 + 10.5 is less
    assert lower_bound(step, CHIP, SLOW, 100, 2).step_s == 7 + 5.5 + 100.5
    assert lower_bound(step, CHIP, SLOW, 100, 4).step_s == 7 + 5.5 + 150.5  # 2 (N-1)/N of the bytes


def test_the_first_gradient_is_the_one_that_depends_on_least():
    """Whatever the order, and shared work counts once for each gradient that needs it."""
    step = scheduled(
        "f forward 1", "shared backward 3 f", "left backward 1 shared", "right backward 1 shared",
        "both backward 1 left right", "apart backward 7 f",
        "through forward 9 both",  # not of the backward: costs, but is not counted
        "late backward 0.5 through", "update optimizer 1 both apart late f",
    )  # fmt: skip
    assert lower_bound(step, CHIP, SLOW, 1, 2).first_gradient_s == 6
    only_apart = Schedule((*step.operations[:-1], make_operation("update", "optimizer", 1, "apart")))
    assert lower_bound(only_apart, CHIP, SLOW, 1, 2).first_gradient_s == 7


def test_a_backward_in_a_loop_finishes_as_a_whole():
    body = (make_operation("b", "backward", 2), make_operation("c", "backward", 1, "b"))
    loop = Operation("loop", "backward", body=body, trips=4, operands=("f",))
    step = Schedule((make_operation("f", "forward", 1), loop, make_operation("u", "optimizer", 1, "loop")))
    bound = lower_bound(step, CHIP, SLOW, 8, 2)
    assert (bound.compute_s, bound.forward_s, bound.first_gradient_s) == (14, 1, 12)
