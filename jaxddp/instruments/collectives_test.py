"""Collectives of programs that know nothing of this package, with the faults that people found by reading HLO."""

import functools
import inspect
import pickle
from types import SimpleNamespace

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxddp
from jaxddp.comparison_test import grid, refusal
from jaxddp.instruments import hlo, targets
from jaxddp.instruments.collectives import LAYERS, MICROBATCHES, Loop, collectives

NUM_RANKS, WIDTH = 4, 8


@pytest.fixture(autouse=True)
def _lines_of_this_file_count(monkeypatch):
    monkeypatch.setattr(hlo, "_OWN_FOLDER", "elsewhere")


def shape(*dims, spec=(), over=None):
    over = over or grid(NUM_RANKS, names=["data"])
    return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(over, P(*spec)))


def loss_fn(params, x):
    def layer(x, weight):
        return jnp.tanh(x @ weight), None

    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean((x @ params["out"]) ** 2)


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(place for place, line in enumerate(lines) if text in line)}"


def fsdp_params(over=None):
    layers = shape(3, WIDTH, WIDTH, spec=(None, "data"), over=over)
    return {"layers": layers, "out": shape(WIDTH, 2, over=over)}


def test_plain_data_parallelism_reduces_each_gradient_after_the_loop_of_layers():
    params = {"layers": shape(3, WIDTH, WIDTH), "out": shape(WIDTH, 2)}
    found = collectives(jax.grad(loss_fn), params, shape(16, WIDTH, spec=("data",)))
    assert sum(size for _, size in found.pairs) == found.num_bytes
    assert {kind for kind, _ in found.pairs} == {"all-reduce"} and found.num_devices == NUM_RANKS
    assert not found.each_microbatch()
    assert all((one.axes, one.num_ranks, one.dtype) == (("data",), NUM_RANKS, "f32") for one in found.found)


def test_for_a_target_arrays_that_lie_anywhere_go_where_the_others_are():
    def step(params, x, key):
        return jax.grad(lambda params: jnp.mean((x @ params) ** 2 * jax.random.normal(key, (16, WIDTH))))(params)

    x = jax.device_put(jnp.ones((16, WIDTH)), NamedSharding(grid(NUM_RANKS, names=["data"]), P("data")))
    given = jnp.ones((WIDTH, WIDTH)), x, jax.random.key(0)
    assert collectives(step, *given, target="h100:4").pairs == [("all-reduce", 4 * WIDTH**2)]


def test_a_gather_in_a_loop_of_layers_has_its_line_and_phase_and_is_counted_once_a_layer():
    found = collectives(jax.grad(loss_fn), fsdp_params(), shape(16, WIDTH, spec=("data",)))
    gathers = found.in_loops("all-gather")
    assert {one.phase for one in gathers} == {"forward", "backward"}
    for one in gathers:
        assert (one.count, one.loops, one.num_bytes) == (3, (Loop(LAYERS, 3),), 4 * WIDTH**2)
        # Of the product, or of the loop that cuts the weight, as newer versions of XLA have it.
        assert one.source in (line_of(loss_fn, "jnp.tanh"), line_of(loss_fn, "lax.scan"))
    assert "3 layers" in str(found) and "tanh" not in str(found)


def accumulated(params, batches):
    def add(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, batch)), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]


def test_gradients_that_are_reduced_once_per_micro_batch_are_found():
    params, batches = fsdp_params(), shape(5, 16, WIDTH, spec=(None, "data"))
    found = collectives(accumulated, params, batches)
    again = found.each_microbatch()
    assert again and {one.loops[0] for one in again} == {Loop(MICROBATCHES, 5)}
    assert sum(one.count for one in again if Loop(LAYERS, 3) in one.loops) == 15
    assert "Reduced once per micro-batch" in str(found)


def zero1_step(moments):
    """Adam whose moments are laid out by a spec, of parameters that are full before and after the step."""
    optimizer, params = optax.adam(1e-3), {"layers": shape(3, WIDTH, WIDTH), "out": shape(WIDTH, 2)}

    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    def place(leaf):
        return shape(*leaf.shape, spec=moments if len(leaf.shape) == 3 else ())

    state = jax.tree.map(place, jax.eval_shape(optimizer.init, params))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (params, state))
    return collectives(jax.jit(step, out_shardings=shardings), params, state, shape(16, WIDTH, spec=("data",)))


def test_a_zero1_without_effect_gathers_nothing():
    # Parameters that are updated by shards have to be gathered.
    assert "all-gather" in {kind for kind, _ in zero1_step((None, "data")).pairs}
    assert "all-gather" not in {kind for kind, _ in zero1_step(()).pairs}


