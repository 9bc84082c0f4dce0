"""The planner needs no framework: standard library, NumPy and nothing above it."""

import ast
import sys
from pathlib import Path

import pytest

PLANNING = Path(__file__).parent
FILES = sorted(p for p in PLANNING.rglob("*.py") if not p.name.endswith("_test.py") and "testdata" not in p.parts)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PLANNING)))
def test_imports_stay_inside(path):
    depth = len(path.relative_to(PLANNING).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level <= depth, f"{path.name} imports from outside jaxddp.planning"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                package = name.partition(".")[0]
                assert package == "numpy" or package in sys.stdlib_module_names, f"{path.name} imports {name}"
