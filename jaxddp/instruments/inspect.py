"""Training steps compiled for machines that are not here, read back, simulated, and held against plan and bound."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from ..models import TransformerConfig, abstract
from ..network import Network
from ..planning.machine import network_in_words, network_of, target as machine_of
from ..registry import make_strategy
from ..strategy import Layout, Strategy
from ..training.step import auto_step
from ..training.train import Trainer, TrainState
from ..training.validation import abstract as shapes_of
from ..tree import named_leaves
from . import targets
from .hlo import parse_module
from .schedule import Schedule, read_schedule
from .simulate import Bound, Simulation, lower_bound, multiplied_in, simulate

AUTO = "auto"
_COMPUTE_TOLERANCE = 0.02  # excess over the step without communication above which a note is added


@dataclass(repr=False)
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
        is_same = sorted(self.planned) == self.compiled and self.is_held_as_planned
        self.as_planned = None if self.strategy == AUTO else is_same  # for which nothing is planned
        flops: Counter[str] = Counter()  # of products, by the dtype in which the chip multiplies
        for kind, each in self.schedule.work().matmul_flops.items():
            dtype, count = multiplied_in(kind, self.target.chip)
            flops[dtype if count == 1 else f"{count} x {dtype}"] += each  # type: ignore[assignment]
        products = " and ".join(dtype for dtype, _ in flops.most_common()) or "no products"
        self.title = f"{self.target.spec}, in {products}, simulated; {network_in_words(self.target, self.network)}"

    def __repr__(self) -> str:
        """One line, without operations."""
        said = {None: "nothing planned", True: "as planned", False: "NOT AS PLANNED"}[self.as_planned]
        return f"<{self.strategy} on {self.target.spec}: {self.simulation.step_s * 1e3:.4g} ms a step, {said}>"

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
    options: Mapping[str, Any] = {}  # others of Trainer, and a model_state if there is one


def transformer_training(config: TransformerConfig, num_sequences: int) -> Training:
    """Describes the training of the package's transformer with AdamW on so many sequences of its full context."""
    loss_fn, params = abstract(config)
    tokens = jax.ShapeDtypeStruct((num_sequences, config.context), jnp.int32)
    return Training(loss_fn, optax.adamw(1e-3), params, {"tokens": tokens, "targets": tokens})


def inspect(
    loss_fn: Callable[..., Any], optimizer: optax.GradientTransformation, params: Any, batch: Any,
    strategies: str | Strategy | Sequence[str | Strategy] = ("bucketed",), *, target: str = "h100:8",
    network: Network | None = None, peaks: bool = False, model_state: Any = None,
    say: Callable[[str], None] = lambda text: None, **options: Any,
) -> list[Inspection]:  # fmt: skip
    """Compiles training steps for a machine that is not here, reads them back and simulates them.

    Args:
        loss_fn: As ``Trainer`` takes it.
        optimizer: Any optax transformation.
        params: A tree of arrays or ``jax.ShapeDtypeStruct``: shapes are enough.
        batch: The global batch of all devices; the same.
        strategies: One or several: strategies, their names, or ``"auto"``, plain ``jit`` with replicated parameters.
        target: Chip and count, as ``h100:8`` or ``v5p:64``; ``h100:4x8`` is 4 hosts of 8.
        network: How fast ranks send; that of ``planning.machine.network_of`` if None.
        peaks: Whether to simulate with published peaks of products, memory and links, where measured ones are known.
        model_state: With ``has_state``, as for ``Trainer.init``; shapes are enough.
        say: Shows progress.
        **options: Others of ``Trainer``, such as ``num_microbatches``.

    Raises a ValueError if ``"auto"`` comes with options, the step does not fit into memory, or as ``Trainer``.
    """
    machine = machine_of(target, peaks=peaks)
    network = network_of(machine) if network is None else network
    params, batch, model_state = shapes_of((params, batch, model_state))
    whole = Trainer(loss_fn, optimizer, make_strategy("naive"), targets.mesh(machine.spec), **options)
    strategies = [strategies] if isinstance(strategies, (str, Strategy)) else strategies
    steps = [_planned_step(whole, one, params, batch, model_state, options) for one in strategies]
    for step in steps:  # before anything is compiled
        _check_fits(machine, "parameters and optimizer state alone need", sum(step.held))
    say(f"compiling {len(steps) + 1} programs for {machine.spec}")
    state = whole.abstract_state(params, model_state)
    pending = targets.start_compile_without_communication(whole, state, batch)
    programs = [_start(step, batch) for step in steps]
    all_params = held_bytes(whole.layout(state)).parameters
    sent = [_sent_bytes(step.planned, step.held[0] < all_params) for step in steps if step.name != AUTO]
    least = min([_sent_bytes(whole.planned(state, batch), False), *sent])
    bound = lower_bound(read_schedule(pending.result()), machine.chip, network, least, machine.num_devices)
    found = [
        _inspection(step, program.result(), batch, machine, network, bound)
        for step, program in zip(steps, programs, strict=True)
    ]
    # XLA can fuse the step without communication 1 % worse than a bucketed one, so the bound takes the least compute
    # found, except in steps whose sharded optimizers do less work.
    same = [each for each, step in zip(found, steps, strict=True) if not step.is_sharded]
    least_s = min([bound.compute_s, *(each.simulation.compute_s for each in same)])
    return [replace(each, bound=replace(bound, compute_s=least_s)) for each in found]


class _Step(NamedTuple):
    """A strategy's step before it is compiled."""

    name: str  # in tables
    trainer: Trainer
    state: TrainState
    planned: list[tuple[str, int]]
    held: tuple[int, int]  # bytes of parameters and optimizer state on a device
    is_sharded: bool


