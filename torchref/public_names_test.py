"""The names of the package, and what importing it starts."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchref


def test_names_for_type_checkers_are_those_that_are_loaded():
    tree = ast.parse(Path(torchref.__file__).read_text())
    (block,) = (one for one in tree.body if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING")
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


CODE = """
import sys
from torchref.__main__ import main
import torchref
dir(torchref), torchref.plan_buckets
try:
    main(["train", "--help"])
except SystemExit:
    pass
assert "torch" not in sys.modules
import torchref.zero, torchref.ddp
print(*torchref.STRATEGIES)
"""


def test_importing_and_help_start_no_torch_and_the_order_of_strategies_is_theirs_whichever_is_loaded_first():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    last = run.stdout.splitlines()[-1]
    assert last.split() == ["naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3"]
