"""The names of the package, and what importing it starts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchref


def test_names_for_type_checkers_are_those_that_are_loaded():
    tree = ast.parse(Path(torchref.__file__).read_text())
    (block,) = (
        node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    declared = {
        alias.name: "." * node.level + (node.module or "")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared == torchref._MODULES
    for name in torchref._MODULES:
        assert name in dir(torchref) and getattr(torchref, name) is not None
    assert list(torchref.STRATEGIES) == ["naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3"]
    with pytest.raises(AttributeError, match=r"^module 'torchref' has no attribute 'no_such_name'$"):
        _ = torchref.no_such_name


def test_the_order_of_strategies_is_theirs_whichever_is_loaded_first():
    code = "import torchref.zero, torchref.ddp, torchref; print(*torchref.STRATEGIES)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3"]


@pytest.mark.parametrize(
    "code",
    [
        "import torchref; dir(torchref); torchref.plan_buckets",
        "from torchref.__main__ import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_no_torch_is_imported(code):
    code += "\nimport sys; assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
