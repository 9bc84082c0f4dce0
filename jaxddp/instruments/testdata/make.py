"""Compiles the programs of this folder.

    python -m jaxddp.instruments.testdata.make [platform-program ...]     all if none is named

One run makes those of one version of JAX; the extra ``targets`` installs the compilers. The current files come from
jax 0.10.2 and 0.12.0.1, and those of CPUs and GPUs from 0.11.2.

All are for 8 devices: simulated ones on CPUs, ``h100:8`` and ``v5p:8``. The model is ``tiny``.

    program      what                                                              on
    naive        the trainer's step                                                cpu gpu tpu
    bucketed     the trainer's step, ``bucketed(0.005)``                           cpu gpu tpu
    auto         the same step as plain jit with replicated parameters, one block  gpu
    collectives  reduce-scatter, all-gather, permutation, all-to-all               cpu gpu tpu
    microbatch   the trainer's step of 3 micro-batches, a small MLP, one bucket    cpu gpu
    loop         an all-reduce in a loop of 5 iterations                           cpu gpu tpu
    products     matrix products of bfloat16 and of float32 at highest precision,  gpu
                 a convolution

The text is kept as printed, except for source locations and ``scheduling_name``, which repeats the name.
"""

import dataclasses
import gzip
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import jaxddp
from jaxddp import models, targets
from jaxddp.instruments.targets import start_compile_for_target
from jaxddp.models.toy_test import abstract

NUM_DEVICES = 8
SEQUENCES_PER_DEVICE = 6  # not 8, to tell batch dims from device dims
SPECS = {"gpu": f"h100:{NUM_DEVICES}", "tpu": f"v5p:{NUM_DEVICES}"}
TINY = models.SIZES["tiny"]
F32 = jnp.float32

TOKENS = jax.ShapeDtypeStruct((NUM_DEVICES * SEQUENCES_PER_DEVICE, TINY.context), jnp.int32)
BATCH = {"tokens": TOKENS, "targets": TOKENS}
EXAMPLES = {name: jax.ShapeDtypeStruct((NUM_DEVICES * 3 * 20, width), F32) for name, width in (("x", 10), ("y", 5))}


def _trainer(platform: str, model: str, batch: Any, strategy: jaxddp.Strategy, **options: Any) -> str:
    loss_fn, params = abstract(model)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), strategy, _mesh(platform), **options)
    return str(trainer.compile(trainer.abstract_state(params), batch).as_text())


def _auto(platform: str) -> str:
    loss_fn, params = models.abstract(dataclasses.replace(TINY, num_layers=1))
    optimizer = optax.adamw(1e-3)

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    args = (params, jax.eval_shape(optimizer.init, params), BATCH)
    return _compile(platform, step, args, (PartitionSpec(), PartitionSpec(), PartitionSpec("data")))


def _collectives(platform: str) -> str:
    def on_rank(x: jax.Array) -> jax.Array:
        ring = [(rank, (rank + 1) % NUM_DEVICES) for rank in range(NUM_DEVICES)]
        part = lax.psum_scatter(jnp.tanh(x), "data", scatter_dimension=0, tiled=True)
        whole = lax.all_gather(jnp.sin(part), "data", axis=0, tiled=True)
        passed = lax.ppermute(jnp.exp(whole), "data", ring)
        return lax.all_to_all(jnp.cos(passed), "data", split_axis=0, concat_axis=1, tiled=True)

    return _compile_on_ranks(platform, on_rank, (NUM_DEVICES * 1024, 256), PartitionSpec("data"))


def _loop(platform: str) -> str:
    def on_rank(x: jax.Array) -> jax.Array:
        def one_round(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return lax.psum(jnp.tanh(x @ x), "data"), None

        return lax.scan(one_round, x, length=5)[0]

    return _compile_on_ranks(platform, on_rank, (NUM_DEVICES * 192, 192), PartitionSpec())


def _products(platform: str) -> str:
    def on_rank(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        in_bfloat16 = x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16)
        exact = jnp.matmul(x.T, x, precision=lax.Precision.HIGHEST)
        images, kernels = x.reshape(4, 12, 16, 96), jnp.ones((3, 3, 96, 32), F32)
        convolved = lax.conv_general_dilated(
            images, kernels, window_strides=(2, 1), padding="SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return in_bfloat16, exact, convolved

    return _compile_on_ranks(platform, on_rank, (NUM_DEVICES * 192, 384), PartitionSpec("data"))


PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[[str], str]]] = {
    "naive": (("cpu", "gpu", "tpu"), lambda platform: _trainer(platform, "tiny", BATCH, jaxddp.naive())),
    "bucketed": (("cpu", "gpu", "tpu"), lambda platform: _trainer(platform, "tiny", BATCH, jaxddp.bucketed(0.005))),
    "auto": (("gpu",), _auto),
    "collectives": (("cpu", "gpu", "tpu"), _collectives),
    "microbatch": (
        ("cpu", "gpu"),
        lambda platform: _trainer(platform, "toy", EXAMPLES, jaxddp.bucketed(bucket_mb=None), num_microbatches=3),
    ),
    "loop": (("cpu", "gpu", "tpu"), _loop),
    "products": (("gpu",), _products),
}


def _scrub(text: str) -> str:
    """Removes source locations from the text of a module."""
    text = re.sub(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*\n*", "", text, flags=re.MULTILINE)
    text = re.sub(r' ?(?:(?:source_file|scheduling_name)="[^"]*"|(?:source_\w+|stack_frame_id)=\d+)', "", text)
    return text.replace(", metadata={}", "")


def _compile_on_ranks(platform: str, on_rank: Callable[..., Any], shape: tuple[int, int], out: PartitionSpec) -> str:
    function = jax.shard_map(
        on_rank, mesh=_mesh(platform), in_specs=PartitionSpec("data"), out_specs=out, check_vma=False
    )
    return _compile(platform, function, (jax.ShapeDtypeStruct(shape, F32),), (PartitionSpec("data"),))


def _compile(platform: str, function: Callable[..., Any], args: Any, specs: tuple[PartitionSpec, ...]) -> str:
    mesh = _mesh(platform)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    if platform == "cpu":
        return str(jax.jit(function, in_shardings=shardings).lower(*args).compile().as_text())
    return start_compile_for_target(function, args, in_shardings=shardings).result().as_text()


def _mesh(platform: str) -> Mesh | AbstractMesh:
    return jaxddp.data_mesh(NUM_DEVICES) if platform == "cpu" else targets.mesh(SPECS[platform])


def main() -> None:
    """Makes the programs that the command line names."""
    jaxddp.simulate_devices(NUM_DEVICES)
    version = ".".join(jax.__version__.split(".")[:2])
    wanted = sys.argv[1:] or [f"{platform}-{name}" for name in PROGRAMS for platform in PROGRAMS[name][0]]
    for platform_and_name in wanted:
        platform, name = platform_and_name.split("-")
        text = _scrub(PROGRAMS[name][1](platform))
        file = Path(__file__).with_name(f"{platform}-{name}-jax{version}.hlo.gz")
        file.write_bytes(gzip.compress(text.encode(), mtime=0))
        print(f"{file.name}: {len(text):,} characters, {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
