"""Every strategy in its shortest honest form. Read this file first; `torchref/plain.py` says the same in PyTorch.

Data parallelism: N ranks hold equal parameters, and each computes the gradient of its own 1/N of the batch. The mean of
these gradients over the ranks is the gradient of the whole batch, so if every rank applies that mean, the parameters
stay equal. The strategies differ in how the mean is computed (how many collectives, and when they may start) and in
what each rank keeps between steps.

Every function below takes

    loss_fn     (params, batch) -> mean loss over the examples of the batch
    optimizer   an optax transformation; for ZeRO, one that updates each element on its own (SGD and AdamW do)
    params      initial parameters, a tree of arrays
    mesh        one-dimensional, with the axis "data" of N devices

and returns the initial state and the step:

    state, loss = step(state, batch)      # batch: arrays [global_batch, ...], split over the ranks along dimension 0

Bytes sent per rank are those of ring collectives: an all-reduce of S bytes sends 2 (N-1)/N S, a reduce-scatter or an
all-gather (N-1)/N S.

None of this decides what runs. XLA is free to merge collectives and to move them, and on CPU it compiles `naive`,
`flat`, `overlapped` and `bucketed` to one all-reduce each. `parity_tests/plain_test.py` shows that, and shows the
collectives as written here under the options that keep them; the rest of this package exists to control it.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec as P
from jax.tree_util import Partial


def naive(loss_fn, optimizer, params, mesh):
    """One all-reduce per parameter, after the whole backward.

    per rank: parameters, gradients, optimizer state [shape]         sends 2 (N-1)/N Psi, as many calls as parameters
    """

    def step(state, batch):
        params, opt_state = state
        loss, grads = _local_gradients(loss_fn, params, batch)
        # The barrier has all gradients as inputs: no all-reduce can start before the last gradient exists.
        grads = lax.optimization_barrier(grads)
        grads = jax.tree.map(lambda grad: lax.pmean(grad, "data"), grads)
        return _update(optimizer, grads, opt_state, params), lax.pmean(loss, "data")

    params = _replicate(params, mesh)
    return (params, optimizer.init(params)), _on_each_rank(step, mesh, P())


def flat(loss_fn, optimizer, params, mesh):
    """One all-reduce of everything, after the whole backward: one latency instead of many.

    per rank: as `naive`, and a buffer [all elements]                sends 2 (N-1)/N Psi, one call
    """

    def step(state, batch):
        params, opt_state = state
        loss, grads = _local_gradients(loss_fn, params, batch)
        buffer, unflatten = ravel_pytree(grads)
        grads = unflatten(lax.pmean(buffer, "data"))
        return _update(optimizer, grads, opt_state, params), lax.pmean(loss, "data")

    params = _replicate(params, mesh)
    return (params, optimizer.init(params)), _on_each_rank(step, mesh, P())


def overlapped(loss_fn, optimizer, params, mesh):
    """One all-reduce per parameter, each as soon as its gradient exists, while the backward goes on.

    per rank: as `naive`                                             sends 2 (N-1)/N Psi, as many calls as parameters
    """

    def step(state, batch):
        params, opt_state = state
        loss, grads = _local_gradients(loss_fn, params, batch)
        # Only the barrier of `naive` is missing. A traced program has no "when": an operation may run once its inputs
        # exist, so this permits overlap. Whether it happens is for XLA's scheduler to decide.
        grads = jax.tree.map(lambda grad: lax.pmean(grad, "data"), grads)
        return _update(optimizer, grads, opt_state, params), lax.pmean(loss, "data")

    params = _replicate(params, mesh)
    return (params, optimizer.init(params)), _on_each_rank(step, mesh, P())


def bucketed(loss_fn, optimizer, params, mesh, bucket_bytes=25 * 2**20):
    """One all-reduce per bucket of gradients, as soon as the bucket is full: few calls, and they overlap.

    per rank: as `naive`, and buffers [elements of the bucket]       sends 2 (N-1)/N Psi, as many calls as buckets
    """

    def step(state, batch):
        params, opt_state = state
        loss, grads = _local_gradients(loss_fn, params, batch)
        leaves, structure = jax.tree.flatten(grads)
        for bucket in _fill_buckets(leaves, bucket_bytes):
            # The buffer depends on the gradients of its bucket only, so its all-reduce waits for no other.
            buffer, unflatten = ravel_pytree([leaves[i] for i in bucket])
            for i, mean in zip(bucket, unflatten(lax.pmean(buffer, "data")), strict=True):
                leaves[i] = mean
        return _update(optimizer, jax.tree.unflatten(structure, leaves), opt_state, params), lax.pmean(loss, "data")

    params = _replicate(params, mesh)
    return (params, optimizer.init(params)), _on_each_rank(step, mesh, P())


def zero1(loss_fn, optimizer, params, mesh):
    """ZeRO-1: each rank keeps the optimizer state of 1/N of every parameter, and updates only that part.

    per rank: parameters and gradients [shape], optimizer state [c]   sends 2 (N-1)/N Psi
    with c = ceil(elements / N)
    """

    def step(state, batch):
        params, opt_state = state
        loss, grads = _local_gradients(loss_fn, params, batch)
        # An all-reduce is a reduce-scatter and an all-gather. The update goes between the two, on 1/N of the elements.
        grads, shards = jax.tree.map(_mean_shard, grads), jax.tree.map(_local_shard, params)
        shards, opt_state = _update(optimizer, grads, opt_state, shards)
        params = jax.tree.map(lambda shard, p: _gather(shard, p.shape, to="invarying"), shards, params)
        return (params, opt_state), lax.pmean(loss, "data")

    _, opt_state, specs = _shard(optimizer, params, mesh)
    return (_replicate(params, mesh), opt_state), _on_each_rank(step, mesh, (P(), specs))


def zero2(loss_fn, optimizer, params, mesh, num_microbatches=1):
    """ZeRO-2: what is kept of the gradients is a shard too. It matters where gradients outlive one backward.

    per rank: parameters [shape], gradients and optimizer state [c]   sends (A + 1) (N-1)/N Psi for A micro-batches
    """

    def step(state, batch):
        params, opt_state = state

        def accumulate(total, microbatch):
            loss, grads = _local_gradients(loss_fn, params, microbatch)
            # Reduced now, so only the shard has to be kept. ZeRO-1 would add full gradients and reduce once at the end.
            return jax.tree.map(lambda t, grad: t + _mean_shard(grad) / num_microbatches, total, grads), loss

        shards = jax.tree.map(_local_shard, params)
        microbatches = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
        grads, losses = lax.scan(accumulate, jax.tree.map(jnp.zeros_like, shards), microbatches)
        shards, opt_state = _update(optimizer, grads, opt_state, shards)
        params = jax.tree.map(lambda shard, p: _gather(shard, p.shape, to="invarying"), shards, params)
        return (params, opt_state), lax.pmean(losses.mean(), "data")

    _, opt_state, specs = _shard(optimizer, params, mesh)
    return (_replicate(params, mesh), opt_state), _on_each_rank(step, mesh, (P(), specs))


def zero3(loss_fn, optimizer, params, mesh):
    """ZeRO-3 (FSDP): parameters are shards as well. A layer gathers its own when it runs, and again in its backward.

    per rank: parameters, gradients, optimizer state [c], and one layer in full   sends 3 (N-1)/N Psi
    `loss_fn` must run every layer that has parameters as `layer(fn)(its_params, ...)`.
    """

    def step(state, batch):
        shards, opt_state = state

        def loss_of(shards):
            # `loss_fn` gets in place of every parameter a function that gathers it: `layer` calls it.
            gathers = jax.tree.map(lambda shard, p: Partial(partial(_gather, shape=p.shape), shard), shards, params)
            return loss_fn(gathers, batch)

        # The transpose of an all-gather is a reduce-scatter: AD returns each rank its shard of the summed gradient.
        loss, grads = jax.value_and_grad(loss_of)(shards)
        grads = jax.tree.map(lambda grad: grad / mesh.size, grads)
        return _update(optimizer, grads, opt_state, shards), lax.pmean(loss, "data")

    shards, opt_state, specs = _shard(optimizer, params, mesh)
    return (shards, opt_state), _on_each_rank(step, mesh, (P("data"), specs))


def layer(fn):
    """Declares one layer of a model to `zero3`; the other strategies run it as it is.

    Under `jax.checkpoint` nothing computed inside is kept for the backward, so gathered parameters are dropped after
    the forward and gathered again (and activations computed again) when the backward reaches the layer.
    """

    def run(params, *args):
        return fn(jax.tree.map(lambda p: p() if callable(p) else p, params, is_leaf=callable), *args)

    return jax.checkpoint(run)


def _local_gradients(loss_fn, params, batch):
    """The loss of this rank's examples and its gradient, before anything is communicated."""
    # Declares the parameters different on every rank. If they were known to be equal, AD would add all-reduces of its
    # own to the backward.
    params = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
    return jax.value_and_grad(loss_fn)(params, batch)


