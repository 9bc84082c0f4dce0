"""Compiles programs for targets: traced here, compiled in a process of their own.

    step     where          what
    -------  -------------  ---------------------------------------------------------------------------------
    trace    this process   the function over the target's mesh, lowered for its platform and serialized
    compile  child process  ``process.py``: on the target's devices, with plugins and flags of its own
    read     this process   HLO text, memory and cost of the executable: a ``TargetProgram``

Plugins, flags and environment of this process do not change, and no device of the machine is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import NamedSharding

from ..arguments import check_positive
from ..planning.chips import Target
from ..plugins import devices, superseded_plugins
from .devices import topology_arguments, topology_environment
from .job import Pending
from .program import TargetError, TargetProgram

_TOOLKITS = (Path("/usr/local/cuda"),)  # where XLA looks by itself
TIMEOUT_S = 600.0
_LOWERED_FOR = {"gpu": "cuda", "tpu": "tpu"}


def start_compile_for_target(
    target: Target,
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    in_shardings: Any,
    out_shardings: Any = None,
    donate_argnums: Sequence[int] = (),
    compiler_options: Mapping[str, Any] | None = None,
    xla_flags: str = "",
    timeout_s: float = TIMEOUT_S,
) -> Pending:
    """Traces a function here and starts to compile it for a target; at most one compilation runs for each CPU.

    ``args`` are trees of arrays or ``jax.ShapeDtypeStruct``; shardings are over ``targets.mesh``, those of the results
    the compiler's choice when None. These, donated arguments and compiler options are as for ``jax.jit``. ``xla_flags``
    are added to ``XLA_FLAGS`` in the process that compiles; ``timeout_s`` counts once the compilation has started.

    Raises:
        TargetError: If the compiler for this target is not installed, or the shardings are of another mesh.
        ValueError: If ``timeout_s`` is not positive and finite.
    """
    check_installed(target)
    check_positive("timeout_s", timeout_s)
    mesh = next(leaf.mesh for leaf in jax.tree.leaves(in_shardings) if isinstance(leaf, NamedSharding))
    if mesh.size != target.num_devices:
        raise TargetError(f"in_shardings are over {mesh.size} devices and {target.spec!r} has {target.num_devices}")
    devices()  # lowering asks for one
    exported, donated = _export(target, function, tuple(args), in_shardings, out_shardings, donate_argnums)
    request = {
        "disabled_plugins": superseded_plugins(),
        "topology": topology_arguments(target),
        "exported": exported,
        "axis_names": mesh.axis_names,
        "shape": mesh.axis_sizes,
        "donate_argnums": donated,
        "compiler_options": dict(compiler_options or {}),
        "enable_x64": jax.dtypes.canonicalize_dtype("float64") == "float64",
    }
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), xla_flags)))
    environment = {**os.environ, **topology_environment(target), "XLA_FLAGS": flags}
    return Pending(target, request, environment, timeout_s)


def compile_for_target(
    target: Target, function: Callable[..., Any], args: Sequence[Any], **options: Any
) -> TargetProgram:
    """Traces a function here and compiles it for a target.

    The options are those of ``start_compile_for_target``.

    Raises:
        TargetMemoryError: If the program does not fit into the target's memory.
        TargetError: If it cannot be compiled, or not in time.

    Example:
        >>> from jax.sharding import PartitionSpec
        >>> from jaxddp import targets
        >>> by_rank = NamedSharding(targets.mesh("h100:2"), PartitionSpec("data"))
        >>> x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        >>> program = compile_for_target(targets.target("h100:2"), jnp.sum, [x], in_shardings=by_rank)
        >>> "all-reduce" in program.as_text()
        True
    """
    return start_compile_for_target(target, function, args, **options).result()


def check_installed(target: Target) -> None:
    """Checks that the compiler for a target is installed.

    Raises:
        TargetError: If it is not, with the extra that installs it.
    """
    if target.platform == "gpu":
        missing = [] if _has_cuda_plugin() and _has_ptxas() else ["the CUDA compiler"]
    else:
        missing = [] if find_spec("libtpu") else ["the TPU compiler"]
    if find_spec("flatbuffers") is None:
        missing.append("flatbuffers")
    if missing:
        raise TargetError(f"target {target.spec!r} needs {' and '.join(missing)}: pip install 'jaxddp[targets]'")


def _has_cuda_plugin() -> bool:
    plugins = find_spec("jax_plugins")
    return plugins is not None and any(find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))


def _has_ptxas() -> bool:
    nvidia = find_spec("nvidia")
    packages = list(nvidia.submodule_search_locations or []) if nvidia is not None else []
    folders = [Path(package, name) for package in packages for name in ("cuda_nvcc", "cu13")]
    return any(Path(folder, "bin", "ptxas").exists() for folder in [*folders, *_TOOLKITS]) or which("ptxas") is not None


def _export(
    target: Target,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    in_shardings: Any,
    out_shardings: Any,
    donate_argnums: Sequence[int],
) -> tuple[bytearray, list[int]]:
    """Traces, lowers and serializes a function; also gives which of its flat arguments are donated."""
    arg_is_key = [_is_key(leaf) for leaf in jax.tree.leaves(args)]
    key_impls: list[Any] = []

    def without_keys(tree: Any) -> Any:
        def data(leaf: Any) -> Any:
            if not _is_key(leaf):
                return leaf
            key_impls.append(jax.random.key_impl(leaf))
            return jax.random.key_data(leaf)

        return jax.tree.map(data, tree)

    plain_args = jax.eval_shape(without_keys, args)
    arg_impls = list(key_impls)

    def program(*plain: Any) -> Any:
        leaves, structure = jax.tree.flatten(plain)
        impls = iter(arg_impls)
        leaves = [
            jax.random.wrap_key_data(leaf, impl=next(impls)) if is_key else leaf
            for leaf, is_key in zip(leaves, arg_is_key, strict=True)
        ]
        return without_keys(function(*jax.tree.unflatten(structure, leaves)))

    jitted = jax.jit(
        program, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=tuple(donate_argnums)
    )
    # Custom calls are not stable between versions of jaxlib; the child runs the same version.
    checks = [export.DisabledSafetyCheck.custom_call("ALL")]
    exported = export.export(jitted, platforms=[_LOWERED_FOR[target.platform]], disabled_checks=checks)(*plain_args)
    # Flat trees, because classes of the caller's trees may be unknown to the child.
    flat = replace(
        exported,
        in_tree=jax.tree.structure(((0,) * len(exported.in_avals), {})),
        out_tree=jax.tree.structure([0] * len(exported.out_avals)),
    )
    counts = [len(jax.tree.leaves(arg)) for arg in args]
    donated = [
        sum(counts[:index]) + place for index, count in enumerate(counts) for place in range(count)
        if index in donate_argnums
    ]  # fmt: skip
    return flat.serialize(), donated


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
