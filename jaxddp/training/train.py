"""The trainer: one jitted, sharded training step around a loss function, an optax optimizer and a strategy.

``step.py`` computes, ``programs.py`` plans and compiles; here states are made, batches placed and programs run.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .. import __version__
from ..arguments import check_flag, check_function, check_integer, check_kind, check_optimizer, is_number
from ..communication.axes import shard_axis
from ..communication.buckets import BucketPlan
from ..communication.compression import check_stateless
from ..loss import partial_loss
from ..mesh import DATA_AXIS, rank_axis
from ..metrics import Measure
from ..processes.watchdog import begin_step, end_step, wait_for_end
from ..strategy import GradientTrace, Strategy
from ..tree import check_params, is_floating, merge, named_leaves, split
from ..zero.elementwise import describe_update
from .agreement import agreement, check_alike
from .evaluation import evaluate_batches
from .loss_scale import first_scale
from .model_state import STATE_SYNC, planned_sync
from .placement import describe, from_first_process, full_arrays, place, place_batch, place_by_rank, whole
from .programs import Programs, StepFunction
from .replicas import ReplicaError, check_replicas
from .state_layout import StateLayout
from .step import NONFINITE_STATE, RankStep
from .step import TrainState as TrainState
from .validation import (
    abstract,
    as_arrays,
    check_alive,
    check_batch,
    check_state,
    host_arrays,
    is_global,
    one_line_errors,
    signature,
)

NONFINITE = ("ignore", "raise", "skip")


class NonFiniteError(FloatingPointError):
    """A step met NaN or infinity, and the trainer's ``nonfinite`` does not go on.

    Attributes:
        state: The state after the step, in place of the one that was donated: with ``"skip"`` as it was before the
            skipped steps, with ``"raise"`` updated by numbers that are not finite.
    """

    def __init__(self, message: str, state: TrainState | None = None) -> None:
        """Keeps the state."""
        super().__init__(message)
        self.state = state


class Trainer:
    """Data-parallel training of a loss function.

    Example:
        >>> import jax.numpy as jnp, optax, jaxddp
        >>> jaxddp.simulate_devices(4)
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
        >>> trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), jaxddp.bucketed(25), jaxddp.data_mesh(4))
        >>> state = trainer.init({"w": jnp.zeros((3, 1))})
        >>> batch = {"x": jnp.ones((8, 3)), "y": jnp.ones((8, 1))}
        >>> state, metrics = trainer.step(state, batch)
        >>> float(metrics["loss"])
        1.0
        >>> trainer.planned(state, batch)
        [('all-reduce', 12)]
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        strategy: Strategy,
        mesh: Mesh | AbstractMesh,
        *,
        num_microbatches: int = 1,
        trainable: Callable[[str], bool] | None = None,
        has_aux: bool = False,
        max_grad_norm: float | None = None,
        grad_dtype: Any = None,
        compute_dtype: Any = None,
        loss_scale: str | None = None,
        nonfinite: str = "ignore",
        max_skips: int = 10,
        has_state: bool = False,
        state_sync: str = "mean",
        check_replicas_every: int = 0,
        axis: str | tuple[str, ...] | None = None,
        param_specs: Any = None,
        ema_decay: float | None = None,
        start_early: bool = True,
    ) -> None:
        """Describes a training run; compiles nothing yet.

        Args:
            loss_fn: ``(params, batch)`` or ``(params, batch, key)`` to the mean loss over the examples it is given,
                or to ``Weighted``; with ``has_aux`` to ``(loss, aux)``. ``key`` differs by rank, step and micro-batch.
                With ``has_state`` it is ``(params, model_state, batch)`` or ``(params, model_state, batch, key)`` to
                ``(loss, new_state)``, with ``has_aux`` to ``(loss, (new_state, aux))``.
            optimizer: Any optax transformation; one that wants the loss's ``value`` (``reduce_on_plateau``) gets it.
            strategy: How gradients are communicated.
            mesh: As ``data_mesh`` makes it, or ``targets.mesh``: then ``plan``, ``planned`` and
                ``compile`` work, with the state of ``abstract_state``, and nothing runs.
            num_microbatches: Parts into which each rank's examples are split, in order. Their gradients are added up
                and reduced once, unless the strategy reduces those of each.
            trainable: Predicate on a parameter's dotted path. Other parameters get no gradient, no optimizer state
                and no communication.
            has_aux: Whether ``loss_fn`` returns auxiliary values as well; they come back in ``metrics["aux"]``.
                Floating scalars are averaged as the loss is, ``Weighted`` by its own weight, and values of examples are
                ``Mean``, ``Sum`` or ``PerExample``; anything else is refused.
            max_grad_norm: Clips the global norm of the averaged gradient to this value.
            grad_dtype: Dtype in which gradients are accumulated and summed over ranks; each parameter's own if None.
            compute_dtype: Dtype of the floating parameters that ``loss_fn`` gets, and in which ZeRO gathers them. The
                optimizer updates masters of the dtypes given to ``init``, which ZeRO shards and ``params`` and
                checkpoints hold. Gradients come in this dtype and are cast to ``grad_dtype``, the master's if None,
                before they are added up. Batch and model state are not cast. None: no masters.
            loss_scale: ``"dynamic"`` differentiates the loss times a scale, which float16 needs for small gradients. A
                step that is not finite halves it, 2,000 finite ones double it. Needs ``nonfinite="skip"``.
            nonfinite: What ``step`` does if the loss or the norm of the averaged gradient is NaN or infinite, or an
                element of the model state no longer is finite. They are the same on all ranks, so all do it in the
                same step. ``"ignore"``: nothing. ``"raise"``: raises, after the update. ``"skip"``: leaves parameters,
                optimizer, compression and model state as they were, bit for bit, and only counts the step. The
                collectives are the same; ``"raise"`` and ``"skip"`` wait for each step, and ``"skip"`` updates nothing
                before the norm is known, as clipping does.
            max_skips: Steps of this trainer in a row that ``"skip"`` may skip.
            has_state: Whether the model has state beside the parameters, such as BatchNorm's running statistics, which
                is given to ``init``. It is not optimized, and each micro-batch takes the state of the one before it.
            state_sync: How ranks agree on it at the end of a step. ``"mean"``: floating leaves are averaged over
                ranks; ``"first"``: those of rank 0 count, as DDP's buffers do. Other leaves are rank 0's.
            check_replicas_every: Steps between two calls of ``check_replicas`` by ``step``, which waits for that step;
                0 makes none.
            axis: Of the mesh, along which ranks lie, if the mesh has other axes: ``"data"`` if None.
            param_specs: How parameters lie along the other axes, which are left to XLA, as for tensor parallelism: a
                tree of ``PartitionSpec`` like the parameters, or a prefix of it. ``loss_fn`` may constrain values along
                those axes too.
            ema_decay: Keeps a moving average of the trainable parameters beside them, for ``params(state, "ema")``:
                ``ema = ema_decay * ema + (1 - ema_decay) * params`` after each step that is not skipped. It starts at
                the parameters given to ``init``, so there is no bias to correct. It has their dtype, is sharded where
                the optimizer's state is, and is saved in checkpoints. None: keeps none.
            start_early: On GPUs, whether collectives start as early as they can, as for ``compile_options``.

        Raises:
            ValueError: If the mesh has other axes than ``data_mesh`` makes or no devices, or a number is out of range.
        """
        self._arguments = {
            "loss_fn": loss_fn,
            "optimizer": optimizer,
            "num_microbatches": num_microbatches,
            "trainable": trainable,
            "has_aux": has_aux,
            "max_grad_norm": max_grad_norm,
            "grad_dtype": grad_dtype,
            "compute_dtype": compute_dtype,
            "loss_scale": loss_scale,
            "nonfinite": nonfinite,
            "max_skips": max_skips,
            "has_state": has_state,
            "state_sync": state_sync,
            "check_replicas_every": check_replicas_every,
            "axis": axis,
            "param_specs": param_specs,
            "ema_decay": ema_decay,
            "start_early": start_early,
        }
        check_function("loss_fn", loss_fn)
        check_optimizer(optimizer)
        check_kind("strategy", strategy, Strategy, "a strategy, such as jaxddp.bucketed()")
        check_kind("mesh", mesh, (Mesh, AbstractMesh), "a mesh, such as jaxddp.data_mesh()")
        if trainable is not None:
            check_function("trainable", trainable, "a function of a parameter's name, or None")
        check_flag(has_aux=has_aux, has_state=has_state, start_early=start_early)
        axis = rank_axis(mesh, DATA_AXIS if axis is None and param_specs is not None else axis)
        axes = (axis,) if isinstance(axis, str) else axis
        other_axes = tuple(str(name) for name in mesh.axis_names if name not in axes)
        if other_axes and param_specs is None:
            raise ValueError(f"param_specs (=None) must be given for the other mesh axes: {', '.join(other_axes)}")
        if param_specs is not None and not other_axes:
            raise ValueError(f"param_specs must be None where the mesh has no other axes than {', '.join(axes)}")
        if other_axes and strategy.shards_leaves:
            raise ValueError("shard (='leaves') must be 'elements' with param_specs, which split leaves over devices")
        if other_axes:
            check_stateless(strategy.compression, "with param_specs: use none, bf16 or fp16")
        num_microbatches = check_integer("num_microbatches", num_microbatches)
        if not all(kind == AxisType.Auto for kind in mesh.axis_types):
            raise ValueError(f"mesh axis types (={mesh.axis_types}) must be Auto: make the mesh with jaxddp.data_mesh")
        for name, dtype in (("grad_dtype", grad_dtype), ("compute_dtype", compute_dtype)):
            if dtype is not None and not is_floating(dtype):
                raise ValueError(f"{name} (={dtype!r}) must be a floating dtype or None")
        if max_grad_norm is not None and not (is_number(max_grad_norm) and max_grad_norm > 0):
            raise ValueError(f"max_grad_norm (={max_grad_norm!r}) must be positive or None")
        if ema_decay is not None and not (is_number(ema_decay) and 0 <= ema_decay < 1):
            raise ValueError(f"ema_decay (={ema_decay!r}) must be at least 0 and below 1, or None")
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite (={nonfinite!r}) must be one of {', '.join(NONFINITE)}")
        if loss_scale not in (None, "dynamic"):
            raise ValueError(f"loss_scale (={loss_scale!r}) must be 'dynamic' or None")
        if loss_scale is not None and nonfinite != "skip":
            raise ValueError(
                f"nonfinite (={nonfinite!r}) must be 'skip' with a loss_scale, which overflows to be found"
            )
        max_skips = check_integer("max_skips", max_skips, least=0)
        check_replicas_every = check_integer("check_replicas_every", check_replicas_every, least=0)
        if state_sync not in STATE_SYNC:
            raise ValueError(f"state_sync (={state_sync!r}) must be one of {', '.join(STATE_SYNC)}")
        self.has_state, self._scales_loss = has_state, loss_scale is not None
        # In a job, a trainer may be of the process's own devices.
        is_here = isinstance(mesh, Mesh)
        self._spans_job = is_here and len({one.process_index for one in mesh.devices.flat}) == jax.process_count()
        self._nonfinite, self._max_skips, self._num_skips = nonfinite, max_skips, 0
        self._check_replicas_every, self._num_steps = check_replicas_every, 0
        self.strategy = strategy
        self.mesh, self.axis = mesh, axis
        self.num_ranks = math.prod(mesh.shape[name] for name in axes)
        self.num_microbatches = num_microbatches
        self._rank_step = RankStep(
            partial_loss(loss_fn, has_aux, has_state),
            one_line_errors(optimizer),
            _with_compute_dtype(strategy, compute_dtype),
            axis=axis,
            num_ranks=self.num_ranks,
            num_replicas=self.num_ranks // mesh.shape[shard_axis(axis)],
            other_axes=other_axes,
            num_microbatches=num_microbatches,
            trainable=trainable,
            max_grad_norm=max_grad_norm,
            grad_dtype=grad_dtype,
            compute_dtype=None if compute_dtype is None else jnp.dtype(compute_dtype),
            nonfinite=nonfinite,
            state_sync=state_sync,
            ema_decay=ema_decay,
        )
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._agreed: dict[Any, dict[str, str]] = {}  # shapes of batches that all processes have
        self._programs = Programs(self._rank_step, mesh, param_specs, start_early=start_early)

    @property
    def batch_sharding(self) -> NamedSharding:
        """How the arrays of a batch lie over the ranks: split along dimension 0."""
        return NamedSharding(self.mesh, PartitionSpec(self._rank_step.axis))

    def with_strategy(self, strategy: Strategy, mesh: Mesh | AbstractMesh | None = None) -> Trainer:
        """Gives the trainer of the same run under another strategy, on another mesh if one is given."""
        return Trainer(strategy=strategy, mesh=self.mesh if mesh is None else mesh, **self._arguments)

    def init(self, params: Any, *, model_state: Any = None, seed: int = 0) -> TrainState:
        """Puts a copy of the parameters, or its shard of them, on every rank and makes the optimizer state there.

        Several processes may call it with different parameters: those of process 0 count.

        Args:
            params: A tree of arrays, which stay the caller's.
            model_state: A tree of arrays, with ``has_state``; every rank gets all of it.
            seed: Of the keys that ``loss_fn`` gets.

        Returns:
            The state of step 0.

        Raises:
            ValueError: If there are no arrays, a trainable one is not of a floating dtype, the optimizer is not
                element-wise where its state is sharded, the mesh is a target's, processes differ in versions,
                options, strategy, optimizer or parameters by name, shape or dtype, or ``model_state`` is missing with
                ``has_state`` or given without.
        """
        self._check_devices("init", "abstract_state")
        check_params(params, self._rank_step.trainable)
        if not is_number(seed) or not abs(seed) < 2**63 or int(seed) != seed:
            raise ValueError(f"seed (={seed!r}) must be an integer of 64 bits")
        model_state = self._checked_model_state(model_state)
        _warn_of_narrow(params, self._rank_step.trainable, self.strategy.precision.master_dtype)
        if jax.process_count() > 1:
            held = {"parameter": describe(params), "model_state leaf": describe(model_state)}
            shapes = {f"{kind} {name!r}": text for kind, one in held.items() for name, text in one.items()}
            check_alike(self._fingerprint() | shapes)
            check_alike({"optimizer": self._describe_update(params)})
            params, model_state, seed = from_first_process((params, model_state, seed))
        layout = self._programs.describe(params)
        has_ema, trained = self._rank_step.ema_decay is not None, split(params, self._rank_step.trainable)[0]
        ema = place(trained, layout.ema, self.mesh, self.axis) if has_ema else ()
        params = place(params, layout.params, self.mesh, self.axis)
        opt_state = self._programs.init_opt_state(layout, params)
        seed = int(seed)

        def first() -> tuple[jax.Array, jax.Array, Any]:
            return jnp.zeros((), jnp.int32), jax.random.key(seed), self._first_scale()

        step, key, loss_scale = jax.jit(first, out_shardings=self._replicated)()
        model_state = place(model_state, whole(model_state), self.mesh)
        memory = place_by_rank(layout.memory, self.mesh, self.axis)
        copies = self._programs.make_copies(layout, params)
        return TrainState(step, params, opt_state, key, memory, model_state, loss_scale, copies, ema)

    def abstract_state(self, params: Any, model_state: Any = None) -> TrainState:
        """Describes the state of step 0 without making it, for ``plan``, ``planned`` and ``compile``.

        Args:
            params: A tree of arrays or ``jax.ShapeDtypeStruct``.
            model_state: The same of the model state, with ``has_state``.

        Returns:
            A state of ``jax.ShapeDtypeStruct``.

        Raises:
            ValueError: If there are no arrays, a trainable one is not of a floating dtype, or ``model_state`` is
                missing with ``has_state`` or given without.
        """
        check_params(params, self._rank_step.trainable)
        model_state = self._checked_model_state(model_state)
        loss_scale = jax.eval_shape(self._first_scale)
        return self._programs.describe(params).held()._replace(model_state=abstract(model_state), loss_scale=loss_scale)

    def cast_copies(self, state: TrainState) -> TrainState:
        """Casts the copies in the ``compute_dtype`` again, as ``step`` does after ``state._replace(params=...)``."""
        check_state(state)
        return state._replace(copies=self._programs.make_copies(self._programs.layout(state), state.params))

    def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Takes one training step.

        Args:
            state: Donated: use the returned one from here on.
            batch: A tree of arrays whose dimension 0 counts examples, the same number in all: those of all ranks,
                or, where several processes train together, of this process's ranks. Tensors of PyTorch will do.

        Returns:
            The next state, and metrics: ``"loss"``, the global mean before the update; ``"grad_norm"``, of the
            averaged gradient before clipping; ``"aux"`` with ``has_aux``; ``"skipped"`` with ``nonfinite="skip"``, 1
            if the step was, else 0; ``"loss_scale"`` that it had, with one; ``"learning_rate"`` of this update if
            ``optax.inject_hyperparams`` keeps one in the optimizer's state, of several a dict by the path of their
            state.

        Raises:
            NonFiniteError: If loss, gradient or model state are not finite and ``nonfinite="raise"``, which names the
                leaves of the state that no longer are; or ``nonfinite="skip"`` after ``max_skips`` skipped steps in a
                row. It is a ``FloatingPointError`` and holds the state.
            ReplicaError: As ``check_replicas``, every ``check_replicas_every`` steps.
            ValueError: If the batch cannot be split over ranks and micro-batches, the loss is not a scalar, the mesh is
                a target's, or processes have batches of other shapes or other plans.
        """
        self._check_devices("step", "compile")
        check_alive(state)
        state = self._with_copies(as_arrays(state))
        batch = self._place(batch, self.num_microbatches, state)
        program = self._programs.step(state, batch)
        with self._watched(is_call=False) as results:
            try:
                result = program(state, batch)
                if self._programs.platform == "cpu":
                    # With more simulated devices than cores, steps that run ahead abort in XLA's rendezvous.
                    jax.block_until_ready(result)
            except ValueError as error:
                if "input shardings that disagree" in str(error):
                    raise ValueError(
                        "state must lie over the devices as init makes it: give arrays put into it the shardings of"
                        " those before, by jax.device_put"
                    ) from error
                raise
            results.append(result[1]["loss"])
        if self._nonfinite != "ignore":
            self._check_finite(*result)
        self._num_steps += 1
        if self._check_replicas_every and self._num_steps % self._check_replicas_every == 0:
            try:
                self.check_replicas(result[0])
            except ReplicaError as error:
                error.state = result[0]
                raise
        return result

    def check_replicas(self, state: TrainState) -> None:
        """Checks that ranks hold the same, bit for bit, of what each of them has in full.

        That is all of the state under the strategies without shards; the parameters under zero1 and zero2; small
        parameters under zero3; counters, keys and the model state under all. It takes a pass over them and one
        all-gather of 4 bytes a leaf, in a program of its own.

        Raises:
            ReplicaError: If they differ; it names the leaf, the ranks and by how much.
        """
        self._check_devices("check_replicas", "compile")
        check_alive(state)
        if self.mesh.size > 1:
            with self._watched():
                check_replicas(state, self._programs.layout(state).shardings(self.mesh, self._rank_step.axis))

    def evaluate(self, state: TrainState, batches: Any, eval_fn: Callable[..., Any] | None = None) -> Any:
        """Gives the mean loss of a batch, or what ``eval_fn`` measures of one or several, without gradients.

        A loss function gets no key here: the default of its own, such as ``key=None``, says what it does then. With
        ``has_state`` it must take one, and where it is None normalise by the running statistics; the model state that
        it returns is dropped.

        Args:
            state: Kept as it is.
            batches: A batch as for ``step``; micro-batches do not matter. With ``eval_fn`` it may be of any length,
                or a list of batches (of trees: a list of arrays is one batch), or any other iterable of them, such as
                a generator. Batches are padded to the length of the longest before them, whose program they run.
                In a job each process gives its own examples, and may have fewer of them, or fewer batches.
            eval_fn: ``(params, batch)``, or ``(params, model_state, batch)`` with ``has_state``, to a dict of
                ``Mean``, ``Sum`` and ``PerExample``. It gets a part of the batch, and must measure each example by
                itself. Give the same function each time: another one is compiled again.

        Returns:
            Without ``eval_fn`` a scalar; with ``has_aux`` the scalar and the aux values, as in ``step``. With it a dict
            on the host, over all examples of all batches and processes: means and sums in float64 (of integers in
            int64), and values of single examples in the order of the batches and, within one, of the processes. A
            batch takes one all-reduce, one more for each integer dtype, and an all-gather for each ``PerExample``.

        Raises:
            ValueError: If the batch of a loss cannot be split over ranks, the mesh is a target's, ``loss_fn`` needs a
                key, or takes none with ``has_state``; there are no examples; ``eval_fn`` returns anything else.
        """
        self._check_devices("evaluate", "compile")
        check_alive(state)
        state = self._with_copies(state)
        if eval_fn is None:
            return self._evaluate(state, batches)
        check_function("eval_fn", eval_fn)
        if eval_fn.__hash__ is None:
            raise ValueError(f"eval_fn (={type(eval_fn).__name__}) must be hashable: its programs are kept")
        assert isinstance(self.mesh, Mesh)
        measure = Measure(eval_fn, self.has_state)

        def run(batch: Any, is_real: Any) -> dict[str, Any]:
            return self._evaluate(state, (batch, is_real), measure)

        return evaluate_batches(run, batches, self.batch_sharding, self._watched)

    def _evaluate(self, state: TrainState, batch: Any, measure: Measure | None = None) -> Any:
        with self._watched():  # processes may compare their batches
            batch = self._place(batch, 1)
        program = self._programs.evaluate(state, batch, measure)
        with self._watched() as results:
            result = program(state, batch)
            results.append(jax.tree.leaves(result)[0])
            return jax.block_until_ready(result) if self._programs.platform == "cpu" else result

    @contextlib.contextmanager
    def _watched(self, is_call: bool = True) -> Iterator[list[Any]]:
        """Tells the watchdog of a step, or of another call that takes all processes, and of a result that it adds."""
        results: list[Any] = []
        if self._spans_job:
            begin_step(is_call)
        try:
            yield results
        except Exception:
            wait_for_end()
            raise
        if self._spans_job:
            end_step(lambda: all(one.is_deleted() or one.is_ready() for one in results))

    def params(self, state: TrainState, which: str = "params") -> Any:
        """Gives a copy of the full parameters, as the tree that ``init`` was given; later steps do not change it.

        With a ``compute_dtype`` they are the masters.
        Every device gets all of them; ``checkpoint.host_state.host_params`` puts them on the host instead.

        Args:
            state: Kept as it is.
            which: ``"params"``, or ``"ema"`` for their moving average, with ``ema_decay``; what is not trained is as it
                is.

        Raises:
            ValueError: If ``which`` is another, or there is no moving average.
        """
        check_alive(state)
        if which not in ("params", "ema"):
            raise ValueError(f"which (={which!r}) must be 'params' or 'ema'")
        layout = self._programs.layout(state)
        if which == "params":
            return full_arrays(state.params, layout.params, self.mesh)
        if self._rank_step.ema_decay is None:
            raise ValueError(f"which (={which!r}) needs Trainer(ema_decay=...)")
        held, places = (split(tree, self._rank_step.trainable)[1] for tree in (state.params, layout.params))
        return full_arrays(merge(state.ema, held), merge(layout.ema, places), self.mesh)

    def model_state(self, state: TrainState) -> Any:
        """Gives a copy of the model state, as the tree that ``init`` was given."""
        check_alive(state)
        return full_arrays(state.model_state, whole(state.model_state), self.mesh)

    def update_module(self, state: TrainState, model: Any) -> None:
        """Writes parameters and model state to the NNX model that ``jaxddp.flax.from_nnx`` took apart."""
        from flax import nnx  # late: losses need no Flax

        check_kind("model", model, nnx.Module, "an nnx.Module")
        nnx.update(model, self.params(state), self.model_state(state))

    def compile(self, state: TrainState, batch: Any) -> jax.stages.Compiled:
        """Compiles the step for these shapes, or gives the program that ``step`` already runs for them.

        Args:
            state: As from ``init``; arrays or ``jax.ShapeDtypeStruct``.
            batch: The global batch; arrays or ``jax.ShapeDtypeStruct``.

        Returns:
            The executable that ``step`` runs; on the mesh of a target, what it would run there.

        Raises:
            ValueError: If the batch cannot be split over ranks and micro-batches, or a target's compiler is missing or
                refuses.
        """
        return self._programs.step(state, self._described(state, batch))

    def plan(self, state: TrainState, batch: Any) -> BucketPlan:
        """Gives the bucket plan of the step, in the order in which the traced backward finishes the gradients.

        Constant gradients are left out, because XLA drops their reduction. On one rank nothing is communicated.

        Args:
            state: As from ``init``; arrays or ``jax.ShapeDtypeStruct``.
            batch: The global batch; arrays or ``jax.ShapeDtypeStruct``.

        Returns:
            Which gradients are communicated together.
        """
        return self._programs.plan(state, self._described(state, batch))

    def planned(self, state: TrainState, batch: Any) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives that one step should have for gradients and parameters.

        Those of metrics, of the model state (``planned_sync``) and of the loss function itself (``planned_loss``) are
        left out.
        """
        return self._programs.planned(state, self._described(state, batch))

    def planned_groups(self, state: TrainState, batch: Any) -> list[tuple[str, int, tuple[int, ...]]]:
        """Lists ``(kind, bytes, devices of the first group)`` of the same collectives, by their place in the mesh."""
        batch = self._described(state, batch)
        devices = np.arange(self.mesh.size).reshape(self.mesh.axis_sizes)

        def group(axes: tuple[str, ...]) -> tuple[int, ...]:
            place = tuple(slice(None) if axis in axes else 0 for axis in self.mesh.axis_names)
            return tuple(devices[place].reshape(-1).tolist())

        return [(one.kind, one.num_bytes, group(one.axes)) for one in self._programs.planned_along(state, batch)]

    def planned_sync(self, state: TrainState) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives by which ranks agree on the model state at the end of a step."""
        check_state(state)
        return planned_sync(state.model_state, self.num_ranks, self._programs.platform)

    def planned_loss(self, state: TrainState, batch: Any) -> list[tuple[str, int]]:
        """Lists ``(kind, bytes)`` of the collectives that the loss function itself calls over ranks in one step.

        They are those of its trace, forward and backward, such as of BatchNorm's statistics over the axis: of a
        ``lax.cond`` those of all branches, and those in an iteration of a ``lax.while_loop`` once.
        """
        return self._programs.planned_loss(state, self._described(state, batch))

    def layout(self, state: TrainState) -> StateLayout:
        """Gives which leaves of a state are shards, and of what; under zero3 after ``init`` or ``abstract_state``."""
        check_state(state)
        return self._programs.layout(state)

    def trace(self, state: TrainState, batch: Any) -> GradientTrace:
        """Traces one rank's backward pass: the gradients in the order in which they become ready."""
        return self._programs.trace(state, self._described(state, batch))

    def step_function(self, state: TrainState, batch: Any, plan: BucketPlan | None = None) -> StepFunction:
        """Gives the step before it is compiled.

        Args:
            state: As from ``init`` or ``abstract_state``.
            batch: The global batch; arrays or ``jax.ShapeDtypeStruct``.
            plan: What to communicate; that of ``plan`` if None.

        Returns:
            ``(function, args, options)``, for ``jax.jit(function, **options).lower(*args)``.

        Raises:
            ValueError: As ``compile``.
        """
        return self._programs.step_function(state, self._described(state, batch), plan)

    def _described(self, state: TrainState, batch: Any) -> Any:
        """Checks what a step is planned for; the batch on the host."""
        check_state(state)
        batch = host_arrays(batch)
        check_batch(batch, self.num_ranks, self.num_microbatches)
        return batch

    def __deepcopy__(self, memo: dict[int, Any]) -> Trainer:
        """Copies the trainer; what it has compiled cannot change, and is shared."""
        new = copy.copy(self)
        new._programs = self._programs.copy()
        return new

    def _check_devices(self, method: str, instead: str) -> None:
        if isinstance(self.mesh, AbstractMesh):
            spec = self.mesh.abstract_device.device_kind
            raise ValueError(f"{method} needs devices, and {spec!r} is not here: use {instead}")

    def _with_copies(self, state: TrainState) -> TrainState:
        """Casts copies anew where a state has none, or those of a trainer with another ``compute_dtype``."""
        dtype = None if self.strategy.shards_params else self._rank_step.compute_dtype
        if {leaf.dtype for leaf in jax.tree.leaves(state.copies)} == {dtype} - {None}:
            return state
        return state._replace(copies=()) if dtype is None else self.cast_copies(state)

    def _first_scale(self) -> Any:
        return first_scale() if self._scales_loss else ()

    def _checked_model_state(self, model_state: Any) -> Any:
        if self.has_state and model_state is None:
            raise ValueError("model_state (=None) must be given: has_state is set")
        if not self.has_state and model_state is not None:
            raise ValueError(f"model_state (={type(model_state).__name__}) needs Trainer(has_state=True)")
        model_state = () if model_state is None else model_state
        for name, leaf in named_leaves(model_state).items():
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ValueError(f"model_state leaf {name!r} (={leaf!r}) must be an array")
        return model_state

    def _check_finite(self, state: TrainState, metrics: dict[str, Any]) -> None:
        """Applies ``nonfinite`` to a step that was taken."""
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        state_is_finite = not metrics.pop(NONFINITE_STATE, False)
        if math.isfinite(loss) and math.isfinite(norm) and state_is_finite:
            self._num_skips = 0
            return
        found = f"loss (={loss}) and gradient norm (={norm}){', and model_state,' * (not state_is_finite)} of step "
        found += f"{int(state.step)} must be finite"
        if self._nonfinite == "raise":
            names = self._nonfinite_leaves(state)
            more = f" and {len(names) - 3} more" * (len(names) > 3)
            raise NonFiniteError(f"{found}; no longer are in the state: {', '.join(names[:3]) or 'none'}{more}", state)
        self._num_skips += 1
        if self._num_skips > self._max_skips:
            raise NonFiniteError(f"{found}: skipped {self._max_skips} steps before it, max_skips in a row", state)

    def _nonfinite_leaves(self, state: TrainState) -> list[str]:
        leaves = named_leaves(state._replace(memory=(), copies=()))
        floats = {name: leaf for name, leaf in leaves.items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
        check = jax.jit(lambda tree: {name: jnp.isfinite(leaf).all() for name, leaf in tree.items()},
                        out_shardings=self._replicated)  # fmt: skip
        is_finite = check(floats)
        return [name for name in floats if not is_finite[name]]

    def _fingerprint(self) -> dict[str, Any]:
        """What must be alike in all processes, apart from parameters and batches."""
        return {
            "jaxddp": __version__,
            "jax": jax.__version__,
            "strategy": self.strategy.name,
            "shards_leaves": self.strategy.shards_leaves,
            "precision": repr(self.strategy.precision),
            "compression": self.strategy.compression.name,
            "num_ranks": self.num_ranks,
            "num_replicas": self._rank_step.num_replicas,
            "num_microbatches": self.num_microbatches,
            "max_grad_norm": self._arguments["max_grad_norm"],
            "nonfinite": self._nonfinite,
            "max_skips": self._max_skips,
            "has_aux": self._arguments["has_aux"],
            "state_sync": self._arguments["state_sync"],
            "check_replicas_every": self._check_replicas_every,
            "ema_decay": self._arguments["ema_decay"],
            "grad_dtype": str(self._arguments["grad_dtype"]),
            "compute_dtype": str(self._arguments["compute_dtype"]),
            "loss_scale": self._arguments["loss_scale"],
        }

    def _describe_update(self, params: Any) -> str:
        step = self._rank_step
        try:
            return describe_update(step.optimizer, split(params, step.trainable)[0], list(self.mesh.shape.items()))
        except Exception as error:  # the other processes wait for this one
            return type(error).__name__

    def _describe(self, held: Any, num_microbatches: int, state: TrainState | None) -> dict[str, str]:
        """This process's batch and, if there is a state to train, the plan of the step."""
        said = {"batch": ", ".join(f"{name} {text}" for name, text in describe(held).items())}
        if state is not None:
            count = jax.process_count()
            batch = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    leaf.shape if is_global(leaf) else (*(rows * count for rows in leaf.shape[:1]), *leaf.shape[1:]),
                    leaf.dtype,
                ),
                held,
            )
            with contextlib.suppress(ValueError):  # raised again once all processes have come
                check_batch(batch, self.num_ranks, num_microbatches)
                plan = self.plan(state, batch)
                said["plan"] = f"{len(plan.buckets)} buckets, checksum {zlib.crc32(repr(plan).encode()):08x}"
                said["results and constant gradients"] = self._programs.describe_results(state, batch)
        return said

    def _place(self, batch: Any, num_microbatches: int, state: TrainState | None = None) -> Any:
        batch = host_arrays(batch)
        if jax.process_count() > 1:
            held = jax.tree.map(lambda leaf: leaf if is_global(leaf) else np.asarray(leaf), batch)
            # With another number of examples in each process, the mean over ranks would be one of unlike means.
            key = signature(held), state is None
            agreement().check(key, lambda: self._describe(held, num_microbatches, state), self._agreed)
            batch = place_batch(held, self.batch_sharding)
        check_batch(batch, self.num_ranks, num_microbatches)
        try:
            return jax.device_put(batch, self.batch_sharding)
        except TypeError as error:  # text and objects
            raise ValueError(f"batch must hold arrays of numbers: {error}") from error


