"""Machines that are not here: meshes that stand for them, with a name and no devices, and programs compiled for them.

A function is traced and lowered here, and compiled in a child (``compile_process.py``) with the target's plugins.
"""

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax import export
from jax.extend import core
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding

from ..communication.buckets import BucketPlan
from ..communication.traces import nested
from ..ddp import naive
from ..mesh import DATA_AXIS, axes_of_ranks
from ..planning.chips import Target, target
from ..plugins import cuda_plugins, devices
from ..training.programs import COMPILERS, no_mesh
from ..training.train import Trainer, TrainState

TIMEOUT_S = 600.0


class TargetProgram(NamedTuple):
    """A program compiled for devices that are not here, read like ``jax.stages.Compiled``."""

    target: Target
    text: str
    memory: Any  # named as in Compiled.memory_analysis()

    def as_text(self) -> str:
        """The scheduled HLO module."""
        return self.text

    def memory_analysis(self) -> Any:
        """Memory on each device."""
        return self.memory


# Its result() waits; a ValueError says in a line why there is none, and its cause has the compiler's full output.
Pending = Future[TargetProgram]


def mesh(spec: str, *, axis: str = DATA_AXIS, replicas: int = 1) -> AbstractMesh:
    """Builds a target's mesh, to trace, plan and compile for; ``axis`` and ``replicas`` are as in ``data_mesh``."""
    named = target(spec)
    device = AbstractDevice(device_kind=named.spec, num_cores=None, platform=named.platform)
    COMPILERS[device] = lambda *args, **options: start_compile_for_target(*args, **options).result()
    sizes = axes_of_ranks(named.num_devices, axis, replicas)
    types = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device)


def target_of(mesh: Mesh | AbstractMesh | None) -> Target:
    """Gives the target that a mesh was made for; a ValueError if it is not one of a target."""
    if not isinstance(mesh, AbstractMesh) or mesh.abstract_device is None:
        raise ValueError(f"mesh (={mesh}) must be a target's: make it with jaxddp.targets.mesh")
    return target(mesh.abstract_device.device_kind)


def start_compile(trainer: Trainer, state: TrainState, batch: Any) -> Pending:
    """Starts what ``trainer.compile`` does on the mesh of a target, so that several programs compile at a time."""
    function, args, options = trainer.programs(state).step_function(state, batch)
    return start_compile_for_target(function, args, **options)


def start_compile_without_communication(trainer: Trainer, state: TrainState, batch: Any) -> Pending:
    """Starts to compile the step without communication, of which each rank has the full state under any strategy."""
    silent = trainer.with_strategy(naive()._replace(name="without communication", plan=lambda tensors: BucketPlan(())))
    model_state = state.model_state if trainer.has_state else None
    return start_compile(silent, silent.abstract_state(trainer.layout(state).updated, model_state), batch)


def start_compile_for_target(function: Callable[..., Any], args: Sequence[Any], **options: Any) -> Pending:
    """Traces a function here and starts to compile it for its arguments' target; options are those of ``jax.jit``."""
    with no_mesh():
        traced = jax.jit(function, **options).trace(*jax.eval_shape(lambda *args: args, *args))
        return start_compile_traced(target_of(mesh_of(traced)), traced)


def mesh_of(traced: jax.stages.Traced) -> Mesh | AbstractMesh | None:
    """The mesh of a traced function's arguments, or that of a ``shard_map`` in it."""
    for sharding in (*traced._params["in_shardings"], *(one.sharding for one in traced._meta_tys_flat)):
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    operations = (inner for equation in traced.jaxpr.jaxpr.eqns for inner in nested(equation))
    return next((one.params["mesh"] for one in operations if one.primitive.name == "shard_map"), None)


def start_compile_traced(target: Target, traced: Any, text_folder: str = "") -> Pending:
    """Starts to compile a traced function, over a mesh of its own, for a target of as many devices.

    With a ``text_folder`` the compiler for TPUs ends once the text is there: whether it fits into memory is not known.
    """
    check_installed(target)
    if (mesh := mesh_of(traced)) is None or mesh.size != target.num_devices:
        wanted = f"shardings over a mesh of {target.num_devices} devices to compile for {target.spec!r}"
        raise ValueError(f"arguments, arrays or jax.ShapeDtypeStruct, must have {wanted}, not {mesh}")
    devices()  # lowering asks for one
    # As a function of arrays, because classes of the caller's trees may be unknown to the child.
    params: Any = traced._params  # no public name has shardings and options
    donated = [place for place, is_donated in enumerate(params["donated_invars"]) if is_donated]
    of_arrays = jax.jit(
        core.jaxpr_as_fun(params["jaxpr"]), in_shardings=params["in_shardings"],
        out_shardings=list(params["out_shardings"]), donate_argnums=tuple(donated),
    )  # fmt: skip
    described: Any = traced._meta_tys_flat  # arrays that lie where JAX has put them go wherever the others are
    arrays = [
        jax.ShapeDtypeStruct(one.aval.shape, one.aval.dtype, sharding=one.sharding if one.committed else None)
        for one in described
    ]
    # Custom calls are not stable between versions of jaxlib; the child runs the same version.
    checks = [export.DisabledSafetyCheck.custom_call("ALL")]
    platform = {"gpu": "cuda"}.get(target.platform, target.platform)
    try:
        exported = export.export(of_arrays, platforms=[platform], disabled_checks=checks)(*arrays)
    except (ValueError, NotImplementedError) as error:
        names = {inner.primitive.name for each in params["jaxpr"].jaxpr.eqns for inner in nested(each)}
        calls = ", ".join(sorted(name for name in names if "callback" in name or "debug" in name))
        said = f"lowering for {target.spec!r} failed: {str(error).splitlines()[0]}"
        raise ValueError(f"{said}; {calls} must be left out, which calls Python" if calls else said) from error
    if target.platform == "tpu":
        topology = {"platform": "tpu", "topology_name": f"{target.chip.name}:{target.topology}"}
    else:
        name, *values = _GPUS[target.chip.name]
        fields = " ".join(f"{field}: {value}" for field, value in zip(_FIELDS, values, strict=True))
        config = _CONFIG.format(name=name, fields=fields)
        topology = {"platform": "cuda", "target_config": config, "topology": target.topology}
    request = {
        "topology": topology,
        "exported": exported.serialize(),
        "axis_names": mesh.axis_names,
        "axis_types": [kind.name for kind in mesh.axis_types],
        "shape": mesh.axis_sizes,
        "options": {"donate_argnums": donated, "compiler_options": dict(params.get("compiler_options_kvs", ()))},
        "enable_x64": jax.dtypes.canonicalize_dtype("float64") == "float64",
    }
    environment = os.environ | {  # of a process that uses no device of this machine
        "JAX_PLATFORMS": "cpu",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": f"{target.chip.name}-{2 * target.num_devices}",  # of cores
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is used, so none needs to be locked
    }
    return _pending(target, pickle.dumps(request), environment, text_folder)


