"""Every strategy in its shortest honest form. Read this file first; `jaxddp/plain.py` says the same in JAX.

Data parallelism: N ranks hold equal parameters, and each computes the gradient of its own 1/N of the batch. The mean of
these gradients over the ranks is the gradient of the whole batch, so if every rank applies that mean, the parameters
stay equal. The strategies differ in how the mean is computed (how many collectives, and when they may start) and in
what each rank keeps between steps.

Every function below takes

    loss_fn     (module, batch) -> mean loss over the examples of the batch, a dictionary of tensors
    optimizer   list of parameters -> torch optimizer, such as `functools.partial(torch.optim.AdamW, lr=1e-3)`; for
                ZeRO, one that updates each element on its own (SGD and AdamW do)
    module      the model, in which every parameter is trained and used; rank 0's weights are the ones that count

inside an initialised process group of N ranks, and returns the step:

    loss = step(batch)      # batch: this rank's part, tensors [global_batch / N, ...]; the module is updated in place

Bytes sent per rank are those of ring collectives: an all-reduce of S bytes sends 2 (N-1)/N S, a reduce-scatter or an
all-gather (N-1)/N S.

Here what is written is what runs: `backward()` calls a parameter's hook once its gradient is there, and a collective
starts when it is called. All ranks must call the same ones in the same order; they do, as all run the same backward.
"""

import torch
import torch.distributed as dist


def naive(loss_fn, optimizer, module):
    """One all-reduce per parameter, after the whole backward.

    per rank: parameters, gradients, optimizer state [shape]         sends 2 (N-1)/N Psi, as many calls as parameters
    """
    params = _broadcast(module)
    opt = optimizer(params)

    def step(batch):
        loss = _backward(loss_fn, module, batch)
        for param in params:
            dist.all_reduce(param.grad)  # a sum; returns when it is done
            param.grad /= dist.get_world_size()
        _update(opt)
        return _mean(loss)

    return step


def flat(loss_fn, optimizer, module):
    """One all-reduce of everything, after the whole backward: one latency instead of many.

    per rank: as `naive`, and a buffer [all elements]                sends 2 (N-1)/N Psi, one call
    """
    params = _broadcast(module)
    opt = optimizer(params)

    def step(batch):
        loss = _backward(loss_fn, module, batch)
        buffer = torch.cat([param.grad.flatten() for param in params])
        dist.all_reduce(buffer)
        buffer /= dist.get_world_size()
        for param, mean in zip(params, buffer.split([param.numel() for param in params]), strict=True):
            param.grad = mean.view_as(param)
        _update(opt)
        return _mean(loss)

    return step


def overlapped(loss_fn, optimizer, module):
    """One all-reduce per parameter, each as soon as its gradient exists, while the backward goes on.

    per rank: as `naive`                                             sends 2 (N-1)/N Psi, as many calls as parameters
    """
    params = _broadcast(module)
    opt = optimizer(params)
    started = []

    def reduce(param):
        # Asynchronous: the call returns at once, and the backward computes the next gradient meanwhile.
        started.append(dist.all_reduce(param.grad, async_op=True))

    for param in params:
        param.register_post_accumulate_grad_hook(reduce)

    def step(batch):
        loss = _backward(loss_fn, module, batch)
        while started:
            started.pop().wait()
        for param in params:
            param.grad /= dist.get_world_size()
        _update(opt)
        return _mean(loss)

    return step


def bucketed(loss_fn, optimizer, module, bucket_bytes=25 * 2**20):
    """One all-reduce per bucket of gradients, as soon as the bucket is full: few calls, and they overlap.

    per rank: as `naive`, and buffers [elements of the bucket]       sends 2 (N-1)/N Psi, as many calls as buckets
    """
    params = _broadcast(module)
    opt = optimizer(params)
    buckets, started = _fill_buckets(params, bucket_bytes), []

    def reduce_if_full(bucket):
        if all(param.grad is not None for param in bucket):
            buffer = torch.cat([param.grad.flatten() for param in bucket])
            started.append((bucket, buffer, dist.all_reduce(buffer, async_op=True)))

    for bucket in buckets:
        for param in bucket:
            param.register_post_accumulate_grad_hook(lambda _, bucket=bucket: reduce_if_full(bucket))

    def step(batch):
        loss = _backward(loss_fn, module, batch)
        while started:
            bucket, buffer, work = started.pop()
            work.wait()
            buffer /= dist.get_world_size()
            for param, mean in zip(bucket, buffer.split([param.numel() for param in bucket]), strict=True):
                param.grad = mean.view_as(param)
        _update(opt)  # sets gradients to None, which is how a bucket knows that it is not full
        return _mean(loss)

    return step


def zero1(loss_fn, optimizer, module):
    """ZeRO-1: each rank keeps the optimizer state of 1/N of every parameter, and updates only that part.

    per rank: parameters and gradients [shape], optimizer state [c]   sends 2 (N-1)/N Psi
    with c = ceil(elements / N)
    """
    params, shards, opt = _shard(module, optimizer)

    def step(batch):
        loss = _backward(loss_fn, module, batch)
        # An all-reduce is a reduce-scatter and an all-gather. The update goes between the two, on 1/N of the elements.
        for param, shard in zip(params, shards, strict=True):
            shard.grad = _mean_shard(param.grad)
            param.grad = None
        opt.step()
        for param, shard in zip(params, shards, strict=True):
            param.data.copy_(_gather(shard, param.shape))
        return _mean(loss)

    return step