def _planned_step(
    whole: Trainer, strategy: str | Strategy, params: Any, batch: Any, model_state: Any, options: Mapping[str, Any]
) -> _Step:
    if is_auto := strategy == AUTO:
        if options:
            raise ValueError(f"strategy {AUTO!r} must come without options of Trainer, not {next(iter(options))}")
        strategy = whole.strategy
    strategy = make_strategy(strategy) if isinstance(strategy, str) else strategy
    trainer = whole.with_strategy(strategy)
    state = trainer.abstract_state(params, model_state)
    layout = trainer.layout(state)
    name = AUTO if is_auto else f"{strategy.name} {strategy.variant}".rstrip()
    planned = [] if is_auto else trainer.planned(state, batch)
    return _Step(name, trainer, state, planned, held_bytes(layout)[:2], bool(layout.cuts or layout.owners))


def _check_fits(target: targets.Target, what: str, needed: int) -> None:
    if needed > (available := target.chip.memory_bytes):
        raise ValueError(
            f"{what} {needed / 1e9:.1f} GB on each device of {target.spec!r}, which has {available / 1e9:.1f} GB: "
            f"{(needed - available) / 1e9:.1f} GB too much; python -m jaxddp plan says what fits"
        )


def _start(step: _Step, batch: Any) -> targets.Pending:
    trainer, mesh = step.trainer, step.trainer.mesh
    if step.name != AUTO:
        return targets.start_compile(trainer, step.state, batch)
    replicated, by_rank = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), mesh.axis_names))
    return targets.start_compile_for_target(
        auto_step(trainer.loss_fn, trainer.optimizer), (step.state, batch),
        in_shardings=(replicated, by_rank), out_shardings=replicated, donate_argnums=(0,),
    )  # fmt: skip


def _sent_bytes(planned: Sequence[tuple[str, int]], shards_params: bool) -> float:
    """Bytes of the all-reduce that takes as long as what a strategy must send after the first gradient."""
    # Half of a reduction is a reduce-scatter or an all-gather; of ZeRO-3's gathers, half are the forward's.
    shares = {"all-reduce": 1.0, "reduce-scatter": 0.5, "all-gather": 0.25 if shards_params else 0.5}
    return sum(shares.get(kind, 0) * num_bytes for kind, num_bytes in planned)


def _inspection(
    step: _Step, program: targets.TargetProgram, batch: Any, target: targets.Target, network: Network, bound: Bound
) -> Inspection:
    schedule, stats = read_schedule(program), program.memory_analysis()
    peak = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    peak -= stats.alias_size_in_bytes  # outputs that take the place of donated arguments
    _check_fits(target, f"a step of {step.name} needs", peak)
    memory = {
        "parameters": step.held[0],
        "optimizer_state": step.held[1],
        "batch": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(batch)) // target.num_devices,
        "temporaries": stats.temp_size_in_bytes,
        "peak": peak,
        "available": target.chip.memory_bytes,
    }
    try:
        is_held = step.name == AUTO or step_memory(program, step.state)[:2] == step.held
    except ValueError:  # without a leaf that nothing reads
        is_held = True
    simulation = simulate(schedule, target.chip, network)
    return Inspection(step.name, target, network, step.planned, schedule, simulation, bound, memory, is_held)


class DeviceBytes(NamedTuple):
    """Bytes on one device."""

    parameters: int = 0  # parameters as the loss takes them: this device's shards, or copies in a compute dtype
    optimizer_state: int = 0  # optimizer state, with its counters, the masters of such copies, and a moving average
    others: int = 0  # step number, RNG key, and model state
    batch: int = 0  # this device's examples
    padding: int = 0  # what the compiler's layout adds to arguments, such as a TPU's tiles
    temporaries: int = 0  # what lives within a step, as the compiler laid it out


def held_bytes(layout: Layout) -> DeviceBytes:
    """Returns the bytes of parameters and optimizer state on a device; the other components are 0."""
    trees = layout.params, layout.opt_state
    return DeviceBytes(*(sum(leaf.bytes_on_rank for leaf in jax.tree.leaves(tree)) for tree in trees))


def step_memory(compiled: Any, state: TrainState) -> DeviceBytes:
    """Reads the memory of a step on each device from ``Trainer.compile``; a ValueError if it is of another state."""
    entry, stats = parse_module(compiled.as_text()).entry.values(), compiled.memory_analysis()
    parameters = sorted((int(one.literal), one.num_bytes) for one in entry if one.opcode == "parameter")
    given = [num_bytes for _, num_bytes in parameters]
    padding = stats.argument_size_in_bytes - sum(given)
    leaves = named_leaves(state)
    held = {"parameters": 0, "optimizer_state": 0, "others": 0}
    # Arguments are the leaves of the state in tree order, then those of the batch. JAX drops those that are not read:
    # parts of a batch, or an injected hyperparameter that a schedule sets.
    for name, leaf in leaves.items():
        component = {"params": "parameters", "opt_state": "optimizer_state"}.get(name.partition(".")[0], "others")
        full = leaf.size * leaf.dtype.itemsize
        if given and (given[0] == full or (given[0] and full and full % given[0] == 0)):  # all of it, or a shard
            held[component] += given.pop(0)
        elif full == 0 or (component == "optimizer_state" and leaf.ndim == 0):
            held[component] += full
        else:
            raise ValueError(f"the program takes {len(parameters)} arguments and the state has {len(leaves)} leaves")
    return DeviceBytes(**held, batch=sum(given), padding=padding, temporaries=stats.temp_size_in_bytes)
