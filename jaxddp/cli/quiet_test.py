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


def test_what_others_print_meanwhile_stays():
    code = (
        "import os\n"
        "from jaxddp.cli import quiet\n"
        "with quiet._without_plugin_lines():\n"
        "    os.write(2, b'I0000 cudart_stub.cc:31] Could not find cuda drivers\\nsomething else\\n')\n"
    )
    assert run(code).stderr == "something else\n"


def test_a_closed_standard_error_is_no_obstacle():
    code = "import os; os.close(2)\nfrom jaxddp.cli.quiet import import_jax; import_jax(); print(1)"
    assert run(code, JAX_PLATFORMS="cpu").stdout == "1\n"
