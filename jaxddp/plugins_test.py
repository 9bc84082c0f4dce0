"""What is printed when JAX is imported and started, and on which platform, in processes of their own."""

import os
import subprocess
import sys

# A machine without accelerators, whatever this one has.
WITHOUT_DEVICES = "from jaxddp import plugins\nplugins._DEVICE_FILES = ()\n"


def run(code, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "TPU_"))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean | environment, check=True)


def test_without_accelerators_the_mesh_is_on_the_cpu():
    found = run(WITHOUT_DEVICES + "import jaxddp, jax; print(jaxddp.data_mesh().size, jax.config.jax_platforms)")
    assert found.stdout == "1 cpu\n" and "Traceback" not in found.stderr


def test_neither_the_import_nor_a_mesh_touches_file_descriptors():
    code = (
        "import os\n"
        "def refuse(*args): raise AssertionError(args)\n"
        "os.dup = os.dup2 = os.close = refuse\n"
        "import jaxddp; jaxddp.data_mesh()"
    )
    run(code, JAX_PLATFORMS="cpu")


def test_platforms_that_were_asked_for_stay():
    code = WITHOUT_DEVICES + (
        "import jax\ntry: plugins.devices()\nexcept ValueError as error: print(jax.config.jax_platforms, error)"
    )
    for name in ("tpu", "cuda"):
        found = run(code, JAX_PLATFORMS=name, TPU_SKIP_MDS_QUERY="1", CUDA_VISIBLE_DEVICES="").stdout
        assert found.startswith(f"{name} JAX_PLATFORMS (={name}) must name platforms ") and found.count("\n") == 1


def test_device_files_and_unknown_plugins_leave_the_choice_to_jax():
    start = "import jax; jax.devices = list; plugins.devices(); print(jax.config.jax_platforms)"
    with_file = "from jaxddp import plugins\nplugins._DEVICE_FILES = ('/dev/null',)\n"
    assert run(with_file + start).stdout == "None\n"
    with_plugin = WITHOUT_DEVICES + "plugins._plugins = lambda: ['xla_other']\n"
    assert run(with_plugin + start).stdout == "None\n"


def test_a_command_without_accelerators_prints_nothing_is_printed():
    code = (
        "import os; os.environ['JAX_SKIP_CUDA_CONSTRAINTS_CHECK'] = '1'\n"
        "from jaxddp import plugins; plugins.import_jax()\n"
        "plugins._DEVICE_FILES = ()\n"
        "import jaxddp; print(jaxddp.data_mesh().size)"
    )
    found = run(code)
    assert (found.stdout, found.stderr) == ("1\n", "")


def test_a_closed_standard_error_is_no_obstacle():
    code = "import os; os.close(2)\nfrom jaxddp.plugins import import_jax; import_jax(); print(1)"
    assert run(code, JAX_PLATFORMS="cpu").stdout == "1\n"
