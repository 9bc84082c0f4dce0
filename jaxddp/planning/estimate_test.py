from dataclasses import replace

import pytest

from jaxddp.network import Network
from jaxddp.planning.chips import CHIPS
from jaxddp.planning.estimate import Run, estimate, product_seconds
from jaxddp.planning.products import as_measured
from jaxddp.planning.workload import feed_forward, transformer

pytestmark = pytest.mark.smoke
H100 = CHIPS["h100"]
TWO = Run(feed_forward(4096, 16384, 2), H100, "bfloat16", Network(100, latency_us=0), 2, 8192)
BYTES = 4 * 2 * 2 * 4096 * 16384  # of the gradients, each sent once there and back by two ranks


def test_at_peak_products_take_their_flops():
    assert product_seconds(TWO) == pytest.approx(2 * 2 * 2 * 8192 * 4096 * 16384 / 989.4e12)
    found = estimate(TWO)
    assert found.backward_s == pytest.approx(2 * found.forward_s) and found.step_s == sum(found)
    assert product_seconds(replace(TWO, chip=as_measured(H100))) > product_seconds(TWO)


def test_what_is_exposed_by_hand():
    """Four tensors of one size; of those that overlap, three are sent while the backward goes on for three quarters."""
    for strategy, sent_s in {
        "naive": BYTES / 100e9, "sharded_optimizer": 2 * BYTES / 100e9,
        "overlapped": BYTES / 4 / 100e9 + 3 / 4 * (BYTES / 100e9 - 8 * 4096 * 16384 * 8192 * 2 / 989.4e12),
    }.items():  # fmt: skip
        assert estimate(replace(TWO, strategy=strategy)).exposed_s == pytest.approx(sent_s)
        assert estimate(replace(TWO, strategy=strategy, num_ranks=1)).exposed_s == 0


def test_sharded_updates_are_gathered_in_their_own_dtype_and_zero2_scatters_each_micro_batch():
    """Four tensors of one size in four buckets; scatters of the last three hide behind the backward or do not."""
    scattered_s = gathered_s = BYTES / 2 / 1e9
    run = replace(TWO, network=Network(1, latency_us=0), num_microbatches=4, bucket_mb=1)
    hidden_s = 3 / 4 * estimate(replace(run, num_microbatches=1)).backward_s
    one, two = (estimate(replace(run, strategy=name)).exposed_s for name in ("zero1", "zero2"))
    assert one == pytest.approx(scattered_s - hidden_s + gathered_s)
    assert two == pytest.approx(4 * (scattered_s - hidden_s) + gathered_s)
    assert estimate(replace(run, strategy="zero1", param_bytes=2)).exposed_s == pytest.approx(one - gathered_s / 2)


def test_zero3_hides_gathers_behind_what_computes():
    slow, fast = (estimate(replace(TWO, strategy="zero3", network=Network(speed))) for speed in (1, 1e6))
    assert slow.exposed_s > 0.9 * 3 / 4 * BYTES / 2 / 1e9 and fast.exposed_s < 1e-4


def test_checkpointing_and_flash_attention_trade_flops_for_memory():
    def run(**options):
        model = transformer(1000, 4096, 1024, 8, 8, 4096, **options)
        return model, estimate(replace(TWO, workload=model)).backward_s

    (none, none_s), (half, half_s), (full, full_s) = (
        run(is_flash=True, checkpointing=how) for how in ("none", "selective", "full")
    )
    assert none_s < half_s < full_s
    assert [one.kept_per_token + one.kept_cut_per_token for one in (none, half, full)] == [
        8 * (4 + 4 + 12) * 1024 + 3048, 8 * (1 + 8 + 1) * 1024 + 3048, 8 * 1024 + 3048
    ]  # fmt: skip
    square, square_s = run()
    assert square.kept_cut_per_token - none.kept_cut_per_token == 8 * 8 * 4096 and square_s > none_s
