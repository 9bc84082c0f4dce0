"""Every documented install resolves to one CUDA: no two wheels own one file, and JAX has one CUDA plugin."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
DOCUMENTED = sorted({found for page in PAGES for found in re.findall(r"\.\[([a-z0-9,-]+)\]", page.read_text())})
TIMEOUT_S = 900
# What the index offers, without local folders of wheels, which may hold a torch for CPUs.
LOCAL = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
ENVIRONMENT = {name: os.environ[name] for name in os.environ if name not in LOCAL} | {"PIP_CONFIG_FILE": os.devnull}


def run_pip(*arguments, timeout_s=TIMEOUT_S, **environment):
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments], cwd=ROOT, env=ENVIRONMENT | environment,
        capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip


@pytest.fixture(scope="module")
def new_pip(tmp_path_factory):
    """A folder with a pip of today: older ones download gigabytes of wheels in a dry run."""
    folder = str(tmp_path_factory.mktemp("pip"))
    try:
        error = run_pip("install", "--quiet", "--target", folder, "pip>=25", timeout_s=120).stderr
    except subprocess.TimeoutExpired:
        error = "no answer"
    if not Path(folder, "pip").is_dir():
        pytest.skip(f"pip reaches no package index: {(error.splitlines() or [''])[0]}")
    return folder


def resolve(folder, new_pip, requirement):
    """Names and versions of what pip would install into an empty environment, from the metadata of wheels alone."""
    report = folder / "report.json"
    options = ["--dry-run", "--ignore-installed", "--quiet", "--use-feature=fast-deps", "--report", str(report)]
    done = run_pip("install", *options, requirement, PYTHONPATH=new_pip)
    assert done.returncode == 0, done.stderr
    installed = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"] for one in installed}


def clashes(names):
    """Wheels that cannot be installed beside each other, sorted.

    NVIDIA's wheels of one library put their files into one folder whatever CUDA they are for: ``nvidia-nccl-cu12`` and
    ``nvidia-nccl-cu13`` both own ``nvidia/nccl/lib/libnccl.so.2``.
    """
    owners = defaultdict(list)
    for name in sorted(names):
        if name.startswith("nvidia-"):
            owners[re.sub(r"-cu\d+$", "", name)].append(name)
        if re.fullmatch(r"jax-cuda\d+-plugin", name):
            owners["jax-plugin"].append(name)
    return [those for those in owners.values() if len(those) > 1]


def cuda_majors(names):
    """CUDA's versions by who brings it: JAX's plugin, and the NCCL that torch names."""
    found = {"jax": r"jax-cuda(\d+)-plugin", "nccl": r"nvidia-nccl-cu(\d+)"}
    return {who: {match[1] for name in names if (match := re.fullmatch(of, name))} for who, of in found.items()}


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the wheels for GPUs are for Linux")
@pytest.mark.parametrize("extras", DOCUMENTED)
def test_documented_combinations_fit_together(extras, new_pip, tmp_path):
    found = resolve(tmp_path, new_pip, f".[{extras}]")
    assert clashes(found) == []
    for cuda in re.findall(r"cuda(\d+)", extras):
        assert cuda_majors(found) == {"jax": {cuda}, "nccl": {cuda}}
        assert "torch" in found
    assert "jax" in found


def test_combinations_for_gpus_are_documented():
    assert {"torch", "test", "cuda12", "cuda13", "cuda12,test-gpu", "cuda13,test-gpu"} <= set(DOCUMENTED)


def test_what_cannot_be_installed_together_is_found():
    # jax[cuda12] beside torch 2.13, and a plugin for CUDA 12 beside jax[cuda13].
    nccl = ["nvidia-nccl-cu12", "nvidia-nccl-cu13"]
    assert clashes([*nccl, "nvidia-cublas", "nvidia-cudnn-cu13", "torch"]) == [nccl]
    plugins = ["jax-cuda12-plugin", "jax-cuda13-plugin"]
    assert clashes([*plugins, "jax-cuda12-pjrt", "nvidia-nccl-cu13"]) == [plugins]
    assert clashes(["nvidia-nccl-cu12", "nvidia-cudnn-cu12", "jax-cuda12-plugin", "jax-cuda12-pjrt"]) == []
    assert cuda_majors([*nccl, plugins[0]]) == {"jax": {"12"}, "nccl": {"12", "13"}}
