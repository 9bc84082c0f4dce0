"""What is written, by whom and when it is there, and what is not restored."""

import asyncio
import json
import shutil
import signal
import threading

import jax
import pytest

import jaxddp
from jaxddp.checkpoint import checkpoints as checkpoint
from jaxddp.checkpoint.checkpoints import FORMAT, Checkpoints
from jaxddp.checkpoint.checkpoints_test import (
    BATCH,
    RUNS,
    advance,
    assert_close,
    assert_same,
    batch_of,
    dict_of,
    make,
    make_params,
    trainer_of,
    uninterrupted,
)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def saved(tmp_path):
    """A folder with two checkpoints."""
    trainer = trainer_of("zero1 on 4")
    state = trainer.init(make_params())
    with Checkpoints(tmp_path) as checkpoints:
        for position in (0, BATCH):
            state, _ = trainer.step(state, batch_of(position))
            checkpoints.save(trainer, state, data_position=position + BATCH)
    return tmp_path


def files_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# Restoring


@pytest.mark.parametrize("name", RUNS)
def test_a_trainer_that_never_saw_the_model_gets_the_very_state(saved, name):
    trainer = RUNS[name]()
    with Checkpoints(saved) as checkpoints:
        state, position = checkpoints.restore(trainer, jax.eval_shape(make_params))
    assert position == 2 * BATCH
    assert_close(dict_of(trainer, state), uninterrupted(2))


# Writing


def test_the_last_ones_are_kept(tmp_path):
    trainer = trainer_of("naive on 1")
    state = trainer.init(make_params())
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        for position in range(4):
            state, _ = trainer.step(state, batch_of(position))
            checkpoints.save(trainer, state)
        checkpoints.wait()
        assert checkpoints.steps() == [3, 4]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
        assert int(checkpoints.restore(trainer, make_params(), step=3)[0].step) == 3


@pytest.fixture
def writing(monkeypatch):
    """What is saved while this event is not set is not written."""
    may_write = threading.Event()
    real = checkpoint._HostArrays._background_serialize

    async def held(self, *args):
        await asyncio.to_thread(may_write.wait)
        await real(self, *args)

    monkeypatch.setattr(checkpoint._HostArrays, "_background_serialize", held)
    yield may_write
    may_write.set()


@pytest.mark.parametrize("name", ["bucketed on 3", "zero3 on 8"])
def test_training_goes_on_while_a_state_that_it_has_overwritten_is_written(tmp_path, writing, name):
    trainer = trainer_of(name)
    state, position = advance(trainer, trainer.init(make_params()), 0, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state)
        given = state.params["stack"]
        state, _ = advance(trainer, state, position, 3)
        assert given.is_deleted()
        assert not (tmp_path / "2").exists()
        with Checkpoints(tmp_path) as reader:
            assert reader.latest_step() is None
        writing.set()
        restored, _ = checkpoints.restore(trainer, make_params())
        assert_close(dict_of(trainer, restored), uninterrupted(2))


def test_an_interrupt_during_a_save_comes_when_it_is_safe(tmp_path, monkeypatch):
    real = checkpoint._HostArrays.serialize

    async def interrupted(self, *args):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return await real(self, *args)

    monkeypatch.setattr(checkpoint._HostArrays, "serialize", interrupted)
    trainer = trainer_of("naive on 1")
    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, trainer.init(make_params()))
    with Checkpoints(tmp_path) as checkpoints:
        assert int(checkpoints.restore(trainer, make_params())[0].step) == 0


def test_a_save_that_fails_is_told_and_leaves_the_earlier_ones(tmp_path, monkeypatch):
    trainer = trainer_of("naive on 1")
    state = trainer.init(make_params())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(trainer, state)
        checkpoints.wait()
        before = files_of(tmp_path)
        state, _ = trainer.step(state, batch_of(0))
        with monkeypatch.context() as patch:

            async def full(*args):
                raise OSError(28, "No space left on device")

            patch.setattr(checkpoint._HostArrays, "_background_serialize", full)
            checkpoints.save(trainer, state)
            with pytest.raises(OSError, match="No space left on device"):
                checkpoints.wait()
    assert {path: before[path] for path in before} == {path: path.read_bytes() for path in before}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [0]
        # What is left of the failed one is not in the way of the next.
        checkpoints.save(trainer, state)
        assert int(checkpoints.restore(trainer, make_params())[0].step) == 1


# What is refused


