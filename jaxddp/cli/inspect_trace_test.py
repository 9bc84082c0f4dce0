import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxddp
from jaxddp.__main__ import main

SIZES = (2**8, 2**20)  # bytes


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """Three calls on two of the simulated devices: a product and two reductions, one after the other."""
    mesh = jaxddp.data_mesh(2)

    def step(x):
        small = jax.lax.psum(x[: SIZES[0] // 4], "data")
        large = jax.lax.psum(jnp.tanh(x + small.sum()), "data")
        square = large.reshape(512, 512)
        return square @ square

    x = jax.ShapeDtypeStruct((SIZES[1] // 4,), jnp.float32)
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)).lower(x).compile()
    given = jnp.ones(x.shape)
    jax.block_until_ready(run(given))
    folder = tmp_path_factory.mktemp("profile")
    with jax.profiler.trace(folder):
        for _ in range(3):
            jax.block_until_ready(run(given))
    return folder


def test_a_profile_of_jax_is_held_against_a_network_and_gives_one(profile, capsys, tmp_path):
    written = tmp_path / "network.json"
    options = f"--trace {profile} --target h100:2 --json --write-network {written}"
    assert main(["inspect", *options.split()]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    found = json.loads(output.out)
    assert len(found["devices"]) == 2
    assert [(one["kind"], one["bytes"], one["ranks"], one["times"]) for one in found["collectives"]] == [
        ("all-reduce", size, 2, 6) for size in SIZES
    ]
    assert all(one["curve_us"] > 15 for one in found["collectives"])
    assert found["kinds"]["products"]["events"] >= 6
    for one in found["devices"].values():
        assert 0 < one["exposed_us"] <= one["communication_us"] < one["span_us"]
    curve = json.loads(written.read_text())["us"]["all-reduce"]["2"]
    assert [size for size, _ in curve] == [*SIZES]

    assert main(["inspect", "--trace", str(profile), "--network-file", str(written)]) == 0
    out = capsys.readouterr().out
    assert f"as measured, {written}" in " ".join(out.split())  # wherever lines are broken
    ratios = [line.split()[-1] for line in out.splitlines() if line.startswith("all-reduce") and "iB" in line]
    assert ratios[-1] == "1.00"


def test_wrong_options_and_profiles_without_collectives_are_one_line(profile, capsys, tmp_path):
    (tmp_path / "one.json").write_text(json.dumps({"traceEvents": [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 0, "dur": 4, "args": {"device": 0}}
    ]}))  # fmt: skip
    for options, message in {
        ("--trace", tmp_path / "one.json"): "must hold collectives: it has 0.004 ms of products",
        ("--trace", profile, "--compare", "zero1"): "compare (=['zero1']) must be left out with --trace",
        ("--trace", profile, "--network-file", "measured"): "must come with --target",
        ("--trace", profile, "--write-network", tmp_path / "one.json"): "must not exist: nothing is overwritten",
        ("--write-network", tmp_path / "new.json"): "must come with --trace",
    }.items():
        assert main(["inspect", *map(str, options)]) == 2
        output = capsys.readouterr()
        assert output.out == "" and message in output.err and output.err.count("\n") == 1