def test_axes_are_those_of_the_mesh_also_of_a_shard_map_inside():
    over = grid(2, 2, names=("replica", "data"))

    def sums(x):
        return jax.lax.psum(x, "data"), jax.lax.psum(x * x, "replica"), jax.lax.psum(x + 1, ("replica", "data"))

    mapped = over_ranks(sums, P(("replica", "data")), P(None), over)
    found = collectives(jaxddp.jit(mapped, jaxddp.naive()), jnp.ones((8, 3)))
    assert sorted(one.axes for one in found.found) == [("data",), ("replica",), ("replica", "data")]
    assert {one.source for one in found.found} == {line_of(sums, "psum")}


def test_functions_of_nnx_are_read_and_what_xla_merged_has_the_phase_and_line_of_its_parts():
    @nnx.jit
    def step(model, x):
        return nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)

    model = nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(grid(NUM_RANKS, names=["data"]), P())))
    for target in (None, "h100:4"):
        (merged,) = collectives(step, model, shape(16, WIDTH, spec=("data",)), target=target).found
        assert (merged.kind, merged.num_bytes, merged.phase) == ("all-reduce", 4 * (2 * WIDTH + 2), "backward")
        assert merged.source == line_of(inspect.unwrap(step), "nnx.grad")


def test_lowered_and_compiled_programs_texts_and_files_are_read(tmp_path):
    lowered = jax.jit(jax.grad(loss_fn)).lower(fsdp_params(), shape(16, WIDTH, spec=("data",)))
    compiled, file = lowered.compile(), tmp_path / "step.hlo"
    file.write_text(compiled.as_text())
    of_all = [collectives(one) for one in (lowered, compiled, compiled.as_text(), file)]
    assert len({str(one) for one in of_all}) == 1 and of_all[0].in_loops("all-gather")
    mapped = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i", devices=jax.devices()[:2])
    assert collectives(mapped, jnp.ones((2, 3))).pairs == [("all-reduce", 12)]


def test_a_text_from_elsewhere_is_read_and_what_is_unknown_is_listed():
    text = """
HloModule elsewhere, is_scheduled=true

ENTRY %main (x: f32[4,8]) -> f32[8,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %gathered = f32[8,8]{1,0} all-gather(f32[4,8]{1,0} %x), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  ROOT %y = f32[8,8]{1,0} of-tomorrow(f32[8,8]{1,0} %gathered)
}
"""
    found = collectives(text)
    assert (found.pairs, found.num_devices) == ([("all-gather", 256)], 2)
    (note,) = found.notes
    assert note in str(found) and note.startswith("of-tomorrow: its FLOPs are unknown")


