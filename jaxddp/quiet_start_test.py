"""What is printed when JAX is imported and started, in processes of their own."""

import os
import subprocess
import sys

import pytest

# A machine without accelerators, whatever this one has.
WITHOUT_DEVICES = "from jaxddp import quiet_start\nquiet_start._DEVICE_FILES = ()\n"


def run(code, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "TPU_"))}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=clean | environment, check=True)


@pytest.mark.parametrize("environment", [{}, {"JAX_PLATFORMS": "cpu"}, {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}])
def test_without_accelerators_nothing_is_printed_and_the_cpu_is_used(environment):
    code = WITHOUT_DEVICES + "import jaxddp, jax; print(jaxddp.data_mesh().size, jax.config.jax_platforms)"
    found = run(code, **environment)
    assert (found.stdout, found.stderr) == ("1 cpu\n", "")


def test_platforms_that_were_asked_for_stay():
    code = WITHOUT_DEVICES + (
        "import jax\n"
        "jax.config.update('jax_platforms', 'tpu')\n"
        "try: quiet_start.devices()\n"
        "except RuntimeError as error: print(jax.config.jax_platforms, 'tpu' in str(error))"
    )
    assert run(code, TPU_SKIP_MDS_QUERY="1").stdout == "tpu True\n"


def test_device_files_and_unknown_plugins_leave_the_choice_to_jax():
    start = "import jax; quiet_start.devices(); print(jax.config.jax_platforms)"
    platforms = {"JAX_CUDA_VISIBLE_DEVICES": "0", "TPU_SKIP_MDS_QUERY": "1"}
    with_file = "from jaxddp import quiet_start\nquiet_start._DEVICE_FILES = ('/dev/null',)\n"
    assert run(with_file + start, **platforms).stdout == "None\n"
    with_plugin = WITHOUT_DEVICES + "quiet_start._plugins = lambda: ['xla_other']\n"
    assert run(with_plugin + start, **platforms).stdout == "None\n"


def test_what_others_print_meanwhile_stays():
    code = WITHOUT_DEVICES + (
        "import os\n"
        "quiet_start._cuda_plugins = lambda: ['xla_cuda12']\n"
        "with quiet_start._without_plugin_lines():\n"
        "    os.write(2, b'I0000 cudart_stub.cc:31] Could not find cuda drivers\\nsomething else\\n')\n"
    )
    assert run(code).stderr == "something else\n"


def test_a_closed_standard_error_is_no_obstacle():
    code = "import os; os.close(2)\nimport jaxddp; print(jaxddp.data_mesh().size)"
    assert run(code, JAX_PLATFORMS="cpu").stdout == "1\n"


def test_of_two_plugins_for_cuda_the_newer_counts():
    code = (
        "from jaxddp import quiet_start\n"
        "print(quiet_start.superseded_plugins())\n"
        "quiet_start._plugins = lambda: ['xla_cuda13', 'other', 'xla_cuda12']\n"
        "print(quiet_start.superseded_plugins())\n"
    )
    assert run(code).stdout.splitlines()[1] == "['xla_cuda12']"
