"""The trainer around a loss function, an optimizer and a strategy: makes states, places batches, runs programs."""

from __future__ import annotations

import contextlib
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

from .. import __version__
from ..arguments import check_integer, check_kind, check_leaves, check_optimizer, is_number
from ..communication.buckets import BucketPlan
from ..communication.traces import describe_results
from ..layout import Leaf, whole
from ..loss import measured, partial_loss
from ..mesh import DATA_AXIS, rank_axis
from ..processes.watchdog import begin_step, end_step, wait_for_end
from ..strategy import Layout, Masters, Ranks, Strategy, with_masters
from ..tree import check_params, is_floating, is_key, merge, named_leaves, split
from ..zero.elementwise import describe_update
from .agreement import BATCH_S, check_alike, gather_texts, warn_if_alone
from .ema import EmaState
from .evaluation import evaluate_batches
from .placement import describe, from_first_process, full_arrays, place
from .programs import Programs, compiler_of, no_mesh
from .step import Run, TrainState as TrainState
from .validation import abstract, check_state, host_arrays, is_global, leaf_specs, signature, with_arrays


@dataclass(frozen=True, eq=False, repr=False)
class Trainer:
    """Data-parallel training of a loss function.

    Attributes:
        loss_fn: ``(params, batch)`` or ``(params, batch, key)`` to the mean loss over the examples it is given, or to
            ``Weighted``; with ``has_aux`` to ``(loss, aux)``. ``key`` differs by rank, step and micro-batch. With
            ``has_state`` it is ``(params, model_state, batch)`` or ``(params, model_state, batch, key)`` to
            ``(loss, new_state)``, with ``has_aux`` to ``(loss, (new_state, aux))``.
        optimizer: Any optax transformation; one that wants the loss's ``value`` (``reduce_on_plateau``) gets it.
        strategy: How gradients are communicated.
        mesh: As ``data_mesh`` makes it, or ``targets.mesh``: then ``plan``, ``planned`` and ``compile`` work, with the
            state of ``abstract_state``, and nothing runs.
        num_microbatches: Parts into which each rank's examples are split, in order; ZeRO-2 and 3 reduce those of each.
        trainable: Predicate on a parameter's dotted path. Other parameters get no gradient, no optimizer state and no
            communication.
        has_aux: Whether ``loss_fn`` returns auxiliary values for ``metrics["aux"]``: floating scalars, averaged as the
            loss is, ``Weighted``, and values of examples as ``Mean``, ``Sum`` or ``PerExample``.
        has_state: Whether the model has state beside the parameters, such as BatchNorm's running statistics; it goes
            through the micro-batches.
        state_sync: Its floating leaves after a step: the ranks' ``"mean"``, or those of rank 0, ``"first"``, as DDP's
            buffers. Other leaves are rank 0's.
        max_grad_norm: Clips the global norm of the averaged gradient to this value.
        compute_dtype: Dtype of the floating parameters that ``loss_fn`` gets, and ZeRO gathers. The optimizer updates
            masters of the dtypes given to ``init``, which ``params`` and checkpoints hold. None: no masters.
        grad_dtype: Dtype in which gradients are accumulated and summed over ranks; the master's if None.
        nonfinite: ``"skip"``: where the loss or the norm of the averaged gradient is not finite, or an element of the
            model state no longer is, all but the step's number stays as it was, and ``metrics["skipped"]`` is 1.
        axis: Of the mesh, along which ranks lie, if the mesh has other axes: ``"data"`` if None.
        param_specs: How parameters lie along the other axes, which are left to XLA, as for tensor parallelism: a tree
            of ``PartitionSpec`` like the parameters, or a prefix of it.

    Raises:
        ValueError: If an option is out of range, or the mesh has no devices or axes that no option explains.

    Example:
        >>> import jax.numpy as jnp, optax, jaxddp
        >>> jaxddp.simulate_devices(4)
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(25), jaxddp.data_mesh(4))
        >>> state = trainer.init({"w": jnp.zeros((3, 1))})
        >>> batch = {"x": jnp.ones((8, 3)), "y": jnp.ones((8, 1))}
        >>> state, metrics = trainer.step(state, batch)
        >>> float(metrics["loss"]), trainer.planned(state, batch)
        (1.0, [('all-reduce', 12)])
    """

    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    strategy: Strategy
    mesh: Mesh | AbstractMesh
    _: KW_ONLY
    num_microbatches: int = 1
    trainable: Callable[[str], bool] | None = None
    has_aux: bool = False
    has_state: bool = False
    state_sync: str = "mean"
    max_grad_norm: float | None = None
    compute_dtype: Any = None
    grad_dtype: Any = None
    nonfinite: str = "ignore"
    axis: str | tuple[str, ...] | None = None
    param_specs: Any = None
    _models: dict[Any, Programs] = field(default_factory=dict, init=False)  # by parameters as a state holds them
    _steps: dict[Any, Any] = field(default_factory=dict, init=False)  # compiled, by types of state and batch
    _evaluations: dict[Any, Any] = field(default_factory=dict, init=False)  # likewise

    def __post_init__(self) -> None:
        check_optimizer(self.optimizer)
        check_kind("strategy", self.strategy, Strategy, "a strategy, such as jaxddp.bucketed()")
        check_kind("mesh", self.mesh, (Mesh, AbstractMesh), "a mesh, such as jaxddp.data_mesh()")
        object.__setattr__(self, "num_microbatches", check_integer("num_microbatches", self.num_microbatches))
        for name in ("grad_dtype", "compute_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (is_floating(dtype) and jnp.dtype(dtype).itemsize > 1):
                raise ValueError(f"{name} (={dtype!r}) must be a floating dtype of 16 bits or more, or None")
        if self.max_grad_norm is not None and not (is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ValueError(f"max_grad_norm (={self.max_grad_norm!r}) must be positive or None")
        for name, options in (("nonfinite", ("ignore", "skip")), ("state_sync", ("mean", "first"))):
            if getattr(self, name) not in options:
                raise ValueError(f"{name} (={getattr(self, name)!r}) must be one of {', '.join(options)}")
        if isinstance(self.mesh, Mesh) and self.ranks.other_axes:  # they are XLA's
            kinds = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
            types = tuple(AxisType.Auto if name in self.ranks.other_axes else kind for name, kind in kinds)
            object.__setattr__(self, "mesh", Mesh(self.mesh.devices, self.mesh.axis_names, axis_types=types))
        if (self.param_specs is None) == bool(self.ranks.other_axes):
            raise ValueError(f"param_specs must be given if, and only if, the mesh has axes beside {self.ranks.axis}")
        compiler_of(self.mesh)

    def __repr__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
        return f"Trainer({getattr(self.loss_fn, '__name__', 'loss')}, {self.strategy.name}, {axes})"

    @cached_property
    def ranks(self) -> Ranks:
        """The ranks, by mesh axes."""
        axis = rank_axis(self.mesh, DATA_AXIS if self.axis is None and self.param_specs is not None else self.axis)
        axes = (axis,) if isinstance(axis, str) else axis
        others = tuple(str(name) for name in self.mesh.axis_names if name not in axes)
        num_ranks = math.prod(self.mesh.shape[name] for name in axes)
        return Ranks(axis, num_ranks, self.mesh.shape[axes[-1]], others)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.ranks.num_ranks

    @property
    def batch_sharding(self) -> NamedSharding:
        """How the arrays of a batch lie over the ranks: split along dimension 0."""
        return NamedSharding(self.mesh, P(self.ranks.axis))

    def with_strategy(self, strategy: Strategy, mesh: Mesh | AbstractMesh | None = None) -> Trainer:
        """The same training under another strategy, on another mesh if one is given."""
        return replace(self, strategy=strategy, mesh=self.mesh if mesh is None else mesh)

    def init(self, params: Any, *, model_state: Any = None, seed: int = 0) -> TrainState:
        """Puts a copy of the parameters, or its shard of them, on every rank and makes the optimizer state there.

        Of several processes, the arrays and the seed of process 0 count. ``model_state`` is a tree of arrays, with
        ``has_state`` and only then; ``seed`` is of the keys that ``loss_fn`` gets. Raises a ValueError if there are no
        arrays, a trainable one is not of a floating dtype, the optimizer is not element-wise where its state is
        sharded, the mesh is a target's, or processes differ in what they train.
        """
        self._check_devices("init", "abstract_state")
        warn_if_alone()
        check_params(params, self.trainable)
        model_state = self._checked_model_state(model_state)
        trained = split(params, self.trainable)[0]
        if narrow := [name for name, leaf in named_leaves(trained).items() if jnp.dtype(leaf.dtype).itemsize < 4]:
            lost = f"parameter {narrow[0]!r} has 16 bits or fewer: updates below its last place are lost"
            warnings.warn(f"{lost}; give init float32 parameters, and Trainer a compute_dtype", stacklevel=2)
        if jax.process_count() > 1:
            held = {"parameter": describe(params), "model_state leaf": describe(model_state)}
            shapes = {f"{kind} {name!r}": text for kind, one in held.items() for name, text in one.items()}
            options = "num_microbatches has_aux has_state state_sync max_grad_norm compute_dtype grad_dtype nonfinite"
            alike = {name: str(getattr(self, name)) for name in [*options.split(), "ranks"]}
            alike |= {"jaxddp": __version__, "jax": jax.__version__, "strategy": self.strategy.name}
            alike["layout"] = re.sub(r" at 0x[0-9a-f]+", "", f"{self.strategy.layout} {self.strategy.hook}")
            check_alike(alike | shapes)
            check_alike({"optimizer": describe_update(self.optimizer, trained, list(self.mesh.shape.items()))})
            params, model_state, seed = from_first_process((params, model_state, seed))
        model, axis = self._describe(params), self.ranks.axis
        trained, places = (split(tree, self.trainable)[0] for tree in (params, model.layout.updated))
        opt_state = model.init_opt_state(place(trained, places, self.mesh, axis))
        params = place(params, model.layout.params, self.mesh, axis)
        whole_here = NamedSharding(self.mesh, P())
        with no_mesh():
            step, key = jax.jit(lambda: (jnp.int32(0), jax.random.key(int(seed))), out_shardings=whole_here)()
        return TrainState(step, params, opt_state, key, place(model_state, whole(model_state), self.mesh))

    def abstract_state(self, params: Any, model_state: Any = None) -> TrainState:
        """Describes the state of step 0 by ``jax.ShapeDtypeStruct``, of what ``init`` takes or its shapes."""
        check_params(params, self.trainable)
        model_state = self._checked_model_state(model_state)
        return self._describe(params).held._replace(model_state=abstract(model_state))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one training step.

        Args:
            state: Donated: use the returned one from here on.
            batch: A tree of arrays, or PyTorch's tensors, ``[examples, ...]``: the examples of all ranks, or, where
                several processes train together, of this process's.

        Returns:
            The next state, and metrics: ``"loss"``, the global mean before the update; ``"grad_norm"``, before
            clipping; ``"aux"`` with ``has_aux``; ``"skipped"``, 0 or 1, with ``nonfinite="skip"``.

        Raises:
            ValueError: If the batch cannot be split over ranks and micro-batches, the loss is not a scalar, the mesh is
                a target's, the state is another trainer's, or processes have batches of other shapes or other plans.
        """
        self._check_devices("step", "compile")
        leaves, structure = check_state(state)
        batch = host_arrays(batch)
        key = structure, tuple([getattr(leaf, "aval", None) for leaf in leaves]), signature(batch)
        if key not in self._steps:  # all that depends on shapes alone is done once for them
            if not all(hasattr(leaf, "aval") for leaf in leaves):
                return self.step(jax.tree.map(jnp.asarray, state), batch)  # numbers that a user has set
            model = self.programs(state)
            self._steps[key] = model, model.step(state, self._agree(model, batch, state))
        model, program = self._steps[key]
        return self._run(model, program, state, self._place(model, batch), is_call=False)

    def evaluate(self, state: TrainState, batches: Any, eval_fn: Callable[..., Any] | None = None) -> Any:
        """Gives the mean loss of a batch, or what ``eval_fn`` measures of one or several, without gradients.

        A loss function gets no key here, so its default counts: where ``key`` is None it must draw nothing, and with
        ``has_state`` normalise by the running statistics.

        Args:
            state: Kept as it is.
            batches: A batch as for ``step``. With ``eval_fn`` it may be of any length, or an iterable of batches (a
                list of arrays is one batch). In a job each process gives its own examples, or batches, however many.
            eval_fn: ``(params, batch)``, or ``(params, model_state, batch)`` with ``has_state``, to a dict of
                ``Mean``, ``Sum``, ``PerExample`` and ``Weighted``. It gets a part of the batch, and must measure each
                example by itself. Give the same function each time: another one is compiled again.

        Returns:
            The loss; with ``has_aux`` the loss and the aux values. With ``eval_fn`` a dict on the host, over all
            examples of all batches and processes: means and sums in float64 or int64, and values of single examples in
            the order of the batches and, within one, of the processes.

        Raises:
            ValueError: If a batch cannot be split over ranks, the mesh is a target's, there are no examples,
                ``eval_fn`` returns anything else, or ``loss_fn`` needs a key, or takes none with a state.
        """
        self._check_devices("evaluate", "compile")
        measure = None if eval_fn is None else partial(measured, eval_fn, self.has_state)
        model, state = self.programs(state), with_arrays(state)

        def run(batch: Any) -> Any:
            batch = host_arrays(batch)
            key = model, eval_fn, signature(state, batch)
            if key not in self._evaluations:
                program = model.evaluate(state, self._agree(model, batch), measure)
                # Else processes would mix what they measure.
                check_alike({"what evaluate measures": str(describe(program.out_info))}, BATCH_S)
                self._evaluations[key] = program
            return self._run(model, self._evaluations[key], state, self._place(model, batch))

        return run(batches) if measure is None else evaluate_batches(run, batches, self.batch_sharding, self._watched)

    def _run(self, model: Programs, program: Any, state: TrainState, batch: Any, is_call: bool = True) -> Any:
        with self._watched(is_call) as results:
            result = program(state, batch)
            results.append(jax.tree.leaves(result)[-1])  # no part of a state, which the next step may delete
            # With more simulated devices than cores, programs that run ahead abort in XLA's rendezvous.
            return jax.block_until_ready(result) if model.platform == "cpu" else result

    def params(self, state: TrainState) -> Any:
        """Gives a copy of the full parameters, or masters, on every device; in a job all processes call it."""
        arrays, leaves = self.masters(state)
        return full_arrays(arrays, leaves, self.mesh)

    def masters(self, state: TrainState) -> tuple[Any, Any]:
        """Gives the parameters that are updated, as the state holds them, and where each lies: a tree of ``Leaf``."""
        layout = self.programs(state).layout
        if not isinstance(state.opt_state, Masters):
            return state.params, layout.params
        frozen, places = (split(tree, self.trainable)[1] for tree in (state.params, layout.params))
        return merge(state.opt_state.params, frozen), merge(split(layout.updated, self.trainable)[0], places)

    def with_masters(self, state: TrainState, masters: Any) -> TrainState:
        """Gives a state of other parameters, given as ``masters`` gives them; the optimizer's state stays."""
        trained, frozen = split(masters, self.trainable)
        if isinstance(state.opt_state, Masters):
            state = state._replace(opt_state=state.opt_state._replace(params=trained))
        model = self.programs(state)
        trees = model.layout.updated, model.layout.params, model.shardings.params
        updated, held, shardings = (split(tree, self.trainable)[0] for tree in trees)
        whole_here = NamedSharding(self.mesh, P())  # padding cannot be taken off where axes are explicit
        arrays = jax.tree.map(
            lambda leaf, array: jax.device_put(array, whole_here) if leaf.is_padded else array, updated, trained
        )

        def as_held(was: Leaf, now: Leaf, array: Any) -> Any:
            return now.to_global(was.from_global(array)).astype(now.dtype)

        with no_mesh():
            make = jax.jit(partial(jax.tree.map, as_held, updated, held), out_shardings=shardings)
            return state._replace(params=merge(make(arrays), frozen))

    def averaged(self, state: TrainState) -> TrainState:
        """Gives a state of the moving averages in place of the parameters, to evaluate or to read; not to train on.

        It shares the rest with ``state``, which a step donates. Raises a ValueError without just one ``params_ema``.
        """
        layout = self.programs(state).layout
        inner = state.opt_state.inner if isinstance(state.opt_state, Masters) else state.opt_state
        inner = inner if layout.owners is None else self.opt_state(state)
        states = jax.tree.leaves(inner, is_leaf=lambda one: isinstance(one, EmaState))
        found = [one.ema for one in states if isinstance(one, EmaState)]
        if len(found) != 1:
            raise ValueError(f"the optimizer must keep one average, by jaxddp.params_ema, and keeps {len(found)}")
        (ema,) = found
        if layout.owners is not None:
            ema = place(ema, split(layout.updated, self.trainable)[0], self.mesh, self.ranks.axis)
        return self.with_masters(state, merge(ema, split(state.params, self.trainable)[1]))

    def model_state(self, state: TrainState) -> Any:
        """Gives a copy of the model state, as the tree that ``init`` was given."""
        check_state(state)
        return full_arrays(state.model_state, whole(state.model_state), self.mesh)

    def opt_state(self, state: TrainState) -> Any:
        """Gives a copy of the optimizer's state, as its ``init`` makes it of full parameters."""
        layout = self.programs(state).layout
        held, places = (one.inner if isinstance(one, Masters) else one for one in (state.opt_state, layout.opt_state))
        full = full_arrays(held, places, self.mesh)
        return full if layout.owners is None else layout.owners.on_host(full, np.asarray)

    def compile(self, state: TrainState, batch: Any) -> jax.stages.Compiled:
        """Compiles the step for these shapes, or gives the program that ``step`` already runs for them.

        State and global batch are of arrays or ``jax.ShapeDtypeStruct``; the mesh may be a target's. Raises a
        ValueError if the batch cannot be split, or a target's compiler is missing or refuses.
        """
        return self.programs(state).step(with_arrays(state), host_arrays(batch))

    def plan(self, state: TrainState, batch: Any) -> BucketPlan:
        """Gives the bucket plan of the step, without constant gradients; on one rank nothing is communicated."""
        return self.programs(state).plan(state, batch)

    def planned(self, state: TrainState, batch: Any) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives that one step should have for gradients and parameters."""
        return [(one.kind, one.num_bytes) for one in self.programs(state).planned_along(state, batch)]

    def layout(self, state: TrainState) -> Layout:
        """Gives which leaves of a state are shards, and of what; raises as ``programs``."""
        return self.programs(state).layout

    def _check_devices(self, method: str, instead: str) -> None:
        if isinstance(self.mesh, AbstractMesh):
            spec = self.mesh.abstract_device.device_kind
            raise ValueError(f"{method} needs devices, and {spec!r} is not here: use {instead}")

    @contextlib.contextmanager
    def _watched(self, is_call: bool = True) -> Iterator[list[Any]]:
        """Tells the watchdog of a step, or of another call that takes all processes, and of a result that it adds."""
        results: list[Any] = []
        # In a job, a trainer may be of this process's devices alone.
        devices: Any = self.mesh.devices.flat if jax.process_count() > 1 else ()
        spans_job = len({one.process_index for one in devices}) == jax.process_count()
        if spans_job:
            begin_step(is_call)
        try:
            yield results
        except Exception:
            wait_for_end()
            raise
        if spans_job:
            end_step(lambda: all(one.is_deleted() or one.is_ready() for one in results))

    def _checked_model_state(self, model_state: Any) -> Any:
        is_missing = model_state is None or (isinstance(model_state, tuple) and not model_state)
        if self.has_state == is_missing:
            raise ValueError("model_state must be given, an empty one as {}, with has_state=True and only then")
        leaves = named_leaves(model_state)
        check_leaves("model_state", leaves)
        if keys := [name for name, leaf in leaves.items() if is_key(leaf)]:
            raise ValueError(f"model_state leaf {keys[0]!r} must be no key, equal on all ranks: let loss_fn take key")
        return () if is_missing else model_state

    def programs(self, state: TrainState) -> Programs:
        """Gives the plans and programs of a state's model; a ValueError if this trainer has not made it."""
        check_state(state)
        model = self._models.get(signature(state.params))
        is_cast = self.compute_dtype is not None and isinstance(state.opt_state, Masters)
        if model is None and not (is_cast or self.strategy.gathers_in_loss):  # else its full parameters are not known
            model = self._describe(state.params)
        ours, theirs = (
            (jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)])
            for tree in (model and model.held.opt_state, state.opt_state)
        )
        is_empty = isinstance(state.model_state, tuple) and not state.model_state
        if model is None or ours != theirs or self.has_state == is_empty:
            raise ValueError(
                "state must be one that this trainer has made, by init or abstract_state: this one is of another"
                " strategy, mesh, optimizer, trainable, compute_dtype, has_state or model"
            )
        return model

    def _describe(self, params: Any) -> Programs:
        """The programs of a model of these full parameters."""
        leaves = leaf_specs(abstract(params), self.param_specs, self.mesh, self.ranks.other_axes)
        with no_mesh():  # what is traced here runs in the trainer's
            layout = self.strategy.layout(leaves, self.optimizer, self.ranks, self.trainable)
        dtype = None if self.compute_dtype is None else jax.dtypes.canonicalize_dtype(self.compute_dtype)
        trained = jax.tree.leaves(split(leaves, self.trainable)[0])
        if dtype and not self.strategy.gathers_in_loss and any(leaf.dtype != dtype for leaf in trained):
            layout = with_masters(layout, dtype)
        layout = replace(layout, compute_dtype=dtype, grad_dtype=self.grad_dtype)
        key = signature(jax.tree.map(lambda leaf: leaf.held, layout.params))
        if key not in self._models:
            run = Run(
                partial_loss(self.loss_fn, self.has_aux, self.has_state), self.strategy, layout, self.num_microbatches,
                self.max_grad_norm, self.state_sync, self.nonfinite,
            )  # fmt: skip
            self._models[key] = Programs(run, self.mesh)
        if jax.tree.leaves(self._models[key].layout.params) != jax.tree.leaves(layout.params):
            raise ValueError("params cannot be told by their shards from another model's: make a Trainer for each")
        return self._models[key]

    def _agree(self, model: Programs, batch: Any, state: TrainState | None = None) -> Any:
        """Places a batch; refuses processes whose batches differ or, to train, their plans."""
        if jax.process_count() == 1:
            return batch
        held = jax.tree.map(lambda leaf: leaf if is_global(leaf) else np.asarray(leaf), batch)
        # Before anything that only one of them may raise. With another number of examples in each process, the mean
        # over ranks would be one of unlike means.
        check_alike({"batch": ", ".join(f"{name} {text}" for name, text in describe(held).items())}, BATCH_S)
        if not model.batch_sharding.is_fully_addressable:  # else each process trains alone
            # Processes that have the same ranks, along other axes of the mesh, must have the same rows for them.
            places = model.batch_sharding.addressable_devices_indices_map((self.num_ranks,))
            ranks = str(sorted({index[0].start or 0 for index in places.values() if index}))
            rows = b"".join(leaf.tobytes() for leaf in jax.tree.leaves(held) if not is_global(leaf))
            said = [text.split("=") for text in gather_texts(f"{ranks}={zlib.crc32(rows)}", BATCH_S)]
            for number, (theirs, checksum) in enumerate(said):
                if checksum != next(one for ranks, one in said if ranks == theirs):
                    raise ValueError(f"batch of process {number} must be the same as of another with ranks {theirs}")
        batch = self._place(model, batch)
        if state is not None:
            alike = {}
            with contextlib.suppress(ValueError):  # raised again once all processes have come
                plan = model.plan(state, batch)
                alike["plan"] = f"{len(plan.buckets)} buckets, checksum {zlib.crc32(repr(plan).encode()):08x}"
                alike["results and constant gradients"] = describe_results(model.trace(state, batch))
            check_alike(alike, BATCH_S)
        return batch

    def _place(self, model: Programs, batch: Any) -> Any:
        """Puts a batch on the devices: a process's own rows, or those of all ranks where there is one process."""
        by_rank = model.batch_sharding
        if all(isinstance(leaf, jax.Array) and leaf.sharding == by_rank for leaf in jax.tree.leaves(batch)):
            return batch  # device_put would take as long as all other checks of a step
        if jax.process_count() > 1:
            make = partial(jax.make_array_from_process_local_data, by_rank)
            batch = jax.tree.map(lambda leaf: leaf if is_global(leaf) else make(np.asarray(leaf)), batch)
        return jax.device_put(batch, by_rank)
