"""What public training programs compile to: the tables of ``docs/what-it-compiles-to.md``.

    git clone https://github.com/google/flax && git clone https://github.com/AllanYangZhou/midGPT
    python3 -m benchmarks.public_programs flax_mnist flax/examples/mnist
    python3 -m benchmarks.public_programs flax_imagenet flax/examples/imagenet
    python3 -m benchmarks.public_programs flax_lm1b flax/examples/lm1b
    python3 -m benchmarks.public_programs midgpt midGPT          # needs equinox and jaxtyping
    pip install --pre --no-deps --target lev levanter haliax
    python3 -m benchmarks.public_programs levanter lev           # needs equinox, jmp, draccus, aqtp and chex

A program's own functions are imported from its folder and compiled as they stand, with its own configuration, for 8
H100s; nothing is trained. Packages for data, logs and configurations are replaced by empty ones.
"""

import argparse
import dataclasses
import functools
import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxddp

TARGET, NUM_DEVICES = "h100:8", 8
# Of which a training step uses nothing, in the programs of Flax and midGPT and in Levanter.
NOT_NEEDED = {
    "clu", "flax.metrics.tensorboard", "flax.training.checkpoints", "tensorflow", "tensorflow_datasets",
    "tensorflow_text", "sentencepiece", "tqdm", "wandb", "input_pipeline", "tokenizer", "temperature_sampler",
    "transformers", "datasets", "pyarrow", "ray", "gcsfs", "tokenizers", "zstandard", "async_lru", "lm_eval",
    "filelock", "git", "braceexpand", "tensorboardX", "trackio", "huggingface_hub", "jinja2", "marshmallow",
    "dataclasses_json", "deepdiff", "lenses", "fastapi", "openai", "prompt_toolkit", "pydantic", "regex", "uvicorn",
    "tblib", "tqdm_loggable", "soundfile", "librosa", "sklearn", "pandas",
}  # fmt: skip


class EmptyPackages(MetaPathFinder, Loader):
    """Finds the packages of ``NOT_NEEDED``, in which everything is there and does nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A package, if it or what it belongs to is listed."""
        is_empty = name in NOT_NEEDED or name.partition(".")[0] in NOT_NEEDED
        return ModuleSpec(name, self, is_package=True) if is_empty else None

    def create_module(self, spec: ModuleSpec) -> Any:
        """Any attribute is found."""
        return MagicMock(__path__=[])

    def exec_module(self, module: Any) -> None:
        """Nothing to run."""


class Config(SimpleNamespace):
    """Stands for ``ml_collections.ConfigDict``; a program is static in it, and hashes it."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def data_mesh(*names: str, sizes: tuple[int, ...] = (NUM_DEVICES,)) -> Mesh:
    """The 8 simulated devices, in one axis or as many as there are names."""
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


def arrays(tree: Any, mesh: Mesh, *spec: Any) -> Any:
    """The shapes of a tree, laid out over a mesh."""
    place = NamedSharding(mesh, P(*spec))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), tree)


def shape(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array of these dimensions."""
    return jax.ShapeDtypeStruct(dims, dtype)


def flax_mnist() -> tuple[Any, ...]:
    """Flax's MNIST example: a CNN with BatchNorm, ``nnx.jit``; its batch of 128 is split over the devices."""
    from flax import nnx

    train, config = importlib.import_module("train"), importlib.import_module("configs.default").get_config()
    mesh = data_mesh("data")
    model = train.CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(config.learning_rate, config.momentum), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    held = model, optimizer, metrics, nnx.Rngs(0)
    nnx.update(held, jax.device_put(nnx.state(held), NamedSharding(mesh, P())))
    num = config.batch_size
    batch = {"image": shape(num, 28, 28, 1), "label": shape(num, dtype=jnp.int32)}
    return train.train_step, *held[:3], arrays(batch, mesh, "data"), held[3]


def flax_imagenet() -> tuple[Any, ...]:
    """Flax's ImageNet example: ResNet-50 under ``pmap``, here as the ``shard_map`` that ``pmap`` is."""
    train, models = importlib.import_module("train"), importlib.import_module("models")
    config, mesh = importlib.import_module("configs.default").get_config(), data_mesh("batch")
    model = train.create_model(model_cls=models.ResNet50, half_precision=config.half_precision)
    rate = optax.constant_schedule(config.learning_rate)
    state = jax.eval_shape(lambda: train.create_train_state(jax.random.key(0), config, model, 224, rate))
    step = functools.partial(train.train_step, learning_rate_fn=rate)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("batch")), out_specs=P(), check_vma=False, axis_names={"batch"}
    )
    batch = {"image": shape(config.batch_size, 224, 224, 3), "label": shape(config.batch_size, dtype=jnp.int32)}
    return jax.jit(mapped, donate_argnums=0), arrays(state, mesh), arrays(batch, mesh, "batch")


