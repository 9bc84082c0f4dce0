"""Real compilations for targets in child processes, and how they fail."""

import os
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax._src import xla_bridge
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxddp import gradient_collectives, targets
from jaxddp.comparison_test import refusal
from jaxddp.conftest import is_alive, wait_for
from jaxddp.instruments.targets import TargetProgram, target_of
from jaxddp.mesh import data_mesh, platform_of
from jaxddp.planning.chips import target

SPECS = ("h100:2x8", "v5p:8")
OTHERS = ("a100:4", "h200:8", "b200:8")


def start(spec, function=None, args=None, **options):
    def step(state, x):
        def loss(w):
            return jnp.mean(jnp.tanh(x @ w + jax.random.normal(state["key"], (64,))) ** 2)

        with jax.named_scope("my_scope"):
            update = jnp.sin(jax.grad(loss)(state["w"]))
        return {"w": state["w"] - update, "key": jax.random.fold_in(state["key"], 1)}

    mesh = targets.mesh(spec)
    replicated, by_rank = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    if function is None:
        state = {"w": jnp.ones((32, 64)), "key": jax.random.key(0)}
        args = (state, jax.ShapeDtypeStruct((16 * mesh.size, 32), jnp.float32))
        options |= {"in_shardings": (replicated, by_rank), "out_shardings": replicated, "donate_argnums": (0,)}
    else:
        options |= {"in_shardings": by_rank}
    return targets.start_compile_for_target(function or step, args, **options)


@pytest.fixture(scope="module")
def programs():
    backends = set(jax.extend.backend.backends())  # starts JAX, which registers plugins by itself
    environment, factories = dict(os.environ), set(xla_bridge._backend_factories)
    pending = {spec: start(spec) for spec in SPECS}
    found = {spec: compilation.result() for spec, compilation in pending.items()}
    assert dict(os.environ) == environment
    assert set(xla_bridge._backend_factories) == factories
    assert set(jax.extend.backend.backends()) == backends
    return found


@pytest.mark.parametrize("spec", [*SPECS, *(pytest.param(spec, marks=pytest.mark.full) for spec in OTHERS)])
def test_a_program_for_devices_that_are_not_here_is_all_there(programs, spec):
    program = programs.get(spec) or start(spec).result()
    assert isinstance(program, TargetProgram) and program.target.spec == spec
    assert f"num_partitions={program.target.num_devices}" in program.as_text().split("\n", 1)[0]
    assert gradient_collectives(program) == [("all-reduce", 4 * 32 * 64)]
    memory = program.memory_analysis()
    weight_bytes, rows_bytes, key_bytes = 4 * 32 * 64, 4 * 16 * 32, 8
    arguments_bytes = weight_bytes + rows_bytes + key_bytes
    if program.target.platform == "gpu":
        assert memory.argument_size_in_bytes == arguments_bytes
    else:  # tiles of 8 x 128 numbers are filled up
        assert memory.argument_size_in_bytes > arguments_bytes
    assert memory.alias_size_in_bytes >= weight_bytes  # the state was donated
    assert memory.temp_size_in_bytes > 0 and memory.peak_memory_in_bytes > 0


def test_flags_of_the_process_and_options_of_the_program_arrive(monkeypatch):
    jax.devices()  # this process has read its flags, or it would end by the wrong one
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    with pytest.raises(ValueError, match=r"^the process that compiles for 'h100:2' ended with code -?\d+: ") as raised:
        start("h100:2").result()
    assert "xla_no_such_flag" in str(raised.value.__cause__) and "\n" not in str(raised.value)
    monkeypatch.delenv("XLA_FLAGS")
    with pytest.raises(ValueError, match=r"^compiling for 'h100:2' failed: .*xla_no_such_option"):
        start("h100:2", compiler_options={"xla_no_such_option": 1}).result()


