"""What fails while checkpoints are written, and what happens to their files: the state that was saved, or one line."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint.checkpoints import Checkpoints
from jaxddp.checkpoint.checkpoints_test import files_of
from jaxddp.checkpoint.folder import _checksum
from jaxddp.comparison_test import refusal
from jaxddp.conftest import soon


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - params["b"]) ** 2)


@pytest.fixture(scope="module")
def trainer():
    return jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.zero1(), jaxddp.data_mesh(2))


def params_of(step):
    return {"w": np.random.default_rng(step).normal(size=(100, 100)).astype(np.float32), "b": np.float32(1)}


def state_of(trainer, step, **params):
    return trainer.init(params_of(step) | params)._replace(step=jnp.int32(step))


def save(folder, trainer, *steps, **options):
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(trainer, state_of(trainer, step))


def check_restored(checkpoints, trainer, step, asked=None):
    expected = params_of(step)
    state, _ = checkpoints.restore(trainer, expected, step=asked)
    assert int(state.step) == step
    jax.tree.map(np.testing.assert_array_equal, trainer.params(state), expected)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".writer")


def test_the_last_ones_are_kept_and_only_what_this_program_wrote_is_removed(tmp_path, trainer):
    for name in ("1", "2", "3/state", "007", "notes", "x.partial", "2024-scans.partial", "3d.removed"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "work.txt").write_text("mine")
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "about.json").write_text('{"format": "other"}')
    before, others = files_of(tmp_path), names_in(tmp_path)
    save(tmp_path, trainer, 5, 6, 7, 8, keep=2)
    after = files_of(tmp_path)
    assert {path: after[path] for path in before} == before
    assert names_in(tmp_path) == sorted([*others, "7", "8"])
    with Checkpoints(tmp_path) as checkpoints:
        check_restored(checkpoints, trainer, 7, asked=7)


def test_what_a_killed_process_left_goes_with_the_next_save(tmp_path, trainer):
    save(tmp_path, trainer, 1, 2, 3)
    (tmp_path / "1").rename(tmp_path / "1.removed")
    (tmp_path / "3").rename(tmp_path / "3.partial")
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [2]
        checkpoints.save(trainer, state_of(trainer, 4))
    assert names_in(tmp_path) == ["2", "4"]


def test_what_has_the_name_of_a_checkpoint_is_not_replaced(tmp_path, trainer):
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "work.txt").write_text("mine")
    (tmp_path / "3").symlink_to(tmp_path / "nowhere")
    before = files_of(tmp_path)
    with Checkpoints(tmp_path) as checkpoints:
        for step in (2, 3):
            with pytest.raises(OSError, match=rf"^checkpoint of step {step} in .* was not saved: "):
                checkpoints.save(trainer, state_of(trainer, step))
    assert names_in(tmp_path) == ["2", "3"] and files_of(tmp_path).items() >= before.items()


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, trainer):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(trainer, state_of(trainer, 1))
        before = files_of(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # bytes of any file: a write that fails for real
        try:
            with pytest.raises(OSError, match=rf"^checkpoint of step 2 in '{tmp_path}' was not saved: "):
                checkpoints.save(trainer, state_of(trainer, 2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert files_of(tmp_path) == before and names_in(tmp_path) == ["1"]  # nothing takes up the disk
        checkpoints.save(trainer, state_of(trainer, 3))
    assert names_in(tmp_path) == ["3"]


RESERVES = """
import os, sys, jaxddp
checkpoints = jaxddp.Checkpoints(sys.argv[1])
checkpoints.reserve()
if os.fork():  # the other one is left when the job is killed, as a loader's worker is
    print("reserved", flush=True)
sys.stdin.read()
os._exit(0)
"""


FORKS = """
import os, sys, jaxddp
checkpoints = jaxddp.Checkpoints(sys.argv[1])
checkpoints.reserve()
if os.fork() == 0:
    try:
        jaxddp.Checkpoints(sys.argv[1]).reserve()
    except ValueError:
        os._exit(7)
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
"""
FORBIDDEN = """
import os, sys, jaxddp
folder = sys.argv[1]
for use, of_folder, of_checkpoint in (
    ("latest_step", 0o755, 0o000), ("reserve", 0o555, 0o755), ("latest_step", 0o300, 0o755)
):
    os.chmod(folder, 0o755), os.chmod(folder + "/1", of_checkpoint), os.chmod(folder, of_folder)
    try:
        getattr(jaxddp.Checkpoints(folder), use)()
    except PermissionError:
        continue
    raise AssertionError(use)
