"""Damaged checkpoints: the very state that was saved, or one line that names the reason, and soon."""

import copy
import json
import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint.checkpoints import Checkpoints, _checksum
from jaxddp.checkpoint.host_state import to_host
from jaxddp.conftest import fuzz_seeds, soon

LONGEST_S = 1.0
VALUES = (
    None, True, -1, 0, 1, 2, 10**30, 0.5, 1e400, "", "x", "float64", "int8", "state", "../1", "\x00", [], [[]], [3],
    [10**12], [-1], ["x"], {}, {"": 1}, {"shape": [3], "dtype": "V8", "crc32": 0},
)  # fmt: skip


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A trainer, its parameters, the state of step 2, and a folder with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.zero1(), jaxddp.data_mesh(2))
    params = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}
    state = trainer.init(params)
    with Checkpoints(folder) as checkpoints:
        for step in (1, 2):
            batch = {"x": np.full((4, 3), step, np.float32), "y": np.ones((4, 2), np.float32)}
            state, _ = trainer.step(state, batch)
            checkpoints.save(trainer, state, data_position={"examples": 4 * step})
    return trainer, params, dict(to_host(trainer, state)), folder


def damage(checkpoint, rng):
    """Changes something in a checkpoint as disks, people and other programs do."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    path = rng.choice(files)
    data, kind = path.read_bytes(), rng.randrange(14)
    at, other = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    if kind < 7:
        byte, deep = bytes([rng.randrange(256)]), b"[" * 100_000
        path.write_bytes(
            [data[:at], data[:at] + byte + data[at + 1 :], data[:at] + data[other:], data[:at] + byte + data[at:],
             data + deep, deep, data[:at] + bytes(len(data) - at)][kind]
        )  # fmt: skip
        return
    if kind == 7:
        path.write_bytes(rng.choice(files).read_bytes())
        return
    if kind == 8:
        os.truncate(path, 2**26)  # sparse
        return
    if kind == 9:
        shutil.rmtree(rng.choice([one for one in checkpoint.rglob("*") if one.is_dir()]))
        return
    path.unlink()
    if kind == 10:
        os.mkfifo(path)
    elif kind == 11:
        path.mkdir()
    elif kind == 12:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/null", path, "/proc/self/mem", "nowhere"]))


def forge(checkpoint, rng):
    """Changes the description of a checkpoint, and its checksum with it."""
    path = checkpoint / "about" / "metadata"
    about = json.loads(path.read_bytes())
    del about["crc32"]
    for _ in range(rng.choice((1, 1, 3))):
        value = rng.choice([about, about, about["leaves"], *about["leaves"].values()]) if "leaves" in about else about
        if not isinstance(value, dict) or not value:
            continue
        key = rng.choice(sorted(value))
        if rng.random() < 0.2:
            del value[key]
        elif rng.random() < 0.2:
            value[rng.choice(("x", "impl", "params", "opt_state", "params.x"))] = copy.deepcopy(value[key])
        else:
            value[key] = copy.deepcopy(rng.choice(VALUES))
        if not isinstance(about.get("leaves"), dict):
            break
    written = about if rng.random() < 0.9 else rng.choice(VALUES)
    crc32 = {"crc32": _checksum(about)} if written is about else {}
    path.write_text(json.dumps(written | crc32 if isinstance(written, dict) else written))


def check(seed, saved, tmp_path, capfd):
    trainer, params, expected, original = saved
    rng, folder = random.Random(seed), tmp_path / str(seed)
    shutil.copytree(original, folder)
    forged = rng.random() < 0.3
    (forge if forged else damage)(folder / "2", rng)
    try:
        with soon(f"restoring what seed {seed} damaged", LONGEST_S), Checkpoints(folder) as checkpoints:
            restored, position = checkpoints.restore(trainer, params, step=2)
        if not forged:
            jax.tree.map(np.testing.assert_array_equal, dict(to_host(trainer, restored)), expected)
            assert position == {"examples": 8}
    except (ValueError, OSError) as error:
        assert "\n" not in str(error) and str(error), seed
    assert capfd.readouterr().err == "", seed
    shutil.rmtree(folder)


def test_damaged_checkpoints(saved, tmp_path, capfd):
    for seed in range(50):
        check(seed, saved, tmp_path, capfd)


@pytest.mark.full
def test_a_minute_of_damaged_checkpoints(saved, tmp_path, capfd):
    for seed in fuzz_seeds("damaged checkpoints"):
        check(seed, saved, tmp_path, capfd)
