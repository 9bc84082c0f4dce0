from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp import targets
from jaxddp.communication.buckets import MIB, TensorSpec, plan_buckets
from jaxddp.ddp.bucketed import Untuned
from jaxddp.instruments import tuning
from jaxddp.instruments.schedule import Operation, Schedule, read_schedule
from jaxddp.instruments.simulate import simulate
from jaxddp.instruments.tuning import StepTiming, expected_step_s, time_gradients
from jaxddp.instruments.work import MatmulKind, Work
from jaxddp.models import SIZES, abstract
from jaxddp.network import Network
from jaxddp.planning.chips import CHIPS

CHIP = CHIPS["h100"]
RANKS = 8
FLOPS = MatmulKind("bf16", "default")


def timing_of(sizes_mib, ready_s, backward_end_s, optimizer_s=0.0):
    tensors = tuple(TensorSpec(str(i), (int(size * MIB) // 4,), "float32") for i, size in enumerate(sizes_mib))
    return StepTiming(tensors, tuple(ready_s), backward_end_s, optimizer_s, CHIP, RANKS)


def expected(timing, network, bucket_mb):
    return expected_step_s(plan_buckets(timing.tensors, bucket_mb), timing, network)


@pytest.mark.parametrize("n", [1, 9])
@pytest.mark.parametrize("compute_s", [1e-4, 5e-3])  # of each bucket; a transfer takes 0.33 ms
@pytest.mark.parametrize("update_s", [0.0, 2e-4])
def test_uniform_buckets_take_what_their_closed_form_says(n, compute_s, update_s):
    """All of m are sent one after the other; updates wait for the backward, their own bucket and those before."""
    network = Network(50, latency_us=300)
    timing = timing_of([1] * n, [compute_s * (k + 1) for k in range(n)], compute_s * n, update_s * n)
    m = network.seconds("all-reduce", MIB, range(RANKS))
    arrives = [max(compute_s * (k + 1), compute_s + k * m) + m for k in range(n)]
    end = max(max(arrival, compute_s * n) + (n - k) * update_s for k, arrival in enumerate(arrives))
    # Fewer than 100 additions, each rounded by 1.1e-16 of its result.
    assert expected(timing, network, 1) == pytest.approx(end, rel=1e-13)
    if update_s == 0:
        assert end == pytest.approx(max(n * compute_s + m, compute_s + n * m), rel=1e-13)


def test_gradients_are_timed_by_the_flops_before_them():
    def op(name, phase, flops, seconds):
        return Operation(name, phase, Work({FLOPS: flops}, 0.0, seconds * CHIP.memory_bytes_per_s))

    schedule = Schedule(
        (op("f", "forward", 10, 1), op("b", "backward", 20, 2), op("norm", "backward", 0, 4),
         op("u", "optimizer", 0, 8), op("c", "backward", 10, 16)),
    )  # fmt: skip
    tensors = [TensorSpec(name, (1,), "float32") for name in "abcd"]
    timing = time_gradients(schedule, tensors, [0.25, 0.75, 0.8, 1.0], CHIP, RANKS)
    assert timing.ready_s == pytest.approx((1, 3, 23, 23), rel=1e-12)  # rounding
    assert (timing.backward_end_s, timing.optimizer_s) == pytest.approx((23, 8), rel=1e-12)
    assert (timing.tensors, timing.chip, timing.num_ranks) == (tuple(tensors), CHIP, RANKS)


def small_trainer(strategy, mesh):
    loss_fn, params = abstract("toy")
    batch = {name: jax.ShapeDtypeStruct((2, width), jnp.float32) for name, width in (("x", 10), ("y", 5))}
    return jaxddp.Trainer(loss_fn, optax.sgd(1.0), strategy, mesh), params, batch


def test_caps_that_are_given_are_not_tuned():
    trainer, params, batch = small_trainer(jaxddp.bucketed(25), jaxddp.data_mesh(2))
    with pytest.raises(
        ValueError, match=r"^strategy \(='bucketed'\) must be bucketed\('auto', network=\.\.\.\) to be tuned$"
    ):
        jaxddp.tune_buckets(trainer, params, batch)


def test_the_trainer_gets_the_caps_that_are_picked(monkeypatch):
    seen = []

    def pick(timing, network, rule):
        seen.append((timing.num_ranks, network, rule))
        return [1, 8]

    monkeypatch.setattr(tuning, "best_caps", pick)
    strategy = jaxddp.bucketed("auto", network=50, rule="torch", hook=jaxddp.hooks.bf16)
    trainer, params, batch = small_trainer(strategy, targets.mesh("h100:2"))
    tuned = jaxddp.tune_buckets(trainer, trainer.abstract_state(params), batch).strategy
    assert seen == [(2, Network(50), "torch")]
    tensors = [TensorSpec(str(index), (2**18,), "float32") for index in range(10)]
    assert tuned.plan(tensors) == jaxddp.bucketed([1, 8], rule="torch").plan(tensors)
    assert tuned.hook is jaxddp.hooks.bf16


@pytest.fixture(scope="module")
def compiled():
    """lm_9m for h100:8 with the usual cap, and with those chosen for a slow and a fast network."""
    loss_fn, params = abstract("lm_9m")
    tokens = jax.ShapeDtypeStruct((16 * RANKS, SIZES["lm_9m"].context), jnp.int32)
    batch = {"tokens": tokens, "targets": tokens}
    strategies = {"usual": jaxddp.bucketed(25)}
    strategies |= {speed: jaxddp.bucketed("auto", network=speed) for speed in (12, 360)}

    def compiled_with(strategy):
        trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), strategy, targets.mesh("h100:8"))
        state = trainer.abstract_state(params)
        if isinstance(strategy.plan, Untuned):
            trainer = jaxddp.tune_buckets(trainer, params, batch)
        return trainer.planned(state, batch), read_schedule(trainer.compile(state, batch))

    with ThreadPoolExecutor() as pool:
        return dict(zip(strategies, pool.map(compiled_with, strategies.values()), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("speed", [12, 360])
def test_what_is_compiled_is_no_slower_than_with_the_usual_cap(compiled, speed):
    planned, schedule = compiled[speed]
    assert schedule.gradient_collectives() == sorted(planned)
    _, usual = compiled["usual"]
    network = Network(speed)
    ours, theirs = (simulate(each, CHIP, network).step_s for each in (schedule, usual))
    assert ours <= theirs
