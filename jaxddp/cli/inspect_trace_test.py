import json
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxddp
from jaxddp.__main__ import main
from jaxddp.network import measured

SIZES = (2**8, 2**22)  # bytes, so far apart that the larger takes longer on a busy machine too


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Ten calls on two of the simulated devices: a product and two reductions, one after the other."""
    mesh = jaxddp.data_mesh(2)

    def step(x):
        small = jax.lax.psum(x[: SIZES[0] // 4], "data")
        large = jax.lax.psum(jnp.tanh(x + small.sum()), "data")
        square = large.reshape(1024, 1024)
        return square @ square

    x = jax.ShapeDtypeStruct((SIZES[1] // 4,), jnp.float32)
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)).lower(x).compile()
    given = jnp.ones(x.shape)
    jax.block_until_ready(run(given))
    folder = tmp_path_factory.mktemp("profile")
    with jax.profiler.trace(folder):
        for _ in range(10):
            jax.block_until_ready(run(given))
    return folder


def test_a_profile_of_jax_is_held_against_a_network_and_gives_one(profile, capsys, tmp_path):
    written = tmp_path / "network.json"
    assert main(["inspect", "--trace", str(profile), "--target", "h100:2", "--write-network", str(written)]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    devices, kinds, collectives = (
        [line.split() for line in output.out.splitlines() if line.startswith(name) and re.search(r"\d$", line)]
        for name in ("CPU", "products", "all-reduce ")
    )
    assert len(devices) == 2 and int(kinds[0][1]) >= 20
    for *_, span, _, communication, exposed in devices:
        assert 0 < float(exposed) <= float(communication) < float(span)
    sized = [cells for cells in collectives if len(cells) > 3]  # those of the last table
    assert [cells[1:5] for cells in sized] == [["256", "B", "2", "20"], ["4", "MiB", "2", "20"]]
    measured_us = [1e6 * measured("h100:2").seconds("all-reduce", size, range(2)) for size in SIZES]
    assert [float(curve) for *_, curve, _ in sized] == pytest.approx(measured_us, abs=0.06)  # a tenth is printed
    curve = json.loads(written.read_text())["us"]["all-reduce"]["2"]
    assert [size for size, _ in curve] == [*SIZES]

    assert main(["inspect", "--trace", str(profile), "--network-file", str(written)]) == 0
    out = capsys.readouterr().out
    assert f"as measured, {written}" in " ".join(out.split())  # wherever lines are broken
    ratios = [line.split()[-1] for line in out.splitlines() if line.startswith("all-reduce") and "iB" in line]
    assert ratios[-1] == "1.00"

    for target, said in {
        (): "network, assumed: 25 GB/s a device as given",
        ("--target", "h100:4x8"): "between hosts 25 GB/s as given",
    }.items():
        assert main(["inspect", "--trace", str(profile), "--network-gb-per-s", "25", *target]) == 0
        assert said in " ".join(capsys.readouterr().out.split())


def test_wrong_options_and_profiles_without_collectives_are_one_line(profile, capsys, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps({"traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 0, "dur": 4, "args": {"device": 0}}
    ]}))  # fmt: skip
    for options, message in {
        ("--trace", tmp_path / "one.json"): "must hold collectives: it has 0.004 ms of products",
        ("--trace", profile, "--write-network", tmp_path / "one.json"): "File exists: ",
    }.items():
        assert main(["inspect", *map(str, options)]) == 2
        output = capsys.readouterr()
        assert output.out == "" and message in output.err and output.err.count("\n") == 1
