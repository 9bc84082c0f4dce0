"""Training steps compiled for machines that are not here, read back, simulated, and held against plan and bound."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..arguments import check_kind, check_leaves
from ..models import TransformerConfig, abstract
from ..network import Network
from ..planning.machine import network_in_words, network_of, target as machine_of
from ..registry import BUCKETED, STRATEGIES, make_strategy
from ..strategy import Strategy
from ..training.jit_baseline import auto_step
from ..training.train import Trainer, TrainState
from ..training.validation import abstract as shapes_of
from ..tree import named_leaves
from . import targets
from .memory import DeviceBytes, held_bytes, step_memory
from .schedule import Schedule, read_schedule
from .simulate import Bound, Simulation, lower_bound, product_dtype, simulate

AUTO = "auto"
_COMPUTE_TOLERANCE = 0.02  # excess over the step without communication above which a note is added


@dataclass
class Inspection:
    """One strategy's step on a target, ``compiled`` and ``as_planned`` or not; ``title`` has target and network."""

    strategy: str
    target: targets.Target
    network: Network
    planned: list[tuple[str, int]]  # (kind, bytes) in the order of the plan
    schedule: Schedule
    simulation: Simulation
    bound: Bound  # lower bound of the step time
    memory: dict[str, int]  # bytes of each device, by component
    is_held_as_planned: bool = True  # whether the program's parameters and optimizer state have these bytes

    def __post_init__(self) -> None:
        self.compiled = self.schedule.gradient_collectives()  # sorted (kind, bytes)
        # None if nothing was planned.
        is_same = sorted(self.planned) == self.compiled and self.is_held_as_planned
        self.as_planned = None if self.strategy == AUTO else is_same
        found: Counter[str] = Counter()  # FLOPs of the products by the dtype in which the chip multiplies, most first
        for kind, flops in self.schedule.work().matmul_flops.items():
            dtype, count = product_dtype(kind, self.target.chip)
            found[dtype if count == 1 else f"{count} x {dtype}"] += flops  # type: ignore[assignment]
        self.product_dtypes: dict[str, float] = dict(found.most_common())
        products = " and ".join(self.product_dtypes) or "no products"
        self.title = f"{self.target.spec}, in {products}, simulated; {network_in_words(self.target, self.network)}"

    @property
    def notes(self) -> list[str]:
        """Remarks for the reader."""
        notes = list(self.schedule.notes)
        if self.as_planned is False:
            what = "collectives" if self.is_held_as_planned else "bytes of parameters or optimizer state"
            notes.append(f"compiled to other {what} than planned")
        groups = {(one.kind, one.num_bytes, one.group) for one in self.schedule.collectives() if not one.is_metrics}
        notes += sorted({why for one in groups if (why := self.network.assumed(*one))})
        if self.memory["peak"] > self.target.chip.pool_bytes:
            pool = f"the {self.target.chip.pool_bytes / 1e9:.1f} GB that JAX takes of a GPU by default"
            notes.append(f"needs more than {pool}: set XLA_PYTHON_CLIENT_MEM_FRACTION")
        if (excess := self.simulation.compute_s / self.bound.compute_s - 1) > _COMPUTE_TOLERANCE:
            notes.append(f"computes {excess:.1%} longer than the same step without communication")
        return notes


class Training(NamedTuple):
    """A training run by its shapes: arguments of ``inspect``."""

    loss_fn: Callable[..., Any]
    optimizer: optax.GradientTransformation
    params: Any
    batch: Any
    options: Mapping[str, Any] = MappingProxyType({})  # others of Trainer, and a model_state if there is one


def transformer_training(config: TransformerConfig, num_sequences: int) -> Training:
    """Describes the training of the package's transformer with AdamW on so many sequences of its full context."""
    loss_fn, params = abstract(config)
    tokens = jax.ShapeDtypeStruct((num_sequences, config.context), jnp.int32)
    return Training(loss_fn, optax.adamw(1e-3), params, {"tokens": tokens, "targets": tokens})