def _update(optimizer, grads, opt_state, params):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def _fill_buckets(leaves, bucket_bytes):
    """Groups the leaves, by index, into buckets of at most `bucket_bytes`; a larger leaf has one to itself."""
    buckets: list[list[int]] = []
    size = bucket_bytes
    # The backward finishes the last layers first. (Dictionaries are ordered by name instead of by layer: the real
    # `plan_gradients` reads the order off the traced backward.)
    for i in reversed(range(len(leaves))):
        if size + leaves[i].nbytes > bucket_bytes:
            buckets, size = [*buckets, []], 0
        buckets[-1].append(i)
        size += leaves[i].nbytes
    return buckets


def _padded(x, num_ranks):
    """[shape] -> [N c]: flat, with zeros at the end so that N divides it."""
    return jnp.pad(x.ravel(), (0, -x.size % num_ranks))


def _local_shard(x):
    """[shape], equal on all ranks -> [c], this rank's part. Sends nothing."""
    return _padded(x, lax.axis_size("data")).reshape(lax.axis_size("data"), -1)[lax.axis_index("data")]


def _mean_shard(grad):
    """[shape], this rank's gradient -> [c], this rank's part of the mean over ranks."""
    num_ranks = lax.axis_size("data")
    return lax.psum_scatter(_padded(grad, num_ranks), "data", tiled=True) / num_ranks