def test_double_precision_stays_double():
    with jax.enable_x64(True):
        program = start("h100:2", lambda x: jnp.sum(x * 2), (jax.ShapeDtypeStruct((8,), jnp.float64),)).result()
    assert "f64[4]" in program.as_text()  # this rank's half of them


def test_a_model_too_large_for_a_tpu_is_refused_in_the_compilers_words():
    huge = jax.ShapeDtypeStruct((120_000_000_000,), jnp.float32)
    with pytest.raises(ValueError, match=r"^compiling for 'v5p:4' failed: .*RESOURCE_EXHAUSTED.*\d+\.\d+G.*95\.\d+G"):
        start("v5p:4", lambda x: x + 1, (huge,)).result()


def test_a_child_that_is_killed_or_too_slow(monkeypatch, tmp_path):
    kills_itself = tmp_path / "script.py"
    kills_itself.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    monkeypatch.setattr(targets, "_SCRIPT", kills_itself)
    with pytest.raises(ValueError, match=r"^the process that compiles for 'h100:2' ended with code -9$"):
        start("h100:2").result()
    monkeypatch.undo()
    monkeypatch.setattr(targets, "TIMEOUT_S", 0.01)
    with pytest.raises(ValueError, match=r"^compiling for 'h100:2' took longer than 0.01 s$"):
        start("h100:2").result()


ORPHAN = """
import os, pathlib, signal, jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxddp import targets
from jaxddp.instruments.targets import start_compile_for_target

sharding = NamedSharding(targets.mesh("h100:2"), PartitionSpec("data"))
args = (jax.ShapeDtypeStruct((8,), jnp.float32),)
pending = start_compile_for_target(jnp.sum, args, in_shardings=sharding)
children = []
while not children:
    tasks = pathlib.Path("/proc/self/task").glob("*/children")
    children = [pid for path in tasks for pid in path.read_text().split()]
print(children[0], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_child_outlives_its_parent():
    found = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60)
    assert found.returncode == -signal.SIGKILL, found.stderr
    wait_for(lambda: not is_alive(int(found.stdout)))


@pytest.mark.parametrize("spec", ["h100:8", "v5p:8"])
def test_a_missing_compiler_names_the_extra(monkeypatch, spec):
    targets.check_installed(targets.target(spec))
    find_spec = targets.find_spec
    monkeypatch.setattr(targets, "find_spec", lambda name: None if name == "libtpu" else find_spec(name))
    monkeypatch.setattr(targets, "cuda_plugins", list)
    with pytest.raises(ValueError) as raised:
        start(spec)
    assert str(raised.value) == f"target {spec!r} needs a compiler: pip install 'jaxddp[targets]'"


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("h100:8", ("h100:8", 1, 8, "1x1x8")),
        ("h200:32", ("h200:4x8", 4, 32, "1x4x8")),
        ("v5p:512", ("v5p:512", 128, 512, "8x8x8")),
    ],
)
def test_every_way_to_name_a_target_gives_its_one_name(spec, named):
    found = target(spec)
    assert (found.spec, found.num_hosts, found.num_devices, found.topology) == named
    assert target(found.spec) == found


@pytest.mark.parametrize("spec", ["h101:8", "v5p:12", "v5p:2x4", "h100:12", "h100:0", "h100:2x9", "h100", None])
def test_bad_names(spec):
    assert refusal(target, spec).startswith(f"target {spec!r} ")


def test_a_mesh_remembers_its_target_and_one_of_devices_has_none():
    found = targets.mesh("h100:32", axis="ranks")
    assert dict(found.shape) == {"ranks": 32}
    assert found.axis_types == (AxisType.Auto,)
    assert target_of(found) == target("h100:4x8")
    assert platform_of(found) == "gpu" and platform_of(targets.mesh("v5p:8")) == "tpu"
    assert platform_of(data_mesh(2)) == jax.devices()[0].platform
    for other in (data_mesh(2), AbstractMesh((8,), ("data",))):
        assert "must be a target's: make it with jaxddp.targets.mesh" in refusal(target_of, other)
