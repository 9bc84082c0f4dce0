"""Units: modules whose parameters are full only while they are used.

    forward   full [shape] = unpack(all-gather of [width])              in the compute dtype
    backward  shard.grad  += row r of the sum over ranks of d full      in the parameter's dtype

In place of a full tensor or a view of one, autograd saves which part of which tensor it was, and the backward gathers
the unit again when it needs that: not for an embedding, nor for a first layer whose input needs no gradient. What was
gathered is dropped when the unit's gradients are reduced, and at the end of a backward that gives it none.

Autograd gets no gradient for the shards: the reduce-scatter is in flight while the backward goes on, and its result is
added to ``shard.grad`` when it arrives. Changes of the full tensors in place, which would be lost, are refused after
the forward by their version counters. Casts are not tracked: the copy of a weight that ``torch.autocast`` makes is
saved as an activation. Use ``compute_dtype`` instead.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._pytree import tree_map_only

from jaxddp.communication.buckets import BucketPlan, plan_buckets

from ..communication.collectives import all_gather, reduce_scatter
from ..communication.reduction import check_dense, tensor_spec
from ..communication.sharding import Cut, pack_row, pack_rows, unpack_row, unpack_rows
from ..parts import CountsChanges, Shard


class Unit:
    """One module's parameters: sharded, or replicated and cast when used."""

    def __init__(self, name: str, module: nn.Module, is_sharded: bool, net: Any) -> None:
        """Registers the hooks of a module of ``net``, an FSDP: it lists the collectives, and adds up the gradients."""
        params: dict[str, Any] = own_parameters(module)
        self.name, self._net = name, weakref.proxy(net)
        self.shards: dict[str, Shard] = params if is_sharded else {}  # by name in the module
        self._replicated = {} if is_sharded else params
        self.cuts: dict[str, Cut] = {one: shard.cut for one, shard in self.shards.items()}
        self.needed_again = not isinstance(module, nn.Embedding)  # by the backward
        self.compute_plan = self._plan(list(self.shards), net.compute_dtype)
        self.reduce_plan = self._plan([one for one, shard in self.shards.items() if shard.requires_grad], None)
        self._again: tuple[int, dict[str, torch.Tensor]] | None = None  # gathered for the backward of this number
        self._uses: list[tuple[torch.autograd.graph.saved_tensors_hooks | None, list[tuple[torch.Tensor, int]]]] = []
        self.handles = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self._after_forward, always_call=True),
        ]
        if self.shards:
            self.handles.append(module.register_state_dict_pre_hook(_refuse_state_dict))
            self.handles.append(module.register_load_state_dict_pre_hook(_refuse_load_state_dict))

    def gather(self) -> dict[str, torch.Tensor]:
        """All-gathers the shards; gives full tensors by name, in the compute dtype."""
        full = {}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for bucket in self.compute_plan.buckets:
                shards = {tensor.name: self.shards[tensor.name].detach() for tensor in bucket.tensors}
                row = pack_row(bucket, {name: one.to(getattr(torch, bucket.dtype)) for name, one in shards.items()})
                if self._net.num_ranks > 1:
                    self._net.uses.append(f"all-gather of {self.name}")
                    row = all_gather(row, self._net.process_group)
                else:
                    row = row.clone()
                full.update(unpack_rows(bucket, row.view(self._net.num_ranks, -1), self.cuts))
            for name in self.cuts.keys() - full.keys():  # no elements
                full[name] = self.shards[name].detach().new_empty(self.cuts[name].shape)
        return full

    def gather_again(self, versions: tuple[int, ...]) -> dict[str, torch.Tensor]:
        """All-gathers the shards for the backward; it keeps the result until the unit's gradients are reduced."""
        if versions != self.versions:
            raise RuntimeError(f"shards of {self.name!r} were changed between the forward and its backward")
        backward = torch._C._current_graph_task_id()  # -1 outside of any
        if self._again is not None and self._again[0] == backward:
            return self._again[1]
        full = self.gather()
        if backward != -1 and self.reduce_plan.buckets:
            self._again = backward, full
            # One of inputs alone reduces nothing, and shards may change by ``data``, which no version counter tells.
            torch.autograd.Variable._execution_engine.queue_callback(self.drop)
        return full

    def scatter(self, grads: dict[str, torch.Tensor | None]) -> None:
        """Starts the reduce-scatters of full gradients, None if not used, and frees the gathered parameters."""
        self.drop()
        some = next((grad for grad in grads.values() if grad is not None), None)
        if some is None:
            return
        for bucket in self.reduce_plan.buckets:
            full = {}
            for tensor in bucket.tensors:
                grad = grads[tensor.name]
                full[tensor.name] = some.new_zeros(tensor.shape) if grad is None else grad
                check_dense(tensor.name, full[tensor.name])
            buffer = pack_rows(bucket, full, self.cuts)
            if self._net.num_ranks > 1:
                self._net.uses.append(f"reduce-scatter of {self.name}")
                row, work = reduce_scatter(buffer, self._net.process_group, async_op=True)
            else:
                row, work = buffer.clone(), None  # autograd may need the gradient as it is
            self._net.add_sum(unpack_row(bucket, row.view(-1), self.cuts), self, work, buffer)

    def drop(self) -> None:
        """Frees the tensors gathered for the backward."""
        self._again = None

    @property
    def versions(self) -> tuple[int, ...]:
        """Version counters of the shards, which in-place changes increment."""
        return tuple(shard._version for shard in self.shards.values())

    def _plan(self, names: Sequence[str], dtype: torch.dtype | None) -> BucketPlan:
        """Plans one bucket for each dtype; floating-point tensors are sent in ``dtype`` if it is given."""
        specs = []
        for name in names:
            full = torch.empty(self.cuts[name].shape, dtype=self.shards[name].dtype, device="meta")
            specs.append(tensor_spec(name, cast(full, dtype)))
        return plan_buckets(specs, None)

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._uses.append((None, []))
        full_params = {name: cast(parameter, self._net.compute_dtype) for name, parameter in self._replicated.items()}
        full: tuple[torch.Tensor, ...] = ()
        held = own_parameters(module)
        for name, shard in self.shards.items():
            if held.get(name) is not shard:
                raise RuntimeError(f"parameter {name!r} of {self.name!r} was replaced: FSDP takes no functional_call")
        if self.shards:
            full = Gather.apply(self, *self.shards.values())
            full_params.update(zip(self.shards, full, strict=True))
        copies = [one for name, one in full_params.items() if one is not self._replicated.get(name)]
        for one in copies:
            one.__class__ = _Copy
        hooks = None
        if self.shards and torch.is_grad_enabled():
            hooks = torch.autograd.graph.saved_tensors_hooks(_packer(self, full), lambda read: read())
            hooks.__enter__()
        self._uses[-1] = hooks, [(one, one._version) for one in copies if not one.is_inference()]
        for name, one in full_params.items():
            path, _, attribute = name.rpartition(".")
            module.get_submodule(path).__dict__[attribute] = one  # found before _parameters, which keeps the shards
        return cast((args, kwargs), self._net.compute_dtype)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._uses:  # another hook raised before this unit's was called
            return
        hooks, copies = self._uses.pop()
        if hooks is not None:
            hooks.__exit__(None, None, None)
        for name in (*self._replicated, *self.shards):
            path, _, attribute = name.rpartition(".")
            module.get_submodule(path).__dict__.pop(attribute, None)
        if any(one._version != version for one, version in copies):
            raise RuntimeError(
                f"the forward of {type(module).__name__} changed its gathered parameters, which is lost: change the"
                " shards after the step"
            )


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a module's own forward reads, by name; a shared one under each of its names."""
    if isinstance(module, NonDynamicallyQuantizableLinear):  # MultiheadAttention reads its weight and never calls it
        return {}
    named = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    for path, one in module.named_children():
        if isinstance(one, NonDynamicallyQuantizableLinear):
            named |= {f"{path}.{name}": parameter for name, parameter in one.named_parameters()}
    return named


