import json

import pytest

from jaxddp.planning.chips import CHIPS
from jaxddp.planning.products import _FILE, as_measured, attention_rate, product_rate

pytestmark = pytest.mark.smoke
H100, A100, V5P = (as_measured(CHIPS[name]) for name in ("h100", "a100", "v5p"))
ROWS = json.loads(_FILE.read_text())["tflops"]


@pytest.mark.parametrize("name", ROWS)
def test_a_measured_shape_has_its_rate(name):
    chip = as_measured(CHIPS[name])
    for *shape, tf32, bfloat16 in ROWS[name]:
        assert product_rate(chip, "tf32", tuple(shape)) == pytest.approx(1e12 * tf32)
        assert product_rate(chip, "bfloat16", tuple(shape)) == pytest.approx(1e12 * bfloat16)


def test_others_lie_between_and_beyond_the_table_it_is_the_nearest():
    def rate(*shape):
        return product_rate(H100, "bfloat16", shape)

    between = rate(1, 1024, 1024, 1448.154688)  # the square root of 1024 x 2048
    assert between == pytest.approx((rate(1, 1024, 1024, 1024) * rate(1, 1024, 1024, 2048)) ** 0.5, rel=1e-6)
    assert rate(1, 2**20, 4096, 4096) == rate(1, 4096, 4096, 4096)
    assert rate(1, 0, 256, 256) == rate(1, 256, 256, 256)
    assert rate(16, 512, 1024, 1024) == rate(4, 2048, 1024, 1024)  # batches beyond 4 are more rows
    assert product_rate(as_measured(CHIPS["h200"]), "bfloat16", (1, 512, 512, 512)) == rate(1, 512, 512, 512)


def test_a_shape_without_a_table_has_the_best_rate_as_far_as_its_tiles_keep_the_device_busy():
    for shape, busy in {
        (1, 2048 * 132, 2048, 256): 1.0,
        (1, 64, 64, 4096): 1 / 132,
        (1, 65, 64, 4096): 65 / 64 / 132,  # two tiles, the second of one row
        (1, 1024, 1600, 256): 25 / 33,  # 400 tiles of 64 x 64 take four waves
        (2, 1024, 1600, 256): 800 / 924,  # 800 tiles of 64 x 64 take seven waves
    }.items():
        assert product_rate(H100, "float32", shape) == pytest.approx(47.33e12 * busy)


def test_what_was_not_measured_keeps_its_peak():
    assert product_rate(A100, "bfloat16") == 271.2e12  # the best of many shapes
    assert product_rate(H100, "float8") == 1402.6e12
    for chip, dtype in ((A100, "tf32"), (H100, "float64"), (V5P, "bfloat16")):
        assert product_rate(chip, dtype, (1, 256, 256, 256)) == chip.flops_per_s[dtype]
    assert V5P == CHIPS["v5p"] and V5P.kernel_s == 0 and V5P.memory_bytes_per_s == 2.765e12
    assert H100.kernel_s == 1e-6 and H100.memory_bytes_per_s == pytest.approx(0.92 * 3.35e12)
    assert attention_rate(H100, "bfloat16") < attention_rate(CHIPS["h100"], "bfloat16") == 989.4e12
