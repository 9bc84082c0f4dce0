"""Life of a ZeRO wrapper: copies, failed steps, changes to the module, and deletion."""

import copy
import gc
import weakref

import pytest
from torch import nn

import torchref
from torchref.communication.collectives import record
from torchref.zero.zero_test import (
    OPTIMIZERS,
    OPTIONS,
    batches,
    corners,
    furthest,
    loss_fn,
    rows,
    stages,
    weights,
    wrap,
)

# On the ranks


def nothing_survives_deletion(name):
    net, tx = wrap(name, corners())
    torchref.Trainer(loss_fn, tx, net).step(rows(batches()[0]))
    gone = [weakref.ref(net), *(weakref.ref(parameter) for parameter in net.parameters()), weakref.ref(net.module)]
    if name != "zero3":
        gone += [weakref.ref(net.optimizer), *(weakref.ref(chunk) for chunk in net._shards.values())]
    gc.disable()  # freed by counting alone: no cycle through a hook
    try:
        del net, tx
        return [ref() is None for ref in gone]
    finally:
        gc.enable()


def deep_copy(name):
    net, tx = wrap(name, corners())
    batch = rows(batches()[0])
    torchref.Trainer(loss_fn, tx, net).step(batch)
    twin = copy.deepcopy(net)
    twin_tx = twin if tx is net else OPTIMIZERS["adamw"][0](twin.parameters(), **OPTIMIZERS["adamw"][1])
    if tx is not net:
        twin_tx.load_state_dict(copy.deepcopy(tx.state_dict()))  # or both would update the same moments
    before = weights(net)
    found = []
    for one, step in ((twin, twin_tx), (net, tx)):
        with record() as issued:
            torchref.Trainer(loss_fn, step, one).step(batch)
        found.append((weights(one), [tuple(each) for each in issued]))
    (theirs, their_calls), (ours, our_calls) = found
    return furthest(ours, theirs), furthest(ours, before), our_calls == their_calls


def num_hooks(module):
    """Hooks on a module, its parts and its parameters."""
    of_modules = [len(one._forward_pre_hooks) + len(one._forward_hooks) for one in module.modules()]
    of_parameters = [len(one._post_accumulate_grad_hooks or ()) for one in module.parameters()]
    return sum(of_modules) + sum(of_parameters)


def hooks_before_and_after(name):
    """Number of hooks while a wrapper and its copy live, and after each is deleted."""
    net = wrap(name, corners())[0]
    twin = copy.deepcopy(net)
    module, twin_module = net.module, twin.module
    found = [num_hooks(module), num_hooks(twin_module)]
    gc.disable()  # hooks are removed with the wrapper, not by a later collection
    try:
        del net
        found += [num_hooks(module), num_hooks(twin_module)]
        del twin
        return [*found, num_hooks(twin_module)]
    finally:
        gc.enable()


def wrapped_twice(name):
    """Difference in training between a module that is wrapped again and a new one."""
    batch, module = rows(batches()[0]), corners()
    net = wrap(name, module)[0]
    loss_fn(net, batch).backward()  # given up
    del net
    ends = []
    for one in (module, corners()):
        net, tx = wrap(name, one)
        torchref.Trainer(loss_fn, tx, net).step(batch)
        ends.append(weights(net))
    return furthest(*ends)


def shards_are_not_wrapped():
    """No strategy wraps shards or copies of them, before or after their FSDP is deleted; all wrap full parameters."""
    module = corners()
    expected = loss_fn(module, rows(batches()[0])).item()
    net, tx = wrap("zero3", module)
    full = net.gather_full_params()
    twin = copy.deepcopy(module)
    for is_alive in (True, False):
        for one in (module, twin, copy.deepcopy(module)):
            for name in OPTIONS:
                message = r"parameter '0.unused.weight' \(=\[1\]\) must be full \(=\[1, 2\]\), not a shard made by FSDP"
                with pytest.raises(ValueError, match=message):
                    wrap(name, nn.Sequential(one))
        if is_alive:
            del net, tx
    for path, whole in full.items():
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, nn.Parameter(whole))
    net, tx = wrap("zero3", module)
    return abs(loss_fn(net, rows(batches()[0])).item() - expected)


def changed_after_wrapping(name):
    net, _ = wrap(name, corners())
    if name != "zero3":
        with pytest.raises(ValueError, match="parameter '0.scale' is already wrapped by a .*: delete that first"):
            wrap(name, nn.Sequential(net.module))
    loss_fn(net, rows(batches()[0])).backward()
    net.module.hidden.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="parameter 'hidden.weight' was frozen after wrapping: wrap the module anew"):
        net.finish_gradient_synchronization()
    net.module.hidden.weight.requires_grad_(True)
    net.finish_gradient_synchronization()
    net.float()
    with pytest.raises(ValueError, match="parameter '.*' was replaced or turned into another dtype after wrapping"):
        net.finish_gradient_synchronization()


def fail_once_then_train(name):
    """A step that raises during the backward must not affect those after it."""
    results = []
    for fails in (False, True):
        net, tx = wrap(name, corners())
        trainer = torchref.Trainer(loss_fn, tx, net, num_microbatches=2)
        if fails:
            handle = net.module.norm.weight.register_hook(fail)
            with pytest.raises(KeyError):
                trainer.step(rows(batches()[0]))
            handle.remove()
        results.append([trainer.step(rows(batch)) for batch in batches()])
    return results


def fail(grad):
    raise KeyError("in the middle")


# In the test process


@stages
def test_a_deleted_wrapper_frees_everything(ranks, name):
    for found in ranks.run(nothing_survives_deletion, name, num_ranks=2):
        assert len(found) > 10
        assert all(found)


@stages
def test_a_deep_copy_trains_like_the_original(ranks, name):
    for apart, moved, same_calls in ranks.run(deep_copy, name, num_ranks=2):
        assert apart == 0
        assert moved > 1e-3
        assert same_calls


@stages
def test_a_deleted_wrapper_removes_its_hooks(ranks, name):
    for alive, twin_alive, deleted, twin_before, twin_deleted in ranks.run(hooks_before_and_after, name, num_ranks=2):
        assert alive == twin_alive == twin_before > 0
        assert deleted == twin_deleted == 0


@pytest.mark.parametrize("name", ["zero1", "zero2"])
def test_a_module_can_be_wrapped_again_after_its_wrapper_is_deleted(ranks, name):
    assert ranks.run(wrapped_twice, name, num_ranks=2) == [0, 0]


def test_a_module_with_shards_cannot_be_wrapped_again(ranks):
    assert ranks.run(shards_are_not_wrapped, num_ranks=2) == [0, 0]


@stages
def test_changes_after_wrapping_are_refused(ranks, name):
    ranks.run(changed_after_wrapping, name, num_ranks=2)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_failed_step_can_be_followed_by_another(ranks, name):
    for clean, after_failure in ranks.run(fail_once_then_train, name, num_ranks=2):
        assert clean == after_failure
