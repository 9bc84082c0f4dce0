import io
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxddp
from jaxddp.checkpoint.host_state import host_params
from jaxddp.checkpoint.interop import from_numpy, to_numpy
from jaxddp.checkpoint.weights import export_weights, load_weights
from jaxddp.comparison_test import refusal
from jaxddp.models import build
from jaxddp.tree import named_leaves


def test_names_are_the_trees_or_a_state_dicts(tmp_path):
    _, params = build("tiny")
    export_weights(tmp_path / "own.npz", params)
    loaded = load_weights(tmp_path / "own.npz")
    assert list(loaded) == list(named_leaves(params))
    for name, leaf in named_leaves(params).items():
        np.testing.assert_array_equal(loaded[name], leaf)
    export_weights(tmp_path / "torch.npz", to_numpy(params))
    loaded = load_weights(tmp_path / "torch.npz")
    assert {name.rsplit(".")[-1] for name in loaded} == {"weight"}
    jax.tree.map(np.testing.assert_array_equal, from_numpy(loaded, params), params)


def test_of_shards_it_is_written_without_a_whole_on_any_device(tmp_path):
    loss_fn, params = build("tiny")
    strategy = jaxddp.zero3(min_shard_elements=8)
    trainer = jaxddp.Trainer(loss_fn, optax.sgd(0.1), strategy, jaxddp.data_mesh(3))
    state = trainer.init(params)
    largest = max(leaf.on_rank.size for leaf in jax.tree.leaves(trainer.layout(state).params))
    before = {id(array) for array in jax.live_arrays()}
    on_host = host_params(trainer, state)
    assert all(array.size <= largest for array in jax.live_arrays() if id(array) not in before)
    export_weights(tmp_path / "weights.npz", on_host)
    loaded = load_weights(tmp_path / "weights.npz")
    assert list(loaded) == list(named_leaves(params))
    for name, leaf in named_leaves(params).items():
        np.testing.assert_array_equal(loaded[name], leaf)
    trainer.step(state, {name: np.zeros((3, 8), np.int32) for name in ("tokens", "targets")})
    jax.tree.map(np.testing.assert_array_equal, on_host, params)  # a step that is given the state leaves them alone
    assert "was donated to an earlier step" in refusal(host_params, trainer, state)


def test_any_name_and_any_shape_and_numpy_itself_reads_them(tmp_path):
    params = {"file": np.arange(3), "allow_pickle": [jnp.ones((2, 3)), jnp.zeros((0, 4))], "a/b ü": jnp.float32(2)}
    export_weights(tmp_path / "weights", params)
    with np.load(tmp_path / "weights", allow_pickle=False) as loaded:
        assert dict(loaded).keys() == named_leaves(params).keys()
        for name, leaf in named_leaves(params).items():
            assert (loaded[name].dtype, loaded[name].shape) == (leaf.dtype, leaf.shape)
            np.testing.assert_array_equal(loaded[name], leaf)
    export_weights(tmp_path / "weights", jnp.ones(2))
    assert list(load_weights(tmp_path / "weights")) == [""]


@pytest.mark.parametrize(
    ("dtype", "found"),
    [("bfloat16", "float32"), ("float8_e4m3fn", "float32"), *((one, one) for one in ("float16", "complex64", "bool"))],
)
def test_floats_that_numpy_does_not_know_are_widened_and_what_it_knows_stays(tmp_path, dtype, found):
    array = np.linspace(-3, 3, 50).astype(jnp.dtype(dtype)) * np.asarray(1j if dtype == "complex64" else 1, dtype)
    export_weights(tmp_path / "weights.npz", {"w": array})
    loaded = load_weights(tmp_path / "weights.npz")["w"]
    assert loaded.dtype == found
    np.testing.assert_array_equal(loaded.astype(array.dtype), array)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "weights.npz"
    export_weights(path, {"w": jnp.ones(3)})
    before = path.read_bytes()
    real, written = np.lib.format.write_array, []

    def fail_at_the_second(member, array, **options):
        if written:
            raise OSError(28, "No space left on device")
        written.append(array)
        real(member, array, **options)

    monkeypatch.setattr(np.lib.format, "write_array", fail_at_the_second)
    with pytest.raises(OSError, match="No space left"):
        export_weights(path, {"w": jnp.zeros(3), "v": jnp.zeros(3)})
    assert [file.name for file in tmp_path.iterdir()] == ["weights.npz"]
    assert path.read_bytes() == before


def test_what_is_no_whole_file_of_weights_is_refused_in_one_line(tmp_path):
    path = tmp_path / "weights.npz"
    export_weights(path, {"w": jnp.arange(100.0), "v": jnp.ones(3)})
    content = path.read_bytes()
    middle = content[:300] + bytes([content[300] ^ 1]) + content[301:]
    pickled, alone = io.BytesIO(), io.BytesIO()
    np.savez(pickled, w=np.array([{}], object))
    np.save(alone, np.ones(3))
    foreign = io.BytesIO()
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("w.npy", "text")
    others = [stream.getvalue() for stream in (pickled, alone, foreign)]
    for damaged in (content[: len(content) // 2], content[:-1], b"", b"text", middle, *others):
        path.write_bytes(damaged)
        assert "weights.npz' must hold weights, " in refusal(load_weights, path)
    with pytest.raises(FileNotFoundError):
        load_weights(tmp_path / "none.npz")


def test_a_link_is_written_through_and_a_device_is_refused(tmp_path):
    target, link = tmp_path / "target.npz", tmp_path / "link.npz"
    link.symlink_to(target)
    for value in (1.0, 2.0):  # where it points to nothing yet, and to a file
        export_weights(link, {"w": np.full(3, value)})
        assert link.is_symlink() and load_weights(target)["w"].tolist() == [value] * 3
    (tmp_path / "device.npz").symlink_to("/dev/null")
    for path in ("/dev/null", tmp_path / "device.npz", tmp_path):
        assert "must be a regular file" in refusal(export_weights, path, {"w": np.ones(3)})
    assert Path("/dev/null").is_char_device()