def inspect(
    loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation, params: Any, batch: Any,
    strategies: str | Strategy | Sequence[str | Strategy] = ("bucketed",), *, target: str = "h100:8",
    bucket_mb: float | None = None, network: Network | None = None, peaks: bool = False, model_state: Any = None,
    say: Callable[[str], None] = lambda text: None, **options: Any,
) -> list[Inspection]:  # fmt: skip
    """Compiles training steps for a machine that is not here, reads them back and simulates them.

    Args:
        loss_fn: As ``Trainer`` takes it.
        optimizer: Any optax transformation.
        params: A tree of arrays or ``jax.ShapeDtypeStruct``: shapes are enough.
        batch: The global batch of all devices; the same.
        strategies: One or several: names in ``STRATEGIES``; ``"auto"``, plain ``jit`` with replicated parameters; or
            strategies with options of their own.
        target: Chip and count, as ``h100:8`` or ``v5p:64``; ``h100:4x8`` is 4 hosts of 8.
        bucket_mb: Bucket cap in MiB of the strategies that take one.
        network: How fast ranks send; that of ``planning.machine.network_of`` if None.
        peaks: Whether to simulate with published peaks of products, memory and links, where measured ones are known.
        model_state: With ``has_state``, as for ``Trainer.init``; shapes are enough.
        say: Shows progress.
        **options: Others of ``Trainer``, such as ``num_microbatches``.

    Returns:
        For each strategy the planned and compiled collectives, the schedule, its simulation, and the bytes of a device.

    Raises:
        ValueError: If a strategy or the target is unknown, ``bucket_mb`` applies to none of them, ``"auto"`` comes
            with options, the step does not fit into the target's memory, or as ``Trainer``.
    """
    machine = machine_of(target, peaks=peaks)
    network = network_of(machine) if network is None else network
    check_kind("network", network, Network, "a jaxddp.Network")
    for name, tree in {"params": params, "batch": batch, "model_state": model_state}.items():
        check_leaves(name, named_leaves(tree))
    whole = Trainer(loss_fn, optimizer, make_strategy("naive"), targets.mesh(machine.spec), **options)
    strategies = [strategies] if isinstance(strategies, (str, Strategy)) else strategies
    trainers = _trainers(whole, strategies, bucket_mb, options)
    return _inspect(trainers, whole, shapes_of((params, batch, model_state)), machine, network, say)


def _inspect(
    trainers: Mapping[str, Trainer], whole: Trainer, shapes: tuple[Any, ...], target: targets.Target,
    network: Network, say: Callable[[str], None],
) -> list[Inspection]:  # fmt: skip
    params, batch, model_state = shapes
    state = whole.abstract_state(params, model_state)
    states = {name: one.abstract_state(params, model_state) for name, one in trainers.items()}
    layouts = {name: one.layout(states[name]) for name, one in trainers.items()}
    held = {name: held_bytes(layout) for name, layout in layouts.items()}
    for one in held.values():  # before anything is compiled
        _check_fits(target, "parameters and optimizer state alone need", one.state)
    say(f"compiling {len(trainers) + 1} programs for {target.spec}")
    pending_alone = targets.start_compile_without_communication(whole, state, batch)
    pending = {
        name: (_start_auto if name == AUTO else targets.start_compile)(one, states[name], batch)
        for name, one in trainers.items()
    }
    planned = {name: [] if name == AUTO else one.planned(states[name], batch) for name, one in trainers.items()}
    all_params = held_bytes(whole.layout(state)).parameters
    sent = [_sent_bytes(planned[name], held[name].parameters < all_params) for name in trainers if name != AUTO]
    least = min([_sent_bytes(whole.planned(state, batch), False), *sent])
    bound = lower_bound(read_schedule(pending_alone.result()), target.chip, network, least, target.num_devices)
    found = []
    for name in trainers:
        program = pending[name].result()
        schedule = read_schedule(program)
        memory = _memory(schedule, held[name], batch, target)
        _check_fits(target, f"a step of {name} needs", memory["peak"])
        simulation = simulate(schedule, target.chip, network)
        is_held = name == AUTO or _is_held(program, states[name], held[name])
        found.append(Inspection(name, target, network, planned[name], schedule, simulation, bound, memory, is_held))
    # XLA can fuse the step without communication 1 % worse than a bucketed one, so the bound takes the least compute
    # found, except in steps whose sharded optimizers do less work.
    same = [each for each in found if not (layouts[each.strategy].cuts or layouts[each.strategy].owners)]
    least_s = min([bound.compute_s, *(each.simulation.compute_s for each in same)])
    return [replace(each, bound=replace(bound, compute_s=least_s)) for each in found]


