"""Facts of a machine with GPUs, which is faked: its nvidia-smi and its wheels."""

import os

import pytest

from jaxddp.cli import environment

H100 = "NVIDIA H100 80GB HBM3"


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
    found = environment.gpus()
    assert [gpu.number for gpu in found] == list(range(8))
    assert found[3] == environment.Gpu(3, "GPU-33-aa", H100, "580.65.06", 81559 * 2**20, 80000 * 2**20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-33,5")
    assert [gpu.number for gpu in environment.gpus()] == [1, 3, 5]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.gpus() == []


def test_a_driver_that_does_not_answer_has_no_gpus(nvidia_smi):
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", status=9)
    assert environment.gpus() == []
    nvidia_smi("0, GPU-1, NVIDIA GB10, 580.65.06, [N/A], [N/A]\nNo devices were found")
    assert environment.gpus()[0].memory_bytes == 0


class Wheel:
    def __init__(self, name):
        self.name, self.version = name, "1.0"


def test_libraries_are_those_of_installed_wheels(monkeypatch):
    names = "nvidia_nccl_cu12", "nvidia-cudnn-cu13", "nvidia-cuda-runtime", "nvidia-cufft", "numpy", None
    monkeypatch.setattr(environment, "distributions", lambda: map(Wheel, names))
    found = environment.cuda_libraries()
    assert found == dict.fromkeys(("nvidia-cuda-runtime", "nvidia-cudnn-cu13", "nvidia-nccl-cu12"), "1.0")


def test_variables_are_what_changes_results(monkeypatch):
    changing = {
        "NCCL_ALGO": "Ring", "XLA_FLAGS": "--a", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "0",
        "CUDA_VISIBLE_DEVICES": "0", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    others = {"HOME": "/", "CUDA_HOME": "/usr", "CUDA_VERSION": "12.8", "JAX_COMPILATION_CACHE_DIR": "/tmp", "PATH": ""}
    monkeypatch.setattr(os, "environ", changing | others)
    assert environment.variables() == changing
