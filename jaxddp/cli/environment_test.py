"""Facts of a machine with GPUs, which is faked: its nvidia-smi, its driver's file, a library that is loaded."""

import ctypes
import shutil
import subprocess

import pytest

from jaxddp.cli import environment

GIB = 2**30
H100 = "NVIDIA H100 80GB HBM3"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of that name first into PATH, which prints what it is given."""

    def install(rows="", status=0):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{rows}\nEND\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "none")
    return install


def test_gpus_are_the_drivers_that_are_visible(nvidia_smi, monkeypatch):
    nvidia_smi("\n".join(f"{index}, GPU-{index}{index}-aa, {H100}, 81559, 80000" for index in range(8)))
    found = environment.gpus()
    assert [gpu.number for gpu in found] == list(range(8))
    assert found[3] == environment.Gpu(3, "GPU-33-aa", H100, 81559 * 2**20, 80000 * 2**20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-33,5")
    assert [gpu.number for gpu in environment.gpus()] == [1, 3, 5]
    monkeypatch.setattr(environment, "variables", lambda: {})
    monkeypatch.setattr(environment, "driver_version", lambda: "580.65")
    assert environment.facts() == {"driver": "580.65", "gpus": [H100] * 3}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.gpus() == []


def test_a_driver_that_does_not_answer_has_no_gpus(nvidia_smi):
    nvidia_smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", status=9)
    assert environment.gpus() == [] and environment.driver_version() is None
    nvidia_smi("0, GPU-1, NVIDIA GB10, [N/A], [N/A]\nNo devices were found")
    assert environment.gpus()[0].memory_bytes == 0


@pytest.mark.parametrize(("text", "version"), [(OPEN, "580.65.06"), (CLOSED, "535.104.05")])
def test_the_drivers_version_is_that_of_its_module(text, version, tmp_path, monkeypatch, nvidia_smi):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "version")
    assert environment.driver_version() == version
    monkeypatch.setattr(environment, "_DRIVER", tmp_path / "none")
    nvidia_smi(f"{version}\n{version}")
    assert environment.driver_version() == version


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, to build the libraries that are read")
@pytest.mark.parametrize(
    ("library", "code", "version"),
    [
        ("nccl", "int ncclGetVersion(int *v) { *v = 22907; return 0; }", {"nccl": "2.29.7"}),
        ("cudnn", "#include <stddef.h>\nsize_t cudnnGetVersion(void) { return 92000; }", {"cudnn": "9.20.0"}),
        ("nccl", "int other;", {}),
    ],
)
def test_versions_are_those_of_loaded_libraries(library, code, version, tmp_path):
    built = tmp_path / f"lib{library}.so.2"
    (tmp_path / "code.c").write_text(code)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(built), str(tmp_path / "code.c")], check=True)
    before = environment.cuda_libraries()
    if library in before:  # as torch does
        pytest.skip(f"needs a process that has loaded no {library}")
    loaded = ctypes.CDLL(str(built))
    assert environment.cuda_libraries() == before | version
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(loaded._handle))


class Wheel:
    def __init__(self, name, *files):
        self.name, self.version, self.files = name, "1.0", [environment.Path(file) for file in files] or None


def test_wheels_that_own_one_library_are_found(monkeypatch):
    nccl, tables = "nvidia/nccl/lib/libnccl.so.2", "nvidia/__init__.py"
    wheels = [Wheel("nvidia_nccl_cu12", nccl, tables), Wheel("nvidia-nccl-cu13", nccl, tables), Wheel("numpy", nccl)]
    wheels += [Wheel("nvidia-cudnn-cu13", tables)]
    monkeypatch.setattr(environment, "distributions", lambda: wheels)
    assert environment.shared_libraries() == {("nvidia-nccl-cu12", "nvidia-nccl-cu13"): nccl}


def test_variables_are_what_changes_results():
    changing = {
        "NCCL_ALGO": "Ring", "XLA_FLAGS": "--a", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "0",
        "CUDA_VISIBLE_DEVICES": "0", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1", "JAX_PLATFORMS": "cpu",
    }  # fmt: skip
    others = {"HOME": "/", "CUDA_HOME": "/usr", "CUDA_VERSION": "12.8", "JAX_COMPILATION_CACHE_DIR": "/tmp", "PATH": ""}
    assert environment.variables(changing | others) == changing
