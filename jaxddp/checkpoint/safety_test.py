"""What a save leaves alone, what it does when it cannot write, and what is never saved."""

import json
import resource
import shutil
import time
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint import Checkpoints


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - params["b"]) ** 2)


@pytest.fixture(scope="module")
def trainer():
    return jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.zero1(), jaxddp.data_mesh(2))


def state_of(trainer, step, **params):
    # Random: Orbax compresses, and zeros would fit anywhere.
    rng = np.random.default_rng(step)
    values = {"w": rng.normal(size=(100, 100)).astype(np.float32), "b": np.float32(1), **params}
    return trainer.init(values)._replace(step=jnp.int32(step))


def save(folder, trainer, *steps, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(trainer, state_of(trainer, step))


def files_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# What others have in the folder


def test_only_what_this_program_wrote_is_removed(tmp_path, trainer):
    for name in ("1", "2", "3/state", "007", "4.removed", "notes"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "work.txt").write_text("mine")
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "about").mkdir()
    (tmp_path / "4" / "about" / "metadata").write_text(json.dumps({"format": "other"}))
    before = files_of(tmp_path)
    save(tmp_path, trainer, 5, 6, 7, keep=1)
    after = files_of(tmp_path)
    assert {path: after[path] for path in before} == before
    assert not (tmp_path / "5").exists() and not (tmp_path / "6").exists() and (tmp_path / "7").exists()


def test_what_a_killed_process_had_not_removed_goes_with_the_next(tmp_path, trainer):
    save(tmp_path, trainer, 1)
    (tmp_path / "1").rename(tmp_path / "1.removed")
    save(tmp_path, trainer, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_what_has_the_name_of_a_checkpoint_is_not_replaced(tmp_path, trainer):
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "work.txt").write_text("mine")
    (tmp_path / "3").symlink_to(tmp_path / "nowhere")
    with Checkpoints(tmp_path) as checkpoints:
        for step in (2, 3):
            with pytest.raises(
                ValueError, match=rf"^\'{tmp_path}/{step}\' is no checkpoint: save into another folder, "
            ):
                checkpoints.save(trainer, state_of(trainer, step))
        assert checkpoints.steps() == []
        checkpoints.save(trainer, state_of(trainer, 4))
    assert (tmp_path / "2" / "work.txt").read_text() == "mine"


# Disks that are full


@contextmanager
def full_disk(num_bytes=1000):
    """No file of this process may grow beyond a size: a write that fails for real."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, trainer, capfd):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(trainer, state_of(trainer, 1))
        checkpoints.wait()
        before = files_of(tmp_path)
        with full_disk():
            checkpoints.save(trainer, state_of(trainer, 2))
            deadline = time.monotonic() + 30
            while not checkpoints.has_failed:  # known before anything else is saved
                assert time.monotonic() < deadline
                time.sleep(0.01)
        with pytest.raises(OSError, match=rf"^checkpoint of step 2 in '{tmp_path}' was not saved: File too large$"):
            checkpoints.save(trainer, state_of(trainer, 3))
        assert not checkpoints.has_failed
        assert files_of(tmp_path) == before
        assert [path.name for path in tmp_path.iterdir()] == ["1"]  # nothing takes up the disk
        checkpoints.save(trainer, state_of(trainer, 3))
        checkpoints.wait()
        assert checkpoints.steps() == [3]
    assert "Event loop" not in capfd.readouterr().err  # writes that outlive the one that failed


def test_a_folder_without_room_for_a_lock_is_one_error(tmp_path, trainer):
    checkpoints = Checkpoints(tmp_path)
    with full_disk(0), pytest.raises(OSError, match="File too large"):
        checkpoints.save(trainer, state_of(trainer, 1))
    checkpoints.save(trainer, state_of(trainer, 1))
    checkpoints.close()


# Damaged checkpoints


@pytest.mark.parametrize("part", ["about/metadata", "state/manifest.ocdbt", "state"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, trainer, part):
    save(tmp_path, trainer, 1, 2)
    damaged = tmp_path / "2" / part
    shutil.rmtree(damaged) if damaged.is_dir() else damaged.write_bytes(damaged.read_bytes()[:-20])
    lines: list[str] = []
    with Checkpoints(tmp_path, warn=lines.append) as checkpoints:
        state, _ = checkpoints.restore(trainer, trainer.params(state_of(trainer, 1)))
        assert int(state.step) == 1
        assert lines == [f"checkpoint of step 2 in '{tmp_path}' is damaged or half-written: took step 1"]
        checkpoints.save(trainer, state_of(trainer, 2))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.about(2)["step"] == 2
    assert (tmp_path / "2.damaged").is_dir()
    with Checkpoints(tmp_path) as checkpoints:
        assert int(checkpoints.restore(trainer, trainer.params(state))[0].step) == 2


def test_where_all_are_damaged_none_is_restored(tmp_path, trainer):
    save(tmp_path, trainer, 1, 2)
    for step in (1, 2):
        shutil.rmtree(tmp_path / str(step) / "about")
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match="^checkpoint of step 2 in .* is damaged"),
    ):
        checkpoints.restore(trainer, trainer.params(state_of(trainer, 1)))


# Numbers that are not finite


def test_a_state_that_is_not_finite_is_not_saved(tmp_path, trainer):
    save(tmp_path, trainer, 1)
    before = files_of(tmp_path)
    for bad in (np.nan, -np.inf):
        state = state_of(trainer, 2, b=np.float32(bad))
        with Checkpoints(tmp_path, keep=1) as checkpoints:
            with pytest.raises(
                FloatingPointError, match=r"^state of step 2 must be finite to be saved: params\.b are not$"
            ):
                checkpoints.save(trainer, state)
            assert checkpoints.steps() == [1]
        assert files_of(tmp_path) == before
    adam, *others = state_of(trainer, 2).opt_state
    moments = jax.tree.map(lambda leaf: leaf * jnp.inf, adam.nu)
    state = state_of(trainer, 2)._replace(opt_state=(adam._replace(nu=moments), *others))
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(FloatingPointError, match=r"opt_state\.0\.nu\.w are not$"):
        checkpoints.save(trainer, state)
    with Checkpoints(tmp_path, check_finite=False) as checkpoints:
        checkpoints.save(trainer, state)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]


def test_an_optimizer_may_start_from_an_infinite_best_loss(tmp_path):
    optimizer = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
    trainer = jaxddp.Trainer(loss_fn, optimizer, jaxddp.bucketed(), jaxddp.data_mesh(2))
    save(tmp_path, trainer, 1)
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]


def test_bad_input():
    with pytest.raises(ValueError, match=r"^directory \(=''\) must name a folder$"):
        Checkpoints("")
