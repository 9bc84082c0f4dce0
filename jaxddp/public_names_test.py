"""The names of the package, and what importing it starts."""

import ast
from pathlib import Path

import pytest

import jaxddp
from jaxddp.conftest import run_python

pytestmark = pytest.mark.smoke


def test_what_is_loaded_is_what_type_checkers_see():
    blocks = [one for one in ast.parse(Path(jaxddp.__file__).read_text()).body if isinstance(one, ast.If)]
    imported: dict = {"__package__": "jaxddp"}
    exec(compile(ast.Module(blocks[0].body, []), "imports", "exec"), imported)
    assert all(getattr(jaxddp, name) is imported[name] for name in jaxddp._MODULES)
    assert all(alias.name == alias.asname for one in blocks[0].body for alias in one.names)


def test_every_name_is_listed_and_there():
    for name in jaxddp._MODULES:
        assert name in dir(jaxddp)
    assert list(jaxddp.STRATEGIES) == ["naive", "flat", "overlapped", "bucketed", "zero1", "zero2", "zero3"]
    with pytest.raises(AttributeError, match=r"^module 'jaxddp' has no attribute 'no_such_name'$"):
        _ = jaxddp.no_such_name


@pytest.mark.parametrize(
    "code",
    [
        "import jaxddp; dir(jaxddp); jaxddp.__version__",
        "import jaxddp; jaxddp.plan_buckets; jaxddp.Network",
        "import jaxddp.planning.plan",
        "import jaxddp.pytest_plugin",
        "import torchref",
        "from jaxddp.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from jaxddp.__main__ import main\ntry: main(['--version'])\nexcept SystemExit: pass",
    ],
)
def test_no_jax_is_imported(code):
    run_python(code + "\nimport sys; assert 'jax' not in sys.modules and 'jaxlib' not in sys.modules")


def test_the_order_of_strategies_is_theirs_whichever_is_loaded_first():
    found = run_python("import jaxddp; jaxddp.zero1; print(*jaxddp.STRATEGIES)")
    assert found.split() == list(jaxddp.STRATEGIES)
