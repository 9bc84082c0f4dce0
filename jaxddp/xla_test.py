import pytest

import jaxddp


def test_on_cpu_reductions_stay_apart_and_barriers_stay():
    for factory in jaxddp.STRATEGIES.values():
        passes = jaxddp.compile_options(factory(), "cpu")["xla_disable_hlo_passes"].split(",")
        assert passes == ["cpu-all-reduce-combiner", "cse_barrier_expander"]


def test_passes_that_the_environment_disables_stay_disabled(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_foo=1 --xla_disable_hlo_passes=mine,yours --xla_bar=2")
    assert jaxddp.compile_options(jaxddp.overlapped(), "cpu") == {
        "xla_disable_hlo_passes": "mine,yours,cpu-all-reduce-combiner,cse_barrier_expander"
    }
    assert jaxddp.compile_options(jaxddp.overlapped(), "tpu") == {
        "xla_disable_hlo_passes": "mine,yours,all-reduce-combiner"
    }


def test_on_gpus_thresholds_are_zero_by_either_name():
    options = jaxddp.compile_options(jaxddp.bucketed(), "gpu")
    assert options == jaxddp.compile_options(jaxddp.bucketed(), "cuda")
    assert set(options.values()) == {0}
    assert len(options) == 3


def test_unknown_platform():
    with pytest.raises(ValueError, match="unknown platform 'npu': one of cpu, gpu, cuda, tpu"):
        jaxddp.compile_options(jaxddp.naive(), "npu")
