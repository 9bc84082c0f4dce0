import ast
import sys
from pathlib import Path

import pytest

FILES = [path for path in Path(__file__).parent.glob("*.py") if not path.name.endswith("_test.py")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_formula_needs_numpy_at_most(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1, f"{path.name} imports from outside jaxddp.planning.cost"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                package = name.partition(".")[0]
                assert package == "numpy" or package in sys.stdlib_module_names, f"{path.name} imports {name}"
