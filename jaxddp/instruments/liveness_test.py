"""What is alive when: by hand on small programs, and against the compiler's own plan."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxddp
from jaxddp.instruments.memory import Buffer, read_liveness

HEADER = "HloModule m, is_scheduled=true, num_partitions=2\n\n"
SCOPES = {
    "forward": "jit(f)/jvp()/dot_general",
    "backward": "jit(f)/transpose(jvp())/dot_general",
    "sync": "jit(f)/jaxddp.sync/concatenate",
    "metrics": "jit(f)/jaxddp.metrics/all_reduce",
    "optimizer": "jit(f)/jaxddp.optimizer/mul",
}
FUSED = """%fused (p: f32[4], q: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %q = f32[4]{0} parameter(1)
  ROOT %n = f32[4]{0} add(%p, %q)
}

"""


def program(*lines, before=""):
    """A program whose last line is its result; a name of ``SCOPES`` in angle brackets becomes metadata."""
    body = ""
    for place, line in enumerate(lines):
        text, _, scope = line.partition(" <")
        root = "ROOT " if place == len(lines) - 1 else ""
        metadata = f', metadata={{op_name="{SCOPES[scope[:-1]]}"}}' if scope else ""
        body += f"  {root}{text}{metadata}\n"
    return f"{HEADER}{before}ENTRY %main () -> f32[4] {{\n{body}}}\n"


def spans(text):
    return {buffer.name: (buffer.first, buffer.last) for buffer in read_liveness(text).buffers}


def test_an_array_lives_from_where_it_is_made_to_its_last_use():
    liveness = read_liveness(
        program(
            "%x = f32[4]{0} parameter(0)",
            "%a = f32[4,4]{1,0} broadcast(%x), dimensions={0} <forward>",
            "%b = f32[4]{0} reduce-window(%a) <backward>",
            "%c = f32[4]{0} sort(%b)",
            "%d = f32[4]{0} sort(%c)",
        )
    )
    # The argument and the result are not counted.
    assert liveness.buffers == (
        Buffer("a", 64, "activations", 1, 2),
        Buffer("b", 16, "gradients", 2, 3),
        Buffer("c", 16, "updates", 3, 4),
    )
    assert [sum(liveness.alive(place).values()) for place in range(5)] == [0, 64, 80, 32, 16]
    assert liveness.peak() == {"activations": 64, "gradients": 16, "buckets": 0, "updates": 0}
    assert liveness.backward_end == 3
    assert liveness.peak(liveness.backward_end) == {"activations": 0, "gradients": 16, "buckets": 0, "updates": 16}


def test_parts_of_nested_tuples():
    assert spans(
        program(
            "%x = f32[4]{0} parameter(0)",
            "%a = f32[4]{0} sort(%x)",
            "%b = f32[4]{0} sort(%x)",
            "%c = f32[4]{0} sort(%x)",
            "%t = (f32[4]{0}, f32[4]{0}) tuple(%a, %b)",
            "%u = ((f32[4]{0}, f32[4]{0}), f32[4]{0}) tuple(%t, %c)",
            "%v = (f32[4]{0}, f32[4]{0}) get-tuple-element(%u), index=0",
            "%w = f32[4]{0} get-tuple-element(%u), index=1",
            "%g = f32[4]{0} get-tuple-element(%v), index=1",
            "%d = f32[4]{0} sort(%g)",
            "%e = f32[4]{0} sort(%w, %d)",
        )
    ) == {"a": (1, 1), "b": (2, 9), "c": (3, 10), "d": (9, 10)}


@pytest.mark.parametrize(
    ("makes", "in_place"),
    [
        ("f32[4]{0} fusion(%a, %x), kind=kLoop, calls=%fused", True),
        ("f32[4]{0} dynamic-update-slice(%a, %x, %x)", True),
        ("f32[4]{0} all-reduce(%a), replica_groups={{0,1}}", True),
        ("f32[4]{0} sort(%a)", False),
        ("f32[2]{0} fusion(%a, %x), kind=kLoop, calls=%fused", False),  # of another size
    ],
)
def test_some_operations_take_the_place_of_an_operand_that_ends_there(makes, in_place):
    lines = ["%x = f32[4]{0} parameter(0)", "%a = f32[4]{0} sort(%x)", f"%b = {makes}", "%c = f32[4]{0} sort(%b)"]
    assert spans(program(*lines, before=FUSED))["a"] == (1, 1 if in_place else 2)
    assert spans(program(*lines[:3], "%c = f32[4]{0} sort(%b, %a)", before=FUSED))["a"] == (1, 3)  # needed later


def test_what_is_sent_lives_until_it_is_waited_for():
    text = program(
        "%x = f32[4]{0} parameter(0)",
        "%a = f32[8]{0} sort(%x) <sync>",
        "%s = (f32[8]{0}, f32[4]{0}) reduce-scatter-start(%a), replica_groups={{0,1}}, dimensions={0} <sync>",
        "%w = f32[2]{0} sort(%x)",
        "%d = f32[4]{0} reduce-scatter-done(%s)",
        "%q = (f32[4]{0}, f32[4]{0}, u32[]) copy-start(%d)",
        "%r = f32[4]{0} copy-done(%q)",
        "%m = f32[]{} all-reduce(%w), replica_groups={{0,1}} <metrics>",
        "%e = f32[4]{0} sort(%r)",
    )
    found = {(buffer.name, buffer.num_bytes, buffer.kind): buffer[3:] for buffer in read_liveness(text).buffers}
    assert found == {
        ("a", 32, "buckets"): (1, 4),
        ("s", 16, "buckets"): (2, 6),
        ("w", 8, "activations"): (3, 7),
        ("q", 16, "activations"): (5, 8),
        ("q", 4, "activations"): (5, 6),
        ("m", 4, "activations"): (7, 7),
    }


LOOP = """%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[4]{0} get-tuple-element(%p), index=1
  %big = f32[4,4]{1,0} broadcast(%v), dimensions={0}
  %next = f32[4]{0} sort(%big)
  ROOT %t = (s32[], f32[4]{0}) tuple(%i, %next)
}

