"""Mistakes of one line, put into a copy of the package one at a time: the tests nearest to each must fail.

    python -m pytest -m full parity_tests/mutants_test.py

A mutant that lives is a missing test. ``old`` must occur once in its file, so a mutant whose line has changed is found
by the default run.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 600.0


class Mutant(NamedTuple):
    """One mistake.

    Attributes:
        file: That has it, from the root.
        old: What is there, once.
        new: What is there instead.
        tests: Those that must fail, one at least: files or names of tests, as pytest takes them.
    """

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def source(self) -> str:
        """The file with the mistake.

        Raises:
            ValueError: If ``old`` does not occur once.
        """
        text = (ROOT / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"old (={self.old!r}) must occur once in {self.file}, not {count} times")
        return text.replace(self.old, self.new)


_STEP, _LOSS, _REDUCTION = "jaxddp/training/step.py", "jaxddp/loss.py", "jaxddp/communication/reduction.py"
_FULL, _STAGES, _STAGE3 = "jaxddp/ddp.py", "jaxddp/zero/stages_1_and_2.py", "jaxddp/zero/stage3.py"
_GATHER, _MASTERS = "jaxddp/zero/gather.py", "jaxddp/strategy.py"
_TRAIN = "jaxddp/training/train_test.py::test_"
_OUTSIDERS = "jaxddp/training/outsiders_test.py::test_"
_ZERO = "jaxddp/zero/strategies_test.py::test_"
_ODD_LEAVES = f"{_ZERO}leaves_smaller_than_the_ranks_empty_and_scalar_train_as_on_one_device"
_DTYPES = "jaxddp/training/compute_dtype_test.py::test_"
_RECIPE = f"{_DTYPES}every_strategy_is_the_recipe_on_one_device"
_REPLICAS = f"{_OUTSIDERS}constant_gradients_count_once_under_replicas"
_MOMENTUM = f"{_TRAIN}momentum_and_norms_below_the_limit_are_those_of_one_device"
_KEYS = f"{_TRAIN}keys_differ_by_rank_step_and_microbatch_and_repeat_with_the_seed"
_MICROBATCHES = "jaxddp/parity/trainings_test.py::test_options_of_the_trainer"

MUTANTS = {
    # wrong divisors
    "micro-batches are not counted": Mutant(
        _STEP, "num_parts = ranks.num_ranks * run.num_microbatches", "num_parts = ranks.num_ranks", (_MICROBATCHES,)
    ),
    "a constant gradient is divided once too often": Mutant(
        _FULL, "lambda name, grad: grad * ranks.num_ranks", "lambda name, grad: grad", (f"{_REPLICAS}[flat]",)
    ),
    "a constant gradient of a shard is divided once too often": Mutant(
        _STAGES, "axis_index(ranks.shard_axis)) * ranks.num_ranks", "axis_index(ranks.shard_axis))",
        (f"{_REPLICAS}[zero1]",),
    ),
    "gradients of held shards are sums": Mutant(
        _STAGE3, "{name: divide(grad, divisor) for name", "{name: grad for name", (f"{_REPLICAS}[zero3]",)
    ),
    "no weight at all divides by itself": Mutant(
        _LOSS, "jnp.where(part.weight == 0, 1, part.weight)", "part.weight",
        (f"{_TRAIN}a_batch_of_no_weight_has_loss_zero_and_updates_nothing",),
    ),
    "aux of a part of no weight is 0 / 0": Mutant(
        _LOSS, "Part(jnp.where(loss.weight == 0, 0, wide(leaf) * loss.weight)", "Part((wide(leaf) * loss.weight)",
        (f"{_TRAIN}a_rank_where_nothing_counts_does_not_spoil_aux",),
    ),
    # what is lost or stale
    "buckets after the first are empty": Mutant(
        _REDUCTION, 'totals.append(wire.send(buffer, f"{index} {bucket.tensors[0].name}"))',
        "totals.append(wire.send(jax.tree.map(lambda one: one * (index == 0), buffer), str(index)))",
        ("jaxddp/communication/reduction_test.py::test_means_and_their_squares",),
    ),
    "squares of the last bucket alone": Mutant(
        _REDUCTION, "squares += sum_of_squares(summands)", "squares = sum_of_squares(summands)",
        ("jaxddp/communication/reduction_test.py::test_means_and_their_squares",),
    ),
    "parameters of before the update": Mutant(
        _STAGES, "return like(params, gather(named_leaves(shards))), opt_state", "return params, opt_state",
        (_ODD_LEAVES,),
    ),
    "a micro-batch's gradients replace the ones before": Mutant(
        _STEP, "return (jax.tree.map(jnp.add, total, found), carry), None", "return (found, carry), None",
        (_MICROBATCHES,),
    ),
    "optimizer state of before the update": Mutant(
        _STEP, "merge(trainable, frozen), opt_state, state.key", "merge(trainable, frozen), state.opt_state, state.key",
        (_MOMENTUM,),
    ),
    "copies in the compute dtype are not renewed": Mutant(
        _MASTERS, "lambda new, old: new.astype(old.dtype), masters, params)", "lambda new, old: old, masters, params)",
        (_RECIPE,),
    ),
    # norms
    "gradients below the norm are scaled up": Mutant(
        _STEP, "jnp.minimum(1.0, max_norm / norm)", "max_norm / norm", (_MOMENTUM,)
    ),
    "the norm of one rank's shards": Mutant(
        _STEP, "squares = lax.psum(squares, layout.ranks.shard_axis)", "pass", ("jaxddp/zero/hybrid_test.py",)
    ),
    "the norm leaves out what is not cut": Mutant(
        _STEP, "return jnp.sqrt(squares + full)", "return jnp.sqrt(squares)", (_MOMENTUM,)
    ),
    # dtypes
    "gradients are summed in the compute dtype": Mutant(
        _STEP, "{name: grad.astype(run.layout.grad_dtypes[name]) for", "{name: grad for",
        (f"{_DTYPES}gathers_take_the_compute_dtype_and_sums_that_of_gradients",),
    ),
    "frozen parameters are not cast": Mutant(
        _MASTERS, "leaf.astype(layout.compute_dtype) if jnp", "leaf if jnp", (_RECIPE, _DTYPES.removesuffix("::test_"))
    ),
    "shards are summed in the dtype of the gather": Mutant(
        _GATHER, "grad.astype(one.grad_dtype)", "grad",
        (f"{_DTYPES}gathers_take_the_compute_dtype_and_sums_that_of_gradients", _RECIPE),
    ),
    # keys
    "every micro-batch has one key": Mutant(
        _STEP, "microbatch, jax.random.fold_in(key, index))", "microbatch, key)", (_KEYS,)
    ),
    "every rank has one key": Mutant(
        _STEP, "jax.random.fold_in(jax.random.fold_in(state.key, state.step), lax.axis_index(ranks.axis))",
        "jax.random.fold_in(state.key, state.step)", (_KEYS,),
    ),
    # model state and numbers that are not finite
    "a model state that was infinite before counts": Mutant(
        _STEP, "(jnp.isfinite(old) & ~jnp.isfinite(new)).any()", "(~jnp.isfinite(new)).any()",
        ("jaxddp/training/nonfinite_test.py::test_a_model_state_that_no_longer_is_finite_counts_too",),
    ),
    "a model state that became infinite does not count": Mutant(
        _STEP, "is_finite &= ~jax.tree.reduce(jnp.logical_or, lost, jnp.bool_(False))", "pass",
        ("jaxddp/training/nonfinite_test.py::test_a_model_state_that_no_longer_is_finite_counts_too",),
    ),
    "statistics of no examples count": Mutant(
        _STEP, "partial(jnp.where, parts.loss.weight == 0), model_state", "lambda _, new: new, model_state",
        ("jaxddp/training/model_state_test.py::test_a_micro_batch_without_examples_that_count_leaves_it",),
    ),
    "each rank keeps its own statistics": Mutant(
        _STEP, "totals = sum_over_ranks(jax.tree.map(summand, model_state), ranks, MODEL_STATE_SCOPE)",
        "totals = jax.tree.map(lambda leaf: ranks.num_ranks * summand(leaf), model_state)",
        ("jaxddp/training/model_state_test.py::test_each_rank_normalises_its_examples_and_ranks_average_their_statistics",),
    ),
    # what is held and checked
    "small and large are mistaken": Mutant(
        _STAGE3, "return leaf if is_small else", "return leaf if not is_small else",
        (f"{_ZERO}each_rank_keeps_its_part_and_keeps_it_there",),
    ),
    "a frozen parameter's gradient is scattered": Mutant(
        _GATHER, "one.perturbed and shard.grad_dtype is not None", "one.perturbed",
        (f"{_ZERO}frozen_parameters_are_gathered_and_never_scattered",),
    ),
    "words that changed places have one checksum": Mutant(
        "jaxddp/training/replicas.py", "(2 * lax.iota(jnp.uint32, words.size) + 1)", "1",
        ("jaxddp/training/replicas_test.py::test_the_same_bit_of_several_elements_and_a_change_of_places_are_found",),
    ),
}  # fmt: skip


def run_tests(mutant: Mutant, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a mutant's tests in a copy of the package, until the first that fails.

    Args:
        mutant: The mistake.
        folder: An empty one, for the copy.

    Returns:
        Of pytest: its status is 1 if a test failed, and what it printed.
    """
    source = mutant.source()
    shutil.copytree(ROOT / "jaxddp", folder / "jaxddp", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / mutant.file).write_text(source)
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
