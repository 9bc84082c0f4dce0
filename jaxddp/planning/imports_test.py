"""The planner, and the core's files that both packages share, need no framework: NumPy and the standard library."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
SHARED = {PACKAGE / name for name in ("communication/buckets.py", "sizes.py", "arguments.py")}
SHARED |= {
    PACKAGE / name
    for name in ("communication/owners.py", "processes/job.py", "processes/roll_call.py", "processes/stderr.py")
}
PLANNING = {
    p for folder in ("planning", "network") for p in (PACKAGE / folder).glob("*.py") if not p.name.endswith("_test.py")
}


def sources(path, node):
    """The files that a relative import may read."""
    folder = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
    names = ["__init__", *(alias.name for alias in node.names)]
    return [p for p in (folder.with_suffix(".py"), *(folder / f"{name}.py" for name in names)) if p.exists()]


@pytest.mark.parametrize("path", sorted(SHARED | PLANNING), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_need_no_framework(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            found = sources(path, node)
            assert found and set(found) <= SHARED | PLANNING, f"{path.name} imports {found}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in names:
                package = name.partition(".")[0]
                assert package == "numpy" or package in sys.stdlib_module_names, f"{path.name} imports {name}"
