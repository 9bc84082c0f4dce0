import jax
import jax.numpy as jnp
import pytest

import jaxddp


def test_a_small_loop_with_barriers_compiles_on_cpu():
    """Where XLA would abort."""

    def loss_fn(params, batch):
        def layer(x, _):
            return jax.checkpoint(lambda x: jnp.sin(params["w"] * x) + params["b"])(x), None

        return jnp.mean(jax.lax.scan(layer, batch, None, length=3)[0])

    mesh = jaxddp.data_mesh(1)
    mapped = jax.shard_map(jax.grad(loss_fn), mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    options = jaxddp.compile_options(jaxddp.bucketed(), "cpu")
    run = jax.jit(mapped, compiler_options=options)
    assert run({"w": jnp.ones(3), "b": jnp.zeros(3)}, jnp.ones((2, 3)))["w"].shape == (3,)


_ON = "COLLECTIVE_PIPELINING_MODE_ON"  # since jaxlib 0.11.1
THRESHOLDS = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_reduce", "all_gather", "reduce_scatter")}


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0", "0.12.0.1", "0.10.10", "1.0.0", "0.10.2.dev20260101"])
def test_on_gpus_nothing_is_merged_and_all_starts_early(version, monkeypatch):
    monkeypatch.setattr("jaxlib.version.__version__", version)
    options = jaxddp.compile_options(jaxddp.bucketed(), "gpu")
    assert options == jaxddp.compile_options(jaxddp.bucketed(), "cuda")
    early = {
        "xla_gpu_experimental_collective_start_as_early_as_possible": True,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 65_536,
    }
    is_old = version.startswith("0.10.") or version == "0.11.0"
    by_nccl = {} if is_old else {"xla_gpu_experimental_use_collective_kernels": ""}
    # All-reduces are joined, by bucket, and not copied for that.
    joined = THRESHOLDS | {
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**40,
        "xla_disable_hlo_passes": "all-reduce-contiguous",
    }
    assert options == joined | early | by_nccl
    assert jaxddp.compile_options(jaxddp.zero1(), "gpu") == THRESHOLDS | early | by_nccl
    name, value = ("xla_gpu_enable_pipelined_", True) if is_old else ("xla_gpu_pipeline_", _ON)
    ahead = {f"{name}{kind}": value for kind in ("all_gather", "reduce_scatter")}
    assert jaxddp.compile_options(jaxddp.zero3(), "gpu") == THRESHOLDS | ahead | by_nccl  # in loops over layers
