"""What a command line prints while JAX is imported and started, in processes of their own."""

from jaxddp.plugins_test import run


def test_without_accelerators_nothing_is_printed():
    code = (
        "import os; os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'] = '1'\n"
        "from jaxddp.cli.quiet import import_jax; import_jax()\n"
        "from jaxddp import plugins; plugins._DEVICE_FILES = ()\n"
        "import jaxddp; print(jaxddp.data_mesh().size)"
    )
    found = run(code)
    assert (found.stdout, found.stderr) == ("1\n", "")


def test_a_closed_standard_error_is_no_obstacle():
    code = "import os; os.close(2)\nfrom jaxddp.cli.quiet import import_jax; import_jax(); print(1)"
    assert run(code, JAX_PLATFORMS="cpu").stdout == "1\n"