"""


@pytest.mark.full
def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path, trainer):
    command = [sys.executable, "-W", "ignore", "-c", RESERVES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "reserved\n"
        with Checkpoints(tmp_path) as checkpoints:
            found = refusal(checkpoints.save, trainer, state_of(trainer, 5))
            assert f"'{tmp_path}') is being written to by " in found and f"{other.pid} on " in found
            other.kill()
            other.wait(60)
            checkpoints.save(trainer, state_of(trainer, 5))
            with Checkpoints(tmp_path / ".") as second:  # of this process, whose end leaves the lock to the first
                second.reserve()
            check_locked(command)
    assert names_in(tmp_path) == ["5"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "reserved\n"
        with Checkpoints(tmp_path) as checkpoints:
            try:
                checkpoints.reserve()
            except ValueError as error:
                kept = error  # as a notebook keeps the last one
            other.kill()
            other.wait(60)
            checkpoints.reserve()
            del kept
            check_locked(command)
    with Checkpoints(tmp_path) as checkpoints, Checkpoints(tmp_path) as second:
        checkpoints.reserve()
        shutil.rmtree(tmp_path)
        second.reserve()  # of the folder that is made anew
        check_locked(command)
    assert subprocess.run([*command[:-2], FORKS, str(tmp_path)], check=False).returncode == 7


def check_locked(command):
    refused = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert f"is being written to by process {os.getpid()} on " in refused.stderr


def test_a_position_comes_back_as_json_has_it(tmp_path, trainer):
    """Whose keys are strings: integers sort in another order than these."""
    workers = {number: [number, True, None] for number in range(12)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state_of(trainer, 1), data_position=workers)
        _, position = checkpoints.restore(trainer, params_of(1))
    assert position == {str(number): entry for number, entry in workers.items()}


def test_a_folder_that_may_not_be_read_or_written_is_named(tmp_path, trainer):
    save(tmp_path, trainer, 1)
    rights = "-dac_override,-dac_read_search"  # which let root read and write everything
    as_others = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"] if os.getuid() == 0 else []
    if as_others and not shutil.which("setpriv"):
        pytest.skip("root may read and write everything, and setpriv is not installed")
    try:
        subprocess.run([*as_others, sys.executable, "-W", "ignore", "-c", FORBIDDEN, str(tmp_path)], check=True)
    finally:
        tmp_path.chmod(0o755)
        (tmp_path / "1").chmod(0o755)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path, trainer):
    save(tmp_path, trainer, 1)
    adam, *others = state_of(trainer, 2).opt_state
    moments = adam._replace(nu=jax.tree.map(lambda leaf: leaf * jnp.inf, adam.nu))
    bad = {
        "params.b": state_of(trainer, 2, b=np.float32(np.nan)),
        "opt_state.0.nu.w": state_of(trainer, 2)._replace(opt_state=(moments, *others)),
    }
    for name, state in bad.items():
        with Checkpoints(tmp_path, keep=1) as checkpoints, pytest.raises(FloatingPointError, match=name):
            checkpoints.save(trainer, state)
        assert names_in(tmp_path) == ["1"]
    plateau = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())  # its best loss starts at infinity
    save(tmp_path, jaxddp.Trainer(loss_fn, plateau, jaxddp.bucketed(), jaxddp.data_mesh(2)), 3)
    assert names_in(tmp_path) == ["1", "3"]


@pytest.mark.parametrize("part", ["about.json", "state.npz"])
def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, trainer, part):
    save(tmp_path, trainer, 1, 2)
    damaged = tmp_path / "2" / part
    damaged.write_bytes(damaged.read_bytes()[:-20])
    lines: list[str] = []
    with Checkpoints(tmp_path, warn=lines.append) as checkpoints:
        check_restored(checkpoints, trainer, 1)
        assert lines == [f"checkpoint of step 2 in '{tmp_path}' is damaged or half-written: took step 1"]
        checkpoints.save(trainer, state_of(trainer, 2))
    assert names_in(tmp_path) == ["1", "2", "2.damaged"]
    with Checkpoints(tmp_path) as checkpoints:
        check_restored(checkpoints, trainer, 2)
        for step in (1, 2):
            (tmp_path / str(step) / "about.json").unlink()
        assert refusal(check_restored, checkpoints, trainer, 2).startswith("checkpoint of step 2 in ")


def test_what_is_damaged_again_is_put_aside_and_costs_no_sound_checkpoint(tmp_path, trainer):
    save(tmp_path, trainer, 1)
    for _ in range(2):
        save(tmp_path, trainer, 2)
        (tmp_path / "2" / "about.json").unlink()
        with Checkpoints(tmp_path, keep=2, warn=lambda line: None) as checkpoints:
            check_restored(checkpoints, trainer, 1)
            checkpoints.save(trainer, state_of(trainer, 2))
        (tmp_path / "2" / "state.npz").write_text("")
        with Checkpoints(tmp_path, keep=2, warn=lambda line: None) as checkpoints:
            check_restored(checkpoints, trainer, 1)
            checkpoints.save(trainer, state_of(trainer, 3))
            assert checkpoints.steps() == [1, 2, 3]
        shutil.rmtree(tmp_path / "2")
        shutil.rmtree(tmp_path / "3")
    assert names_in(tmp_path) == ["1", "2.damaged", "2.damaged1"]


def damage(checkpoint, rng):
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    path = rng.choice(files)
    data, kind = path.read_bytes(), rng.randrange(10)
    at, other = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    if kind < 7:
        byte, deep = bytes([rng.randrange(256)]), b"[" * 100_000
        path.write_bytes(
            [data[:at], data[:at] + byte + data[at + 1 :], data[:at] + data[other:], data[:at] + byte + data[at:],
             data + deep, deep, data[:at] + bytes(len(data) - at)][kind]
        )  # fmt: skip
    elif kind == 7:
        path.write_bytes(rng.choice(files).read_bytes())
    elif kind == 8:
        os.truncate(path, 2**26)  # sparse
    else:
        path.unlink()


def test_damaged_files_are_never_taken_for_the_state(tmp_path, trainer, capfd):
    save(tmp_path / "sound", trainer, 1, 2)
    num_refused = 0
    for seed in range(50):
        folder = tmp_path / str(seed)
        shutil.copytree(tmp_path / "sound", folder)
        damage(folder / "2", random.Random(seed))
        with soon(f"restoring what seed {seed} damaged", 1.0), Checkpoints(folder) as checkpoints:
            try:
                check_restored(checkpoints, trainer, 2, asked=2)
            except ValueError as error:
                num_refused += 1
                assert str(error).startswith(("checkpoint of step 2 in ", "no checkpoint of step 2 in ")), seed
                assert "\n" not in str(error)
        assert capfd.readouterr().err == "", seed
        shutil.rmtree(folder)
    assert num_refused > 40


def test_what_others_wrote_is_refused_by_name(tmp_path, trainer):
    save(tmp_path, trainer, 2)
    shutil.copytree(tmp_path / "2", tmp_path / "9")
    with Checkpoints(tmp_path) as checkpoints:
        assert "9 in " in refusal(check_restored, checkpoints, trainer, 2, asked=9)  # a copy under another name
        assert refusal(check_restored, checkpoints, trainer, 2, asked=5).endswith(": there are 2, 9")
        about = tmp_path / "2" / "about.json"
        said = json.loads(about.read_bytes())["about"] | {"format": 2}
        about.write_text(json.dumps({"about": said, "crc32": _checksum(said)}))
        assert " has format 2 of jaxddp: this is format 3" in refusal(check_restored, checkpoints, trainer, 2, asked=2)


def test_bad_input(tmp_path, trainer):
    assert "keep (=0) must be a positive integer" in refusal(Checkpoints, tmp_path, keep=0)
    assert "no checkpoint in " in refusal(Checkpoints(tmp_path).restore, trainer, {})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state := state_of(trainer, 2))
        assert "step (=2) must be above 2" in refusal(checkpoints.save, trainer, state)
        with pytest.raises(OSError, match="was not saved: Object of type set is not JSON"):
            checkpoints.save(trainer, state_of(trainer, 3), data_position={1})
        donated = state_of(trainer, 2)  # jax 0.11 does not donate what the host has read, as a save does
        trainer.step(donated, {"x": np.ones((4, 100), np.float32)})
        assert "was donated to an earlier step" in refusal(checkpoints.save, trainer, donated)
