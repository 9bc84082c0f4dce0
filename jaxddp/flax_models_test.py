"""A residual network and a transformer with dropout, in NNX and in Linen, under every strategy.

The reference is one device without jaxddp's communication: it differentiates the mean of what the ranks' rows give with
the ranks' keys, one beside the other in a ``jax.vmap``.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxddp
from jaxddp.flax import from_linen, from_nnx

NUM_RANKS, NUM_STEPS, ROWS = 4, 4, 8
CHANNELS, CLASSES = (4, 6), 3
VOCAB, CONTEXT, WIDTH, HEADS = 11, 5, 8, 2
RATE = 0.2
# Before a norm, and in attention's keys, the gradient of a bias is 0 but for rounding, which AdamW would blow up.
PLAIN = {"use_bias": False}
# Sums of at most 400 products, rounded in another order; masks of another rank are off by 1e-2.
TOLERANCE = 1e-12


class NnxBlock(nnx.Module):
    def __init__(self, features, width, options):
        self.first = nnx.Conv(features, width, (3, 3), 2, **PLAIN, **options)
        self.second = nnx.Conv(width, width, (3, 3), **PLAIN, **options)
        self.short = nnx.Conv(features, width, (1, 1), 2, **PLAIN, **options)
        self.norms = nnx.List([nnx.BatchNorm(width, axis_name="data", **options) for _ in range(2)])  # over all ranks

    def __call__(self, x):
        return nnx.relu(self.norms[1](self.second(nnx.relu(self.norms[0](self.first(x))))) + self.short(x))


class NnxResNet(nnx.Module):
    def __init__(self, dtype):
        options = {"param_dtype": dtype, "rngs": nnx.Rngs(params=0, dropout=1)}
        sizes = zip((3, *CHANNELS), CHANNELS, strict=False)
        self.blocks = nnx.List([NnxBlock(before, width, options) for before, width in sizes])
        self.dropout = nnx.Dropout(RATE, rngs=options["rngs"])
        self.head = nnx.Linear(CHANNELS[-1], CLASSES, **options)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean(axis=(1, 2))))


class LinenResNet(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x, is_training):
        conv = functools.partial(nn.Conv, param_dtype=self.dtype, **PLAIN)
        # Each rank normalises its own rows.
        norm = functools.partial(nn.BatchNorm, use_running_average=not is_training, param_dtype=self.dtype)
        for width in CHANNELS:
            inner = nn.relu(norm()(conv(width, (3, 3), 2)(x)))
            x = nn.relu(norm()(conv(width, (3, 3))(inner)) + conv(width, (1, 1), 2)(x))
        x = nn.Dropout(RATE, deterministic=not is_training)(x.mean(axis=(1, 2)))
        return nn.Dense(CLASSES, param_dtype=self.dtype)(x)


class NnxTransformer(nnx.Module):
    def __init__(self, dtype):
        options = {"param_dtype": dtype, "rngs": nnx.Rngs(params=0, dropout=1)}
        self.embed = nnx.Embed(VOCAB, WIDTH, **options)
        self.attend = nnx.MultiHeadAttention(HEADS, WIDTH, dropout_rate=RATE, decode=False, **PLAIN, **options)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, **options) for _ in range(3)])
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, **options), nnx.Linear(2 * WIDTH, WIDTH, **options)
        self.dropout = nnx.Dropout(RATE, rngs=options["rngs"])
        self.head = nnx.Linear(WIDTH, VOCAB, **options)

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attend(self.norms[0](x), mask=nnx.make_causal_mask(tokens))
        x = x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))
        return self.head(self.norms[2](x))


class LinenTransformer(nn.Module):
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, tokens, is_training):
        options = {"param_dtype": self.dtype}
        x, drops = nn.Embed(VOCAB, WIDTH, **options)(tokens), {"deterministic": not is_training}
        attend = nn.MultiHeadDotProductAttention(HEADS, dropout_rate=RATE, **drops, **PLAIN, **options)
        x = x + attend(nn.LayerNorm(**options)(x), mask=nn.make_causal_mask(tokens))
        inner = nn.gelu(nn.Dense(2 * WIDTH, **options)(nn.LayerNorm(**options)(x)))
        x = x + nn.Dropout(RATE, **drops)(nn.Dense(WIDTH, **options)(inner))
        return nn.Dense(VOCAB, **options)(nn.LayerNorm(**options)(x))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.result_type(logits, "f4")), labels).mean()


def of_nnx(module, _, dtype):
    model = module(dtype)
    model.train()  # attention asks for a mode
    return from_nnx(model, lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]))


def of_linen(module, batch, dtype):
    module = module(dtype)

    def loss(apply, batch, is_training):
        return cross_entropy(apply(batch["x"], is_training), batch["y"])

    return from_linen(module, module.init(jax.random.key(0), batch["x"], False), loss)


MODELS = {
    "nnx-resnet": (of_nnx, NnxResNet),
    "linen-resnet": (of_linen, LinenResNet),
    "nnx-transformer": (of_nnx, NnxTransformer),
    "linen-transformer": (of_linen, LinenTransformer),
}


def make(kind, dtype):
    """Loss function, parameters, model state and batches."""
    rng = np.random.default_rng(0)
    if "resnet" in kind:
        batches = [
            {"x": rng.normal(size=(ROWS, 8, 8, 3)).astype(dtype), "y": rng.integers(0, CLASSES, ROWS)}
            for _ in range(NUM_STEPS)
        ]
    else:
        draws = [rng.integers(0, VOCAB, (ROWS, CONTEXT + 1)) for _ in range(NUM_STEPS)]
        batches = [{"x": tokens[:, :-1], "y": tokens[:, 1:]} for tokens in draws]
    adapt, module = MODELS[kind]
    loss_fn, params, model_state = adapt(module, batches[0], dtype)
    # Running statistics begin in float32, whatever the other dtypes are.
    return loss_fn, params, jax.tree.map(lambda leaf: leaf.astype(dtype), model_state), batches


OPTIMIZERS = {
    "adamw": lambda rate=1e-2: optax.adamw(rate, weight_decay=0.01),
    "muon": lambda rate=1e-2: optax.contrib.muon(rate, weight_decay=0.01),
}


def keys_of_ranks(step):
    """The keys that a trainer's ranks give the loss function of their only micro-batch."""
    key = jax.random.fold_in(jax.random.key(0), step)
    return jax.vmap(lambda rank: jax.random.fold_in(jax.random.fold_in(key, rank), 0))(jnp.arange(NUM_RANKS))