def _with_compute_dtype(strategy: Strategy, compute_dtype: Any) -> Strategy:
    """ZeRO 3 casts when it gathers."""
    given = strategy.precision.compute_dtype
    if compute_dtype is None or not strategy.shards_params:
        return strategy
    if given is not None and jnp.dtype(given) != jnp.dtype(compute_dtype):
        raise ValueError(f"compute_dtype (={compute_dtype!r}) must be that of the strategy (={given!r}), or left out")
    return strategy._replace(precision=strategy.precision._replace(compute_dtype=compute_dtype))


def _warn_of_narrow(params: Any, trainable: Callable[[str], bool] | None, master_dtype: Any) -> None:
    """Warns where updates are added to weights of 16 bits, which lose most of them."""
    for name, leaf in named_leaves(params).items():
        dtype = jnp.dtype(master_dtype or leaf.dtype) if trainable is None or trainable(name) else jnp.dtype("float32")
        if dtype.itemsize < 4:
            overflow = "sums of gradients above 65504 are infinite, " if dtype.name == "float16" else ""
            warnings.warn(
                f"parameter {name!r} is {dtype.name}: {overflow}updates below its last place are lost, and training"
                f" stalls; give init float32 parameters, and Trainer compute_dtype=jnp.{dtype.name}",
                stacklevel=3,
            )
            return