def _check_fits(target: targets.Target, what: str, needed: int) -> None:
    if needed > (available := target.chip.memory_bytes):
        raise ValueError(
            f"{what} {needed / 1e9:.1f} GB on each device of {target.spec!r}, which has {available / 1e9:.1f} GB: "
            f"{(needed - available) / 1e9:.1f} GB too much; python -m jaxddp plan says what fits"
        )


def _trainers(whole: Trainer, strategies: Any, bucket_mb: float | None, options: Any) -> dict[str, Trainer]:
    """A trainer for each strategy, by the names that they have in tables; ``whole`` for AUTO."""
    check_kind("strategies", strategies, Sequence, "names or strategies")
    given: dict[str, str | Strategy] = {}
    found = {AUTO: whole}
    for one in strategies:
        check_kind("strategy", one, (str, Strategy), "a name or a strategy, such as jaxddp.bucketed()")
        name = one if isinstance(one, str) else f"{one.name} {one.variant}".rstrip()
        if given.setdefault(name, one) != one:
            raise ValueError(f"strategies (={name}, twice) must have different names")
        if isinstance(one, str) and name not in (AUTO, *STRATEGIES):
            raise ValueError(f"unknown strategy {name!r}: one of {AUTO}, {', '.join(STRATEGIES)}")
        if name != AUTO:
            cap = {"bucket_mb": bucket_mb} if bucket_mb is not None and name in BUCKETED else {}
            found[name] = whole.with_strategy(make_strategy(one, **cap) if isinstance(one, str) else one)
    if bucket_mb is not None and not any(isinstance(one, str) and one in BUCKETED for one in strategies):
        allowed = ", ".join(BUCKETED)
        raise ValueError(f"bucket_mb (={bucket_mb}) must come with one of {allowed}, not {next(iter(given))!r}")
    if AUTO in given and options:
        raise ValueError(f"strategy {AUTO!r} must come without options of Trainer, not {next(iter(options))}")
    return {name: found[name] for name in given}


def _start_auto(trainer: Trainer, state: TrainState, batch: Any) -> targets.Pending:
    mesh = trainer.mesh
    replicated, by_rank = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), mesh.axis_names))
    return targets.start_compile_for_target(
        auto_step(trainer.loss_fn, trainer.optimizer), (state, batch),
        in_shardings=(replicated, by_rank), out_shardings=replicated, donate_argnums=(0,),
    )  # fmt: skip


def _sent_bytes(planned: Sequence[tuple[str, int]], shards_params: bool) -> float:
    """Bytes of the all-reduce that takes as long as what a strategy must send after the first gradient."""
    # Half of a reduction is a reduce-scatter or an all-gather; of ZeRO-3's gathers, half are the forward's.
    shares = {"all-reduce": 1.0, "reduce-scatter": 0.5, "all-gather": 0.25 if shards_params else 0.5}
    return sum(shares.get(kind, 0) * num_bytes for kind, num_bytes in planned)


def _is_held(program: targets.TargetProgram, state: TrainState, held: DeviceBytes) -> bool:
    try:
        return step_memory(program, state)[:2] == held[:2]
    except ValueError:  # without a leaf that nothing reads
        return True


def _memory(schedule: Schedule, held: DeviceBytes, batch: Any, target: targets.Target) -> dict[str, int]:
    stats = schedule.memory
    in_all = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return {
        "parameters": held.parameters,
        "optimizer_state": held.optimizer_state,
        "batch": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch)) // target.num_devices,
        "temporaries": stats.temp_size_in_bytes,
        "peak": in_all - stats.alias_size_in_bytes,  # outputs that take the place of donated arguments
        "available": target.chip.memory_bytes,
    }
