"""The two packages read alike: same files, same public names in the same order, one strategy a file."""

import ast
from pathlib import Path

import pytest

import jaxddp
import torchref

TWINS = (
    "plain",
    "communication/buckets",
    "communication/collectives",
    "communication/compression",
    "communication/low_rank",
    "communication/ring",
    "communication/sharding",
    "models/toy",
    "models/transformer",
    "models/functional",
)
# What one side's arrays need and the other's do not.
ONLY_IN_ONE = {
    "plain": {"layer"},
    "communication/collectives": {"Issued", "record"},
    "communication/buckets": {"MIB"},
    "communication/compression": {"make_compression"},
    "communication/low_rank": {"apply_residual", "merge_memory", "split_memory"},
    "communication/sharding": {"Cut"},
}


def public_names(package, file):
    """Functions and classes that a file defines, in order; first those that it takes over from another."""
    tree = ast.parse((Path(package.__file__).parent / f"{file}.py").read_text())
    imports = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    taken_over = [alias.name for alias in imports if alias.asname == alias.name]
    defined = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return list(dict.fromkeys(name for name in [*taken_over, *defined] if not name.startswith("_")))


@pytest.mark.parametrize("file", TWINS)
def test_twins_have_the_same_public_names_in_the_same_order(file):
    ours, theirs = (
        [name for name in public_names(package, file) if name not in ONLY_IN_ONE.get(file, ())]
        for package in (jaxddp, torchref)
    )
    assert ours == theirs
    assert ours


FILES = {name: f"ddp/{name}" for name in ("naive", "flat", "overlapped", "bucketed")} | {
    f"zero{stage}": f"zero/stage{stage}" for stage in (1, 2, 3)
}


def test_each_strategys_file_holds_one_strategy_in_either_package():
    assert list(jaxddp.STRATEGIES) == list(torchref.STRATEGIES) == list(FILES)
    for name, file in FILES.items():
        strategies = [public for public in public_names(jaxddp, file) if public in jaxddp.STRATEGIES]
        assert strategies == [name]
        (twin,) = public_names(torchref, file)
        assert torchref.STRATEGIES[name].__name__ == twin
    for package in (jaxddp, torchref):
        folder = Path(package.__file__).parent
        files = {path.stem for path in folder.glob("ddp/*.py") if not path.stem.endswith("_test")} - {"__init__"}
        assert {f"ddp/{file}" for file in files} == {file for file in FILES.values() if file.startswith("ddp")}


def test_neither_package_imports_the_other():
    for package, other in ((jaxddp, "torch"), (torchref, "jax")):
        for path in Path(package.__file__).parent.rglob("*.py"):
            if path.name.endswith("_test.py") or path.name == "conftest.py":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                assert not [name for name in names if name.split(".")[0].startswith(other)], path
