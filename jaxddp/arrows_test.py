"""Imports between folders run one way, none in a circle; the planner and what both packages share need no framework."""

import ast
import functools
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

ROOT = Path(__file__).parents[1]
# What a folder, or a file beside them, may import: its own line and those below.
FLOORS = (
    ("cli", "__main__", "pytest_plugin"),
    ("instruments",),
    ("planning",),
    ("communication", "ddp", "zero", "training", "models", "checkpoint", "strategy", "registry",
     "discovery", "layout", "mesh", "plugins", "tree", "arguments", "loss",
     "flax", "parity", "scopes", "plain", "network", "sizes", "table",
     "processes"),
)  # fmt: skip
FLOOR = {folder: len(FLOORS) - floor for floor, folders in enumerate(FLOORS) for folder in folders}


def modules_of(package):
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if not path.name.endswith("_test.py") and path.name != "conftest.py" and "testdata" not in path.parts:
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def runtime_nodes(tree):
    """All nodes but those that only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node = ast.Module(node.orelse, [])  # noqa: PLW2901
        yield node
        yield from runtime_nodes(node)


def imports_of(path, modules, source=None):
    """The modules that a file imports when it runs, inside functions too."""
    folder = path.relative_to(ROOT).parent.parts
    for node in runtime_nodes(ast.parse(path.read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = folder[: len(folder) - node.level + 1] if node.level else ()
            base = ".".join([*package, *(node.module or "").split(".")]).strip(".")
            names = [name if (name := f"{base}.{alias.name}") in modules else base for alias in node.names]
        else:
            continue
        yield from names


@functools.cache
def graph_of(package):
    modules = modules_of(package)
    return {name: (modules.keys() & imports_of(path, modules)) - {name} for name, path in modules.items()}


def wrong_way(graph):
    def floor(module):
        return FLOOR[module.split(".")[1]]

    edges = [(one, other) for one in graph for other in graph[one] if "jaxddp" not in (one, other)]
    return {(one, other) for one, other in edges if floor(one) < floor(other)}


def test_imports_between_folders_run_one_way():
    assert wrong_way(graph_of("jaxddp")) == set()


@pytest.mark.parametrize("package", ["jaxddp", "torchref", "benchmarks"])
def test_no_modules_import_each_other_in_a_circle(package):
    TopologicalSorter(graph_of(package)).prepare()


def test_what_would_be_found():
    modules = modules_of("jaxddp")
    source = "def late():\n    from ..instruments import targets\nif TYPE_CHECKING:\n    from ..cli import train\n"
    graph = dict(graph_of("jaxddp"))
    step = "jaxddp.training.step"
    graph[step] = graph[step] | (modules.keys() & imports_of(modules[step], modules, source))
    assert wrong_way(graph) == {(step, "jaxddp.instruments.targets")}
    with pytest.raises(CycleError):
        TopologicalSorter(graph).prepare()


SHARED = ["communication.buckets", "sizes", "arguments"]
SHARED += [f"processes.{name}" for name in ("job", "roll_call")]


def test_the_planner_and_what_both_packages_share_import_numpy_and_the_standard_library_alone():
    modules = modules_of("jaxddp")
    planner = {name for name in modules if name.split(".")[1:2] in (["planning"], ["network"])}
    free = planner | {f"jaxddp.{name}" for name in SHARED}
    assert len(planner) > 10
    for name in free:
        for other in imports_of(modules[name], modules):
            package = other.partition(".")[0]
            assert other in free or package == "numpy" or package in sys.stdlib_module_names, f"{name}: {other}"


def test_the_twin_imports_only_what_needs_no_framework():
    modules = modules_of("torchref") | modules_of("jaxddp")
    imported = {name for path in modules_of("torchref").values() for name in imports_of(path, modules)}
    ours = {name for name in imported & modules.keys() if not name.startswith("torchref")}
    cli = {"launch", "parser", "train"}
    core = {"arguments", "communication.buckets", "discovery", "sizes"}
    core |= {"checkpoint.folder", "checkpoint.weights", "training.data"}
    core |= {f"processes.{name}" for name in ("job", "roll_call", "torchrun", "watchdog")}
    assert ours - {"jaxddp", "jaxddp.checkpoint", "jaxddp.training"} == {
        *(f"jaxddp.cli.{name}" for name in cli),
        *(f"jaxddp.{name}" for name in core),
    }
