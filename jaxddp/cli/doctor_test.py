"""The doctor's report, of this machine and of faked ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxddp.cli import doctor
from jaxddp.cli.doctor import FAIL, NOTE, OK

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"
JAX, TORCH = (0, f"0.10.2 on 8 x {H100}"), (0, f"2.13.0 on 8 x {H100}")


@pytest.fixture
def machine(monkeypatch):
    """Fakes a machine of 8 GPUs on which all is well, apart from what is changed."""
    for name in doctor.variables():
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)

    def report(*, num_gpus=8, name=H100, free=80, plugins=("xla_cuda13",), libraries=None, jax=JAX, torch=TORCH):
        gpus = [doctor.Gpu(i, f"GPU-{i}", name, "580.65.06", 80 * GIB, free * GIB) for i in range(num_gpus)]
        fakes = {"gpus": lambda: gpus, "cuda_libraries": lambda: libraries or {}, "num_cores": lambda: 16}
        for function, fake in fakes.items():
            monkeypatch.setattr(doctor, function, fake)
        monkeypatch.setattr(doctor, "cuda_plugins", lambda: plugins)
        monkeypatch.setattr(doctor, "ask", {"JAX": jax, "torch": torch}.get)
        monkeypatch.setattr(os, "cpu_count", lambda: 208)
        monkeypatch.setattr(doctor, "_DRIVER", Path(__file__))  # is there
        return list(doctor.examine())

    return report


def wrong(lines):
    return [line for line in lines if line[0] != OK]


def test_a_machine_on_which_all_is_well(machine):
    lines = machine(libraries={"nvidia-nccl-cu13": "2.29.7"})
    assert wrong(lines) == []
    said = {subject: found for _, subject, found in lines}
    assert said["GPUs"] == f"8 x {H100}, driver 580.65.06"
    assert said["jaxddp"].endswith(" 16 of 208 cores for this process")
    assert said["JAX"] == f"0.10.2 on 8 x {H100}"
    assert said["torch"] == f"2.13.0 on 8 x {H100}"
    assert said["libraries"] == "nvidia-nccl-cu13 2.29.7"


CPU = 0, "0.10.2 on 1 x cpu"
NCCLS = {"nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.29.7"}


@pytest.mark.parametrize(
    ("changed", "variables", "status", "subject", "advice"),
    [
        ({"jax": CPU}, {}, FAIL, "JAX", "it finds none of 8 GPUs: install .[cuda12] or, with a driver from 580 on, "),
        ({"torch": (1, "No module named 'torch'")}, {}, NOTE, "torch", "torchref needs it: install .[torch]"),
        ({"jax": (1, "CUDA_ERROR_DEVICE_UNAVAILABLE")}, {}, FAIL, "JAX", "JAX must start here: reinstall it, or "),
        ({"libraries": NCCLS}, {}, FAIL, "libraries", "install .[cuda12] or .[cuda13] anew"),
        ({"plugins": ("xla_cuda12", "xla_cuda13")}, {}, FAIL, "libraries", "which one JAX starts is chance: beside "),
        ({"num_gpus": 1, "free": 8}, {}, NOTE, "memory", "other processes hold the rest: nvidia-smi names them"),
        ({"num_gpus": 0}, {}, FAIL, "GPUs", "nvidia-smi must list them: is it installed, and does it run?"),
        ({}, {"RANK": "0"}, FAIL, "job", "WORLD_SIZE (='') must be a number, as other variables of a job"),
        ({}, {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, NOTE, "variable", "torch multiplies float32 in TF32 whatever "),
        ({}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, NOTE, "variable", "communication starts only after the computation"),
    ],
)
def test_what_is_wrong_has_a_line_with_what_to_do(changed, variables, status, subject, advice, machine, monkeypatch):
    for name, value in ({"CUDA_DEVICE_MAX_CONNECTIONS": "8"} | variables).items():  # of 8 nothing is said
        monkeypatch.setenv(name, value)
    ((found, where, what),) = wrong(machine(**changed))
    assert (found, where) == (status, subject) and advice in what


@pytest.mark.smoke
def test_this_machine_is_reported_by_processes_that_end():
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "NCCL_DEBUG": "WARN"}
    command = [sys.executable, "-m", "jaxddp", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    lines = done.stdout.splitlines()
    assert done.returncode == int(any(line.startswith(FAIL) for line in lines))
    assert any(line.startswith("ok    JAX ") and line.endswith(" x cpu") for line in lines)
    assert "ok    variable    NCCL_DEBUG=WARN" in lines


def test_counting_gpus_takes_no_memory(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setitem(doctor._ASK, "JAX", "import os; print(os.environ['XLA_PYTHON_CLIENT_PREALLOCATE'])")
    assert doctor.ask("JAX") == (0, "false")


def test_a_framework_that_ends_with_an_error_is_quoted(monkeypatch):
    monkeypatch.setitem(doctor._ASK, "JAX", "import sys; sys.exit('RuntimeError: no driver')")
    assert doctor.ask("JAX") == (1, "RuntimeError: no driver")
    monkeypatch.setitem(doctor._ASK, "JAX", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "_TIMEOUT_S", 0.5)
    assert doctor.ask("JAX") == (1, "gives no answer within 0 s")


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of that name first into PATH, which prints what it is given."""

    def install(rows="", status=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{rows}\nEND\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return install


def test_gpus_are_the_drivers_that_are_visible(nvidia_smi, monkeypatch):
    nvidia_smi("\n".join(f"{index}, GPU-{index}{index}-aa, {H100}, 580.65.06, 81559, 80000" for index in range(8)))
    found = doctor.gpus()
    assert [gpu.number for gpu in found] == list(range(8))
    assert found[3] == doctor.Gpu(3, "GPU-33-aa", H100, "580.65.06", 81559 * 2**20, 80000 * 2**20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-33,5")
    assert [gpu.number for gpu in doctor.gpus()] == [1, 3, 5]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.gpus() == []


def test_a_driver_that_does_not_answer_has_no_gpus(nvidia_smi):
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", status=9)
    assert doctor.gpus() == []
    nvidia_smi("0, GPU-1, NVIDIA GB10, 580.65.06, [N/A], [N/A]\nNo devices were found")
    assert doctor.gpus()[0].memory_bytes == 0


class Wheel:
    def __init__(self, name):
        self.name, self.version = name, "1.0"


def test_libraries_are_those_of_installed_wheels(monkeypatch):
    names = "nvidia_nccl_cu12", "nvidia-cudnn-cu13", "nvidia-cuda-runtime", "nvidia-cufft", "numpy", None
    monkeypatch.setattr(doctor, "distributions", lambda: map(Wheel, names))
    found = doctor.cuda_libraries()
    assert found == dict.fromkeys(("nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-nccl-cu12"), "1.0")


def test_variables_are_what_changes_results(monkeypatch):
    changing = {
        "NCCL_ALGO": "Ring", "XLA_FLAGS": "--a", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "0",
        "CUDA_VISIBLE_DEVICES": "0", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    others = {"HOME": "/", "CUDA_HOME": "/usr", "CUDA_VERSION": "12.8", "JAX_COMPILATION_CACHE_DIR": "/tmp", "PATH": ""}
    monkeypatch.setattr(os, "environ", changing | others)
    assert doctor.variables() == changing