class Gather(torch.autograd.Function):
    """Shards to full parameters: ``Gather.apply(unit, *unit.shards.values())``."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All-gathers the shards; gives the full parameters in their order."""
        full = unit.gather()
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        out = tuple(full[name].data for name in unit.shards)  # autograd refuses other views when they change
        ctx.mark_non_differentiable(*(one for one, shard in zip(out, shards, strict=True) if not shard.requires_grad))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, ...]:
        """Starts to reduce-scatter the full gradients; autograd gets none."""
        if torch.is_grad_enabled():
            raise RuntimeError("FSDP has no gradients of gradients (create_graph=True): use BucketedDDP")
        ctx.unit.scatter(dict(zip(ctx.unit.shards, grads, strict=True)))
        return (None,) * (1 + len(grads))


class _Copy(CountsChanges, torch.Tensor):
    """A full tensor that lives for a forward."""

    # Results are plain tensors, as those of parameters.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _packer(unit: Unit, full: tuple[torch.Tensor, ...]) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
    """Saved-tensor hook during a unit's forward: what is saved is a function that gives the tensor again."""
    versions = unit.versions
    names = {_place(one): name for name, one in zip(unit.shards, full, strict=True)}
    # torch calls only the innermost saved-tensor hooks, and has no public way to find outer ones, as of checkpointing.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        name = names.get(_place(tensor)) if tensor.layout == torch.strided and tensor.numel() else None
        if name is not None:
            place, is_conj = (tensor.size(), tensor.stride(), tensor.storage_offset()), tensor.is_conj()

            def again() -> torch.Tensor:
                view = unit.gather_again(versions)[name].as_strided(*place)
                return view.conj() if is_conj else view

            return again
        if outer is not None:
            kept = outer[0](tensor)
            return lambda: outer[1](kept)
        version = None if tensor.is_inference() else tensor._version

        def read() -> torch.Tensor:
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation was modified by an in-place operation"
                )
            return tensor

        return read

    return pack


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise RuntimeError(
        f"state_dict of {prefix.rstrip('.')!r} would be of this rank's shards: gather_full_params(), called on every"
        " rank, gives the whole, and torchref.Checkpoints saves and restores it"
    )


def _refuse_load_state_dict(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    raise RuntimeError(
        f"load_state_dict of {prefix.rstrip('.')!r} would load whole tensors into this rank's shards: load before"
        " wrapping, or restore by torchref.Checkpoints"
    )


def _place(tensor: torch.Tensor) -> tuple[int, torch.dtype]:
    return tensor.untyped_storage().data_ptr(), tensor.dtype


def cast(values: Any, dtype: torch.dtype | None) -> Any:
    """Casts the floating-point tensors of a tree, if a dtype is given."""
    if dtype is None:
        return values
    return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, values)
