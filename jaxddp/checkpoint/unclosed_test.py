"""Checkpoints saved without ``with``, from several threads, or by two objects or processes: none is lost or hangs."""

import subprocess
import sys
import textwrap
import threading

import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp.checkpoint import Checkpoints, checkpoints


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"]) ** 2)


def trainer_and_state(step=0):
    trainer = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.bucketed(), jaxddp.data_mesh(2))
    state = trainer.init({"w": jnp.ones((300, 300))})
    return trainer, state._replace(step=jnp.int32(step))


@pytest.mark.parametrize("end", ["", pytest.param("raise SystemExit(3)", marks=pytest.mark.full), "raise KeyError"])
def test_a_script_that_just_ends_keeps_its_last_checkpoint(tmp_path, end):
    script = f"""
        import jax.numpy as jnp, optax, jaxddp
        from jaxddp.checkpoint import Checkpoints
        jaxddp.simulate_devices(2)
        def loss_fn(params, batch):
            return jnp.mean((batch["x"] @ params["w"]) ** 2)
        trainer = jaxddp.Trainer(loss_fn, optax.adam(0.1), jaxddp.bucketed(), jaxddp.data_mesh(2))
        state = trainer.init({{"w": jnp.ones((2000, 2000))}})
        checkpoints = Checkpoints({str(tmp_path / "run")!r})
        checkpoints.save(trainer, state)
        {end}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, timeout=120)
    with Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.steps() == [0]


def test_several_threads_may_save(tmp_path):
    checkpoints, failures = Checkpoints(tmp_path, keep=100), []
    trainer, state = trainer_and_state()

    def save(step):
        try:
            checkpoints.save(trainer, state._replace(step=jnp.int32(step)))
        except ValueError as error:
            assert "must be above" in str(error)  # a later step was faster
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=save, args=(step,), daemon=True) for step in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in threads)
    done = threading.Thread(target=checkpoints.close, daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 7
        checkpoints.restore(trainer, trainer.params(state))


def test_two_objects_of_one_folder(tmp_path):
    trainer, state = trainer_and_state(step=5)
    first, second = Checkpoints(tmp_path), Checkpoints(tmp_path)
    first.save(trainer, state)
    with pytest.raises(ValueError, match=r"step \(=5\) must be above 5"):
        second.save(trainer, state)
    second.save(trainer, state._replace(step=jnp.int32(6)))
    first.close()
    second.close()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [5, 6]
        checkpoints.restore(trainer, trainer.params(state), step=5)


SAVES = """
import sys, time
import jax.numpy as jnp, optax, jaxddp
from jaxddp.checkpoint import Checkpoints
jaxddp.simulate_devices(2)
trainer = jaxddp.Trainer(lambda p, b: 0.0, optax.adam(0.1), jaxddp.bucketed(), jaxddp.data_mesh(2))
state = trainer.init({"w": jnp.ones((30, 30))})
Checkpoints(sys.argv[1]).save(trainer, state)
print("saved", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["finishes", "dies"])
def test_two_processes_of_one_folder(tmp_path, end):
    trainer, state = trainer_and_state(step=5)
    command = [sys.executable, "-c", SAVES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "saved\n"
        with Checkpoints(tmp_path) as checkpoints:
            with pytest.raises(
                ValueError, match=rf"directory \(='{tmp_path}'\) is being written to by .*{other.pid} on "
            ):
                checkpoints.save(trainer, state)
            other.kill() if end == "dies" else other.stdin.close()
            other.wait(60)
            checkpoints.save(trainer, state)
            checkpoints.wait()
            assert checkpoints.latest_step() == 5
            assert not (tmp_path / ".writer").exists()


def test_a_save_that_fails_at_the_end_prints_one_line(tmp_path, monkeypatch, capsys):
    unfinished = Checkpoints(tmp_path)

    def wait():
        raise OSError("checkpoint of step 3 was not saved: no space left")

    monkeypatch.setattr(unfinished, "wait", wait)
    monkeypatch.setattr(checkpoints, "_unfinished", {unfinished})
    checkpoints._finish_all()
    assert capsys.readouterr().err == "checkpoint of step 3 was not saved: no space left\n"