@functools.cache
def trained_alone(kind, optimizer):
    """Initial and trained parameters and model state."""
    loss_fn, params, model_state, batches = make(kind, jnp.float64)
    optimizer = OPTIMIZERS[optimizer]()

    @jax.jit
    def step(params, model_state, opt_state, batch, keys):
        rows = jax.tree.map(lambda leaf: leaf.reshape(NUM_RANKS, -1, *leaf.shape[1:]), batch)

        def mean_loss(params):
            of_ranks = jax.vmap(loss_fn, (None, None, 0, 0), axis_name="data")
            return jax.tree.map(lambda leaf: leaf.mean(0), of_ranks(params, model_state, rows, keys))

        grads, model_state = jax.grad(mean_loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), model_state, opt_state

    found = params, model_state, optimizer.init(params)
    for number, batch in enumerate(batches):
        found = step(*found, batch, keys_of_ranks(number))
    return (params, model_state), found[:2]


def train(loss_fn, params, model_state, batches, optimizer, strategy, **options):
    """What training on ranks ends with, and its losses."""
    mesh = jaxddp.data_mesh(NUM_RANKS)
    trainer = jaxddp.Trainer(loss_fn, optimizer, strategy, mesh, has_state=True, **options)
    state, losses = trainer.init(params, model_state=model_state), []
    for batch in batches:
        state, metrics = trainer.step(state, batch)
        losses.append(float(metrics["loss"]))
    return (trainer.params(state), trainer.model_state(state)), losses


SHARDED = {"min_shard_elements": 0}
STRATEGIES = {
    "adamw": [
        jaxddp.naive(), jaxddp.flat(), jaxddp.overlapped(), jaxddp.bucketed(1e-3),
        jaxddp.zero1(1e-3), jaxddp.zero2(1e-3), jaxddp.zero3(**SHARDED),
    ],
    "muon": [
        jaxddp.naive(), jaxddp.flat(), jaxddp.overlapped(), jaxddp.bucketed(1e-3),
        jaxddp.zero1(1e-3, shard="leaves"), jaxddp.zero2(1e-3, shard="leaves"),
    ],
}  # fmt: skip
QUICK = {("nnx-transformer", "muon", "zero1"), ("linen-resnet", "adamw", "zero3")}
CASES = [
    pytest.param(
        kind, optimizer, strategy, id="-".join((kind, optimizer, strategy.name)),
        marks=() if (kind, optimizer, strategy.name) in QUICK else pytest.mark.full,
    )
    for kind in MODELS for optimizer, strategies in STRATEGIES.items() for strategy in strategies
]  # fmt: skip


@pytest.mark.parametrize(("kind", "optimizer", "strategy"), CASES)
def test_weights_are_those_of_one_process(kind, optimizer, strategy):
    with jax.enable_x64(True):
        initial, expected = trained_alone(kind, optimizer)
        found, _ = train(*make(kind, jnp.float64), OPTIMIZERS[optimizer](), strategy)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=TOLERANCE), found, expected)
        moved = jax.tree.map(lambda x, y: float(abs(x - y).max()), found, initial)
        assert min(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.parametrize(
    ("kind", "optimizer", "strategy"),
    [
        pytest.param(
            kind, optimizer, strategy, id="-".join((kind, optimizer, strategy.name)),
            marks=() if (kind, optimizer, strategy.name) == ("nnx-resnet", "adamw", "zero1") else pytest.mark.full,
        )
        for kind in MODELS for optimizer, strategies in STRATEGIES.items() for strategy in strategies
    ],
)  # fmt: skip
def test_bfloat16_with_masters_has_the_loss_of_float32(kind, optimizer, strategy):
    *model, (batch, *_) = make(kind, jnp.float32)
    training = OPTIMIZERS[optimizer](1e-3), strategy
    _, expected = train(*model, [batch] * 20, *training)
    if "resnet" in kind:
        batch["x"] = batch["x"].astype(jnp.bfloat16)  # images in float32 would make the products float32
    masters, losses = train(*model, [batch] * 20, *training, compute_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(masters)} == {jnp.dtype("float32")}
    assert losses != expected and expected[-1] < 0.96 * expected[0]
    # At most 0.4 % was seen, and 2 to 6 % without masters, as most updates are less than bfloat16's 8 bits resolve.
    np.testing.assert_allclose(losses, expected, rtol=0.01)