def _gather(shard, shape, to="varying"):
    """[c] -> [shape]. Only an "invarying" result may leave `shard_map` as replicated."""
    full = lax.all_gather(shard, "data", tiled=True, to=to)
    return full[: math.prod(shape)].reshape(shape)


def _replicate(params, mesh):
    """Gives every rank a copy of the parameters."""
    return jax.device_put(params, NamedSharding(mesh, P()))


def _shard(optimizer, params, mesh):
    """Parameters and optimizer state as arrays [N c], of which each rank holds [c], and the state's partition specs."""
    sharded = NamedSharding(mesh, P("data"))
    shards = jax.tree.map(lambda p: jax.device_put(_padded(p, mesh.size), sharded), params)
    # A leaf with a dimension is an array like the parameters, a scalar (such as Adam's count) is the same everywhere.
    specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), jax.eval_shape(optimizer.init, shards))
    # Compiled, so that no rank holds all of the state, not even for a moment.
    shardings = jax.tree.map(partial(NamedSharding, mesh), specs)
    return shards, jax.jit(optimizer.init, out_shardings=shardings)(shards), specs


def _on_each_rank(step, mesh, state_specs):
    """Compiles a step so that every rank runs it on its part of the batch and, where sharded, of the state."""
    specs = (state_specs, P("data"))
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(state_specs, P())))