def refusal(folder, trainer=None, params=None, **options):
    """Why a checkpoint is not restored, in one line; nothing in the folder changes."""
    before = files_of(folder)
    with Checkpoints(folder) as checkpoints, pytest.raises(ValueError) as caught:
        checkpoints.restore(trainer or trainer_of("naive on 1"), make_params() if params is None else params, **options)
    assert files_of(folder) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_damaged_files_are_never_taken_for_the_state(saved, capfd):
    trainer = trainer_of("zero1 on 4")
    num_refused = 0
    with Checkpoints(saved) as checkpoints:
        expected = dict_of(trainer, checkpoints.restore(trainer, make_params())[0])
    for path, content in files_of(saved / "2").items():
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        for damaged in (content[:middle], content[:-1], b"", flipped, None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            try:
                with Checkpoints(saved) as checkpoints:
                    state, _ = checkpoints.restore(trainer, make_params(), step=2)
                assert_same(dict_of(trainer, state), expected)  # not every byte matters
            except ValueError as error:
                assert str(error) == (
                    f"checkpoint of step 2 in {str(saved)!r} is damaged or half-written: remove it to go on from an "
                    "older one"
                )
                num_refused += 1
        path.write_bytes(content)
    assert num_refused > 20
    assert capfd.readouterr().err == ""
    with Checkpoints(saved) as checkpoints:
        assert int(checkpoints.restore(trainer, make_params(), step=1)[0].step) == 1


def test_a_newer_format_and_a_checkpoint_of_something_else(saved):
    path = saved / "2" / "about" / "metadata"
    about = json.loads(path.read_text())
    del about["crc32"]  # what else is in it only a newer version knows
    for no_number in ("1", None, 1.5, [1]):
        path.write_text(json.dumps(about | {"format": no_number}))
        assert refusal(saved, step=2).endswith("is damaged or half-written: remove it to go on from an older one")
    path.write_text(json.dumps(about | {"format": FORMAT + 1}))
    assert refusal(saved) == (
        f"checkpoint of step 2 in {str(saved)!r} has format {FORMAT + 1}, newer than {FORMAT}: update jaxddp"
    )
    shutil.rmtree(saved / "2" / "about")
    assert refusal(saved, step=2).endswith("is damaged or half-written: remove it to go on from an older one")


def test_half_written_folders_are_passed_over(saved):
    shutil.copytree(saved / "2", saved / "3.orbax-checkpoint-tmp")
    shutil.rmtree(saved / "3.orbax-checkpoint-tmp" / "state" / "ocdbt.process_0")
    trainer = trainer_of("naive on 1")
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.steps() == [1, 2]
        state, position = checkpoints.restore(trainer, make_params())
        state, _ = advance(trainer, state, position, 1)
        checkpoints.save(trainer, state)
    with Checkpoints(saved) as checkpoints:
        assert_close(dict_of(trainer, checkpoints.restore(trainer, make_params())[0]), uninterrupted(3))


def test_a_copy_under_another_step_is_refused(saved):
    shutil.copytree(saved / "2", saved / "9")
    assert refusal(saved) == f"checkpoint of step 9 in {str(saved)!r} is that of step 2: remove or rename its folder"


def test_what_others_do_to_an_open_folder_is_seen(saved):
    trainer = trainer_of("naive on 1")
    with Checkpoints(saved) as checkpoints:
        shutil.rmtree(saved / "2" / "about")
        with pytest.raises(ValueError, match="damaged or half-written: remove it to go on from an older one"):
            checkpoints.restore(trainer, make_params(), step=2)
        shutil.rmtree(saved / "2")
        state, position = checkpoints.restore(trainer, make_params())
        assert int(state.step) == checkpoints.latest_step() == 1
        with Checkpoints(saved) as other:
            state, _ = advance(trainer, state, position, 1)
            other.save(trainer, state)
        assert checkpoints.steps() == [1, 2]
        with pytest.raises(ValueError, match=r"step \(=2\) must be above 2"):
            checkpoints.save(trainer, state)


def test_bad_input(saved, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    assert refusal(empty) == f"no checkpoint in {str(empty)!r}"
    assert refusal(saved, step=5) == f"no checkpoint of step 5 in {str(saved)!r}: there are 1, 2"
    for keep in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=rf"keep \(={keep!r}\) must be a positive integer"):
            Checkpoints(saved, keep=keep)
    (empty / "file").touch()
    with pytest.raises(ValueError, match=r"^directory \(='.*file'\) must be a folder, it is a file$"):
        Checkpoints(empty / "file")
    trainer = trainer_of("naive on 1")
    before = files_of(saved)
    with Checkpoints(saved) as checkpoints:
        state, _ = checkpoints.restore(trainer, make_params())
        with pytest.raises(
            ValueError,
            match=r"^step \(=2\) must be above 2, that of the newest checkpoint in .*: save into another folder, or "
            "remove those of step 2 and later$",
        ):
            checkpoints.save(trainer, state)
        donated, (state, _) = state, trainer.step(state, batch_of(0))
        with pytest.raises(ValueError, match="was donated to an earlier step"):
            checkpoints.save(trainer, donated)
        with pytest.raises(ValueError, match=r"data_position \(=\{1\}\) must be JSON"):
            checkpoints.save(trainer, state, data_position={1})
        on_target = make(jaxddp.bucketed(), mesh=jaxddp.targets.mesh("h100:2"))
        with pytest.raises(ValueError, match="must be of devices: a target holds no state"):
            checkpoints.restore(on_target, make_params())
    assert files_of(saved) == before
