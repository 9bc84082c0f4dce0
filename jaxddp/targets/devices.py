"""How devices that are not here are described to XLA.

The GPUs are described as in XLA's own list, https://github.com/openxla/xla, xla/backends/gpu/target_config/specs.
XLA chooses tilings and estimates times by these numbers; memory bandwidths differ a little from the published ones
(B200: 7.67 and 8 TB/s). The TPU compiler knows its chips by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..planning.chips import Target


class _Gpu(NamedTuple):
    description: str
    compute_capability: int
    num_cores: int
    fpus_per_core: int
    clock_rate_ghz: float
    memory_bytes_per_s: int
    memory_bytes: int
    l2_cache_bytes: int
    shared_memory_per_core_bytes: int
    shared_memory_per_block_bytes: int


_H100 = _Gpu("NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 3352320000000, 84929347584, 52428800, 233472, 232448)
_GPUS = {
    "h100": _H100,
    "h200": _H100._replace(
        description="NVIDIA H200 141GB HBM3e", memory_bytes_per_s=4800000000000, memory_bytes=151397597184
    ),
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 2039040000000, 85100068864, 41943040, 167936, 166912),
    "b200": _Gpu("NVIDIA B200", 10, 148, 128, 1.965, 7672320000000, 191514411008, 132644864, 233472, 232448),
}


def topology_arguments(target: Target) -> dict[str, Any]:
    """Gives the arguments by which ``jax.experimental.topologies.get_topology_desc`` makes a target's devices."""
    if target.platform == "tpu":
        return {"platform": "tpu", "topology_name": f"{target.chip.name}:{target.topology}"}
    return {"platform": "cuda", "target_config": _target_config(_GPUS[target.chip.name]), "topology": target.topology}


def topology_environment(target: Target) -> dict[str, str]:
    """Gives the environment in which a process can make them; it uses no device of this machine."""
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "TPU_SKIP_MDS_QUERY": "1",
    }
    if target.platform == "tpu":
        cores_per_chip = 2
        environment["TPU_ACCELERATOR_TYPE"] = f"{target.chip.name}-{cores_per_chip * target.num_devices}"
        environment["TPU_WORKER_HOSTNAMES"] = "localhost"
        environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # no chip is used, so none needs to be locked
    return environment


def _target_config(gpu: _Gpu) -> str:
    """Writes a ``GpuTargetConfigProto`` as text."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core_bytes}
  threads_per_core_limit: 2048
  core_count: {gpu.num_cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.memory_bytes_per_s}
  l2_cache_size: {gpu.l2_cache_bytes}
  clock_rate_ghz: {gpu.clock_rate_ghz}
  device_memory_size: {gpu.memory_bytes}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_bytes}
  cuda_compute_capability {{ major: {gpu.compute_capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{gpu.description}"
"""