%condition (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %i), direction=LT
}

"""


def test_a_loop_carries_its_state_in_place_and_holds_what_its_body_does():
    liveness = read_liveness(
        program(
            "%x = f32[4]{0} parameter(0)",
            "%n = s32[] parameter(1)",
            "%a = f32[4]{0} sort(%x)",
            "%t = (s32[], f32[4]{0}) tuple(%n, %a)",
            "%w = (s32[], f32[4]{0}) while(%t), condition=%condition, body=%body",
            "%g = f32[4]{0} get-tuple-element(%w), index=1",
            "%b = f32[4]{0} sort(%g)",
            before=LOOP,
        )
    )
    assert Buffer("a", 16, "activations", 2, 6) in liveness.buffers
    assert sum(liveness.alive(4).values()) == 16 + 64  # what the body carries on is the state's own
    assert sum(liveness.alive(5).values()) == 16


@pytest.mark.parametrize("name", ["bucketed", "zero2", "zero3"])
def test_the_peak_is_nearly_what_the_compiler_lays_out(name):
    """Of a step with a loop over micro-batches."""
    dense = jaxddp.layer(lambda kernel, x: jnp.tanh(x @ kernel))

    def loss_fn(params, batch):
        x = batch["x"]
        for kernel in params:
            x = dense(kernel, x)
        return jnp.mean(x**2)

    mesh = jaxddp.data_mesh(4)
    trainer = jaxddp.Trainer(loss_fn, optax.adamw(1e-3), jaxddp.make_strategy(name), mesh, num_microbatches=2)
    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    batch = {"x": jax.ShapeDtypeStruct((4 * 256, 256), jnp.float32)}
    program = trainer.compile(trainer.abstract_state(params), batch)
    liveness, temporaries = read_liveness(program), program.memory_analysis().temp_size_in_bytes
    # Gaps between arrays; seen: 0 to 6 % over several models and strategies.
    assert 0.9 * temporaries <= sum(liveness.peak().values()) <= temporaries