@pytest.mark.parametrize(
    ("program", "args", "options", "said"),
    [
        ("HloModule m\n\nENTRY %main () -> f32[] {\n}\n", (), {}, "scheduled"),
        ("HloModule m", (1,), {}, "args"),
        (3, (), {}, "cannot be read"),
        (jnp.sum, (jnp.ones(4),), {"target": "h100:8"}, "shardings"),
        (jnp.sum, (shape(16, spec=("data",)),), {"target": "h100:8"}, "devices"),
        (lambda x: jax.debug.print("{}", x), (shape(16),), {"target": "h100:4"}, "be left out, which calls Python"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(program, args, options, said):
    assert said in refusal(collectives, program, *args, **options)


@pytest.mark.parametrize("chip", ["h100", "v5p"])
def test_a_program_of_simulated_devices_is_compiled_for_a_target(chip):
    step = jax.jit(accumulated, donate_argnums=0)
    over = jaxddp.targets.mesh(f"{chip}:4")
    batches = shape(5, 16, WIDTH, spec=(None, "data"), over=over)
    found = collectives(step, fsdp_params(over), batches, target=f"{chip}:4")
    assert found.num_devices == 4 and found.in_loops()
    assert sum(one.count for one in found.in_loops() if Loop(LAYERS, 3) in one.loops) >= 15


def test_meshes_as_jax_makes_them_and_arrays_without_shardings_are_compiled_for_a_target():
    explicit = jax.make_mesh((NUM_RANKS,), ("data",), axis_types=(AxisType.Explicit,))
    x, w = shape(16, WIDTH, spec=("data",), over=explicit), shape(WIDTH, WIDTH, over=explicit)
    loss = jax.jit(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)))
    of_ranks = over_ranks(lambda x: jax.lax.psum(x, "data"))
    for program, args in ((loss, (w, x)), (of_ranks, (jnp.ones((8, WIDTH)),))):
        assert collectives(program, *args, target="h100:4").pairs == collectives(program, *args).pairs != []


def over_ranks(function, in_specs=P("data"), out_specs=P("data"), over=None):  # noqa: B008
    over = over or grid(NUM_RANKS, names=["data"])
    return jax.shard_map(function, mesh=over, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def test_groups_that_differ_in_size_count_as_the_largest():
    def sums(x):
        return jax.lax.psum(x, "data", axis_index_groups=[[0], [1, 2, 3]])

    (one,) = collectives(over_ranks(sums), jnp.ones(NUM_RANKS)).found
    assert (one.num_bytes, one.num_ranks, one.axes) == (4, 3, None)


class Model:
    @functools.partial(jax.jit, static_argnums=0)
    def loss(self, x):
        return over_ranks(lambda x: jax.lax.psum(x, "data"))(x)


def test_a_jitted_method_has_its_self():
    assert collectives(Model().loss, jnp.ones(NUM_RANKS)).pairs == [("all-reduce", 4)]


def test_what_is_donated_of_a_jitted_function_is_donated_on_a_target(monkeypatch):
    requests = []
    monkeypatch.setattr(targets, "_pending", lambda target, request, *others: requests.append(request) or one)
    one = SimpleNamespace(result=lambda: None)
    over = jaxddp.targets.mesh("h100:4")
    state = {"a": shape(4, over=over), "b": shape(8, over=over)}
    step = jax.jit(lambda state, x: (jax.tree.map(lambda leaf: leaf + x.sum(), state), x.sum()), donate_argnums=0)
    targets.start_compile_traced(targets.target("h100:4"), step.trace(state, shape(4, over=over)))
    assert pickle.loads(requests[0])["options"]["donate_argnums"] == [0, 1]


def test_options_of_a_jitted_function_reach_the_compiler_of_a_target():
    over = jaxddp.targets.mesh("h100:4")

    def sums(x):
        return jax.lax.psum(x, "data"), jax.lax.psum(x[:, :1], "data")

    mapped = over_ranks(sums, P("data"), P(), over)
    x = shape(8, 3, spec=("data",), over=over)
    # Those of zero1 merge no all-reduces.
    apart = collectives(jaxddp.jit(mapped, jaxddp.zero1(), platform="gpu"), x, target="h100:4")
    merged = collectives(mapped, x, target="h100:4")
    assert apart.pairs == [("all-reduce", 8), ("all-reduce", 24)] and merged.pairs == [("all-reduce", 32)]


def test_gradients_that_are_reduced_in_a_branch_are_not_of_the_forward():
    def step(w, x, flag):
        grads = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return jax.lax.cond(flag, lambda g: jax.lax.pmean(g, "data"), lambda g: g, grads)

    mapped = over_ranks(step, (P(), P("data"), P()), P())
    (one,) = collectives(mapped, shape(WIDTH, WIDTH), shape(8, WIDTH, spec=("data",)), shape().update(dtype=bool)).found
    assert one.phase != "forward"


def test_a_permutation_has_the_axes_along_which_it_sends():
    over, ring = grid(2, 4, names=["data", "stage"]), [(rank, (rank + 1) % 4) for rank in range(4)]
    spec = P("data", "stage")
    mapped = over_ranks(lambda x: jax.lax.ppermute(x, "stage", ring), spec, spec, over)
    (one,) = collectives(mapped, shape(8, 16, spec=("data", "stage"), over=over)).found
    assert (one.num_ranks, one.axes) == (4, ("stage",))


def test_a_collective_in_a_branch_is_marked_since_it_may_not_run():
    """Statistics that 12 layers sum every tenth step, in a loop over three batches, and a sum that is always there."""

    def layers(x):
        return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "data"), None), x, length=12)[0]

    def step(xs, count):
        def body(count, x):
            return count + 1, jax.lax.cond(count % 10 == 0, layers, lambda x: x, x)

        return jax.lax.scan(body, count, xs)[1], jax.lax.psum(xs, "data")

    mapped = over_ranks(step, (P(), P()), P())
    found = collectives(mapped, shape(3, WIDTH), shape().update(dtype=jnp.int32))
    assert sorted((one.num_bytes, one.count, one.is_conditional) for one in found.found) == [
        (4 * WIDTH, 36, True), (3 * 4 * WIDTH, 1, False)
    ]  # fmt: skip
    assert [[loop.trips for loop in one.loops] for one in found.found if one.is_conditional] == [[3, 12]]
    printed = str(found).splitlines()
    assert [line for line in printed if "up to 36" in line] and "Up to: in a branch" in printed[-1]