def flax_lm1b() -> tuple[Any, ...]:
    """Flax's language model example: a transformer of 6 layers, FSDP by ``jit`` and logical axes."""
    train, models, utils = map(importlib.import_module, ("train", "models", "utils"))
    config = importlib.import_module("configs.default").get_config()
    sizes = {one.name: getattr(config, one.name, one.default) for one in dataclasses.fields(models.TransformerConfig)}
    dtype = jnp.bfloat16 if config.use_bfloat16 else jnp.float32
    own = models.TransformerConfig(**sizes | {"output_vocab_size": config.vocab_size, "dtype": dtype})
    mesh = Mesh(utils.create_device_mesh(config), config.mesh_axes)
    rate = train.create_learning_rate_schedule(config.learning_rate, config.warmup_steps)
    optimizer = optax.adamw(rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=config.weight_decay)
    state, places = utils.setup_initial_state(
        models.TransformerLM(own.replace(deterministic=True)), optimizer, config, jax.random.PRNGKey(0), mesh
    )
    by_rank = NamedSharding(mesh, P(config.data_sharding))

    def step(state: Any, batch: Any, key: Any) -> Any:
        return train.train_step(state, batch, own, rate, 0.0, key)

    jitted = jax.jit(step, in_shardings=(places, by_rank, None), out_shardings=(places, None), donate_argnums=0)
    rows = NUM_DEVICES * config.per_device_batch_size
    names = "inputs", "inputs_position", "inputs_segmentation"
    batch = {name: shape(rows, config.max_target_length, dtype=jnp.int32) for name in names}
    return jitted, state, arrays(batch, mesh, *by_rank.spec), jax.random.PRNGKey(0)


def midgpt() -> tuple[Any, ...]:
    """The 124 M parameters of midGPT on OpenWebText: equinox, bfloat16, 16 micro-batches in a scan."""
    eqx, train, models = map(importlib.import_module, ("equinox", "src.train", "src.model"))
    config = importlib.import_module("src.configs.openwebtext").config
    mesh = data_mesh("replica", "data", sizes=(1, NUM_DEVICES))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=config.beta2),
        optax.add_decayed_weights(config.weight_decay / config.learning_rate), optax.scale(-config.learning_rate),
    )  # fmt: skip
    step, _ = train.make_training_fns(config, optimizer, mesh)
    model = eqx.filter_eval_shape(models.GPT, config.model_config, jax.random.PRNGKey(0))
    held, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def of_arrays(held: Any, *others: Any) -> Any:
        model, *results = step(eqx.combine(held, static), *others)
        return eqx.filter(model, eqx.is_array), *results

    rows = shape(config.g_accum_iters, config.batch_size, config.model_config.block_size, dtype=jnp.int32)
    batch = arrays(rows, mesh, None, ("replica", "data"))
    opt_state, key = jax.eval_shape(optimizer.init, held), jax.eval_shape(lambda: jax.random.PRNGKey(0))
    return jax.jit(of_arrays), arrays(held, mesh), arrays(opt_state, mesh), batch, batch, arrays(key, mesh)


def levanter() -> tuple[Any, ...]:
    """Levanter's step of GPT-2 small by its defaults: FSDP by named axes, products in bfloat16, batch of 512.

    Its loss gives ``jnp.mean`` a mask of floats, which JAX 0.10 refuses: here the mask is of booleans.
    """
    names = "equinox", "haliax", "jmp", "levanter.trainer", "levanter.models.gpt2", "levanter.models.lm_model"
    eqx, hax, jmp, training, gpt2, lm = map(importlib.import_module, names)
    optim, tracker, states = map(
        importlib.import_module, ("levanter.optim", "levanter.tracker", "levanter.trainer_state")
    )
    config = training.TrainerConfig(
        mp=jmp.get_policy("p=f32,c=bfloat16"), tracker=tracker.NoopConfig(), id="none", require_accelerator=False
    )
    model, optimizer = gpt2.Gpt2Config(), optim.AdamConfig().build(config.num_train_steps)
    loss = functools.partial(
        lm.compute_next_token_loss, reduction=lambda x, where, axis: hax.mean(x, where=where != 0, axis=axis)
    )
    trainer = training.Trainer(config, optimizer, loss, add_default_hooks=False)
    trainer.__enter__()  # its mesh and axes hold until the end
    mapping, key = trainer.parameter_axis_mapping, jax.random.PRNGKey(0)
    vocab = hax.partitioning.round_axis_for_partitioning(hax.Axis("vocab", 50257), mapping)

    def init() -> Any:
        made = model.build(vocab, key=key)
        return states.TrainerState.init(
            optimizer, made, key=key, is_trainable=True, mp=trainer.mp, quantization=None, model_averaging=None
        )

    def examples() -> Any:
        axes = config.TrainBatch, model.Pos
        return lm.LmExample(hax.zeros(axes, dtype=jnp.int32), hax.ones(axes, dtype=bool))

    def shapes(make: Any, mapping: Any) -> Any:
        held, static = eqx.partition(eqx.filter_eval_shape(make), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
        places = hax.partitioning.infer_resource_partitions(held, mapping, preserve_existing_shardings=False)
        return jax.tree.map(lambda place, named: arrays(named, place.mesh, *place.spec), places, held), static

    (state, state_static), (batch, batch_static) = shapes(init, mapping), shapes(examples, trainer.compute_axis_mapping)

    def step(state: Any, batch: Any) -> Any:
        examples = (eqx.combine(batch, batch_static),)
        made = trainer._train_step(eqx.combine(state, state_static), examples, {}, _no_hooks=True)
        return eqx.filter(made, eqx.is_array)

    return jax.jit(step, donate_argnums=0), state, batch


PROGRAMS = {one.__name__: one for one in (flax_mnist, flax_imagenet, flax_lm1b, midgpt, levanter)}


def main() -> None:
    """Prints the table of one program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("folder", help="of the program")
    args = parser.parse_args()
    sys.path.insert(0, args.folder)
    sys.meta_path.insert(0, EmptyPackages())
    sys.modules["ml_collections"] = MagicMock(ConfigDict=Config)
    jaxddp.simulate_devices(NUM_DEVICES)
    step, *given = PROGRAMS[args.program]()
    print(jaxddp.collectives(step, *given, target=TARGET))


if __name__ == "__main__":
    main()