def check_installed(target: Target) -> None:
    """Raises a ValueError if no compiler for a target is installed, or its chip can only be planned for."""
    if target.chip.name not in (known := [*_GPUS, "v5p"]):
        raise ValueError(f"target {target.spec!r} must be of a chip that programs compile for: {', '.join(known)}")
    compiler = cuda_plugins() if target.platform == "gpu" else find_spec("libtpu")
    if not compiler or not find_spec("flatbuffers"):
        raise ValueError(f"target {target.spec!r} needs a compiler: pip install 'jaxddp[targets]'")


# What a GpuTargetConfigProto says of each GPU, as in https://github.com/openxla/xla, xla/backends/gpu/target_config:
# XLA chooses tilings by it, and leaves its own kernels for small all-reduces out if there are no links.
_FIELDS = (
    "core_count", "fpus_per_core", "clock_rate_ghz", "memory_bandwidth", "device_memory_size", "l2_cache_size",
    "shared_memory_per_core", "shared_memory_per_block_optin", "cuda_compute_capability", "device_interconnect_info",
)  # fmt: skip
_HOPPER = 52428800, 233472, 232448, "{ major: 9 }", "{ active_links: 18 }"
_BLACKWELL = 132644864, 233472, 232448, "{ major: 10 }", "{ active_links: 18 }"
_AMPERE = 41943040, 167936, 166912, "{ major: 8 }", "{ active_links: 12 }"
_GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 132, 128, 1.98, 3352320000000, 84929347584, *_HOPPER),
    "h200": ("NVIDIA H200 141GB HBM3e", 132, 128, 1.98, 4800000000000, 151397597184, *_HOPPER),
    "a100": ("NVIDIA A100-SXM4-80GB", 108, 64, 1.41, 2039040000000, 85100068864, *_AMPERE),
    "b200": ("NVIDIA B200", 148, 128, 1.965, 7672320000000, 191514411008, *_BLACKWELL),
}
_CONFIG = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 {fields} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 7 }} runtime_version {{ major: 12 minor: 8 patch: 0 }}
device_description_str: "{name}"
"""


# Of what libtpu can write while it compiles, the optimized and scheduled module alone.
_WRITE_TEXT = (
    "--xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=false --xla_jf_dump_only_matching_hlo=true"
    " --xla_jf_dump_llo_pass_label_regex=nothing --xla_jf_dump_to="
)
_SCRIPT = Path(__file__).with_name("compile_process.py")
_free_cpus = threading.BoundedSemaphore(os.cpu_count() or 1)


def _pending(target: Target, request: bytes, environment: dict[str, str], text_folder: str = "") -> Pending:
    """Compiles as soon as a CPU is free, in a thread that this process does not wait for when it ends."""
    outcome: Pending = Future()

    def run() -> None:
        try:
            with _free_cpus:
                outcome.set_result(_compile(target, request, environment, text_folder))
        except BaseException as error:  # whoever waits gets it
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def _compile(target: Target, request: bytes, environment: dict[str, str], text_folder: str) -> TargetProgram:
    spec = repr(target.spec)
    if text_folder:
        given = environment.get("LIBTPU_INIT_ARGS", "")
        environment["LIBTPU_INIT_ARGS"] = f"{given} {_WRITE_TEXT}{text_folder}".strip()
    # -P: the names of this folder's files must not hide other packages.
    command = [sys.executable, "-P", str(_SCRIPT), str(os.getpid()), text_folder]
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"compiling for {spec} took longer than {TIMEOUT_S:g} s") from error
    if done.returncode:
        printed = done.stderr.decode(errors="replace")
        lines = printed.strip().splitlines()
        errors = [line for line in lines if "rror" in line and "stack trace" not in line]  # they stand above a stack
        ended = f"the process that compiles for {spec} ended with code {done.returncode}"
        raise ValueError(": ".join([ended, *(errors or lines)[-1:]])) from RuntimeError(printed)
    if text_folder and (texts := [path.read_text() for path in Path(text_folder).glob("*-TLP-hlo.txt")]):
        return TargetProgram(target, texts[0], SimpleNamespace())
    answer = pickle.loads(done.stdout)
    if isinstance(answer, str):
        raise ValueError(f"compiling for {spec} failed: {answer.splitlines()[0]}") from RuntimeError(answer)
    text, memory = answer
    return TargetProgram(target, text, SimpleNamespace(**memory))