def zero2(loss_fn, optimizer, module, num_microbatches=1):
    """ZeRO-2: what is kept of the gradients is a shard too, even while the backward goes on.

    per rank: parameters [shape], gradients and optimizer state [c]   sends (A + 1) (N-1)/N Psi for A micro-batches
    """
    params, shards, opt = _shard(module, optimizer)

    def reduce(param, shard):
        # Reduced now and dropped: only the shard is kept. ZeRO-1 would add full gradients and reduce once at the end.
        shard.grad += _mean_shard(param.grad)
        param.grad = None

    for param, shard in zip(params, shards, strict=True):
        param.register_post_accumulate_grad_hook(lambda param, shard=shard: reduce(param, shard))

    def step(batch):
        for shard in shards:
            shard.grad = torch.zeros_like(shard)
        losses = []
        for i in range(num_microbatches):
            microbatch = {name: tensor.chunk(num_microbatches)[i] for name, tensor in batch.items()}
            losses.append(loss_fn(module, microbatch) / num_microbatches)
            losses[-1].backward()
        opt.step()
        for param, shard in zip(params, shards, strict=True):
            param.data.copy_(_gather(shard, param.shape))
        return _mean(sum(losses))

    return step


def zero3(loss_fn, optimizer, module):
    """ZeRO-3 (FSDP): parameters are shards as well. A layer gathers its own when it runs, and again in its backward.

    per rank: parameters, gradients, optimizer state [c], and one layer in full   sends 3 (N-1)/N Psi
    A layer is a submodule with parameters of its own and one output. Returns the step, and every parameter's shard.
    """
    params, shards, opt = _shard(module, optimizer)
    shard_of = dict(zip(params, shards, strict=True))

    def gather(layer, _=None):
        for param in layer.parameters(recurse=False):
            # Refilled in place, because views of this storage are saved for the backward. `.data` hides the write.
            param.untyped_storage().resize_(param.nbytes)
            param.data.copy_(_gather(shard_of[param], param.shape))

    def drop(layer, _=None, output=None):
        for param in layer.parameters(recurse=False):
            param.untyped_storage().resize_(0)
        if output is not None:  # its gradient is the first thing that the layer's backward needs
            output.register_hook(lambda _: gather(layer))

    def reduce(param):
        shard_of[param].grad = _mean_shard(param.grad)
        param.grad = None
        param.untyped_storage().resize_(0)  # its gradient was its last use

    for layer in module.modules():
        drop(layer)
        layer.register_forward_pre_hook(gather)
        layer.register_forward_hook(drop)
    for param in params:
        param.register_post_accumulate_grad_hook(reduce)

    def step(batch):
        loss = _backward(loss_fn, module, batch)
        opt.step()
        return _mean(loss)

    return step, shards


def _broadcast(module):
    """Gives every rank rank 0's weights; returns the parameters."""
    params = list(module.parameters())
    for param in params:
        dist.broadcast(param.data, src=0)
    return params


def _backward(loss_fn, module, batch):
    """This rank's gradients of the loss of its own examples, in `.grad`; hooks run meanwhile."""
    loss = loss_fn(module, batch)
    loss.backward()
    return loss


def _update(opt):
    opt.step()
    opt.zero_grad()


def _fill_buckets(params, bucket_bytes):
    """Groups parameters into buckets of at most `bucket_bytes`; a larger parameter has one to itself."""
    buckets: list[list] = []
    size = bucket_bytes
    for param in reversed(params):  # the backward finishes the last layers first
        if size + param.nbytes > bucket_bytes:
            buckets, size = [*buckets, []], 0
        buckets[-1].append(param)
        size += param.nbytes
    return buckets


def _shard(module, optimizer):
    """Parameters, this rank's part [c] of each, and an optimizer over these parts only."""
    params = _broadcast(module)
    shards = [torch.nn.Parameter(_chunks(param.data)[dist.get_rank()].clone()) for param in params]
    return params, shards, optimizer(shards)


def _chunks(tensor):
    """[shape] -> N tensors [c]: flat, with zeros at the end so that N divides it."""
    num_ranks = dist.get_world_size()
    return torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % num_ranks)).chunk(num_ranks)


def _mean_shard(grad):
    """[shape], this rank's gradient -> [c], this rank's part of the mean over ranks."""
    chunks = _chunks(grad)
    shard = torch.empty_like(chunks[0])
    dist.reduce_scatter(shard, list(chunks))
    return shard / dist.get_world_size()


def _gather(shard, shape):
    """[c] -> [shape]."""
    chunks = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(chunks, shard.detach())
    return torch.cat(chunks)[: shape.numel()].view(shape)


def _mean(loss):
    """Over the ranks."""
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()
