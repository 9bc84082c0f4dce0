"""The two packages read alike: the same files with the same public names in order, each strategy in the same one."""

import ast
from pathlib import Path

import pytest

import jaxddp
import torchref
from jaxddp.conftest import run_python

TWINS = (
    "plain",
    "communication/collectives",
    "communication/hooks",
    "communication/ring",
    "models/toy_test",
    "models/transformer",
)
# What only one framework needs.
ONLY_IN_ONE = {
    "plain": {"layer"},
    "models/transformer": {"abstract", "loss_fn"},
    "models/toy_test": {"abstract", "loss_fn", "test_abstract_is_build_without_values"},
    "communication/collectives": {
        *("Issued", "Pending", "record", "silent", "is_silent"),
        *("traced_platform", "varying", "as_varying"),
        *("joins_arrays", "kind_of", "all_to_all"),  # what XLA joins, and does instead of Gloo
    },
    "communication/hooks": {"all_reduce"},
}


def public_names(package, file):
    tree = ast.parse((Path(package.__file__).parent / f"{file}.py").read_text())
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return list(dict.fromkeys(name for name in defined if not name.startswith("_")))  # overloads define a name twice


@pytest.mark.parametrize("file", TWINS)
def test_twins_have_the_same_public_names_in_the_same_order(file):
    ours, theirs = (
        [name for name in public_names(package, file) if name not in ONLY_IN_ONE.get(file, ())]
        for package in (jaxddp, torchref)
    )
    assert ours == theirs
    assert ours


# Files of one package alone: what has no framework, and what a trace tells of a program.
ONLY_FILES = {
    "communication": {"buckets", "planned", "traces"},
    "zero": {"elementwise", "optimizers"},  # a trace shows which optimizers are element-wise; torch's are listed
}


@pytest.mark.parametrize("folder", ["communication", "zero", "models"])
def test_folders_of_strategies_hold_the_same_files(folder):
    ours, theirs = (
        {path.stem for path in Path(package.__file__).parent.glob(f"{folder}/*.py") if "_test" not in path.stem}
        for package in (jaxddp, torchref)
    )
    assert ours ^ theirs == ONLY_FILES.get(folder, set())


FILES = {name: "ddp" for name in ("naive", "flat", "overlapped", "bucketed")} | {
    "zero1": "zero/stages_1_and_2",
    "zero2": "zero/stages_1_and_2",
    "zero3": "zero/stage3",
}


def test_each_strategy_has_its_file_in_both_packages():
    assert list(jaxddp.STRATEGIES) == list(torchref.STRATEGIES) == list(FILES)
    for name, file in FILES.items():
        assert name in public_names(jaxddp, file)
        assert torchref.STRATEGIES[name].__name__ in public_names(torchref, file)


RANK = """
import sys

import torch
import torch.distributed as dist
from torch import nn

import torchref
import torchref.launch
from torchref.registry import make_training


def foreign_modules():
    return {name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "jaxddp", "optax", "flax")}


at_first = foreign_modules()
assert {name.partition(".")[0] for name in at_first} == {"jaxddp"}, at_first  # see arrows_test
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for name in torchref.STRATEGIES:
    net, optimizer = make_training(name, nn.Linear(3, 2), torch.optim.SGD, {}, lr=0.1)
    torchref.Trainer(lambda net, batch: net(batch["x"]).mean(), optimizer, net).step({"x": torch.ones(4, 3)})
assert foreign_modules() == at_first
import torchref.cli.train_program

assert "jax" not in sys.modules
"""


def test_ranks_of_torch_import_jaxddps_planner_and_no_jax():
    run_python(RANK)


def test_jaxddp_imports_no_torch():
    code = """
import pkgutil, sys, jaxddp
for module in pkgutil.walk_packages(jaxddp.__path__, "jaxddp."):
    if not module.name.endswith(("_test", "conftest", "__main__")):
        __import__(module.name)
assert "torch" not in sys.modules and "torchref" not in sys.modules
"""
    run_python(code)
