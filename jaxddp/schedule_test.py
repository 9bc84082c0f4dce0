# ruff: noqa: E501
import pytest

from jaxddp.schedule import gradient_collectives, read_program

HEADER = "HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}\n"
GPU_TEXT = (
    HEADER
    + """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (carry: (s32[], f32[16])) -> (s32[], f32[16]) {
  %carry = (s32[], f32[16]{0}) parameter(0)
  %value = f32[16]{0} get-tuple-element(%carry), index=1
  %in_loop = f32[16]{0} all-reduce(%value), to_apply=%add, metadata={op_name="jit(step)/while/psum"}
  ROOT %out = (s32[], f32[16]{0}) tuple(%carry, %in_loop)
}

ENTRY %main (p: f32[8], q: bf16[4,4]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %q = bf16[4,4]{1,0} parameter(1)
  %forward = f32[8]{0} multiply(%p, %p), metadata={op_name="jit(step)/jvp()/mul"}
  %ar-start = f32[8]{0} all-reduce-start(%forward), to_apply=%add, metadata={op_name="jit(step)/jaxddp.sync/psum"}
  %backward = f32[8]{0} multiply(%p, %forward), metadata={op_name="jit(step)/transpose(jvp())/mul"}
  %ar-done = f32[8]{0} all-reduce-done(%ar-start)
  %metrics = (f32[2]{0}, f32[3]{0}) all-reduce(%p, %p), to_apply=%add, metadata={op_name="jit(step)/jaxddp.metrics/psum"}
  %ag-start = (bf16[4,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%q), dimensions={0}, metadata={op_name="x"}
  %ag-done = bf16[16,4]{1,0} all-gather-done(%ag-start)
  %rs = f32[2]{0} reduce-scatter(%backward), dimensions={0}, to_apply=%add, metadata={op_name="jit(step)/transpose(jvp())/x"}
  %loop = (s32[], f32[16]{0}) while(%p), condition=%cond, body=%body, metadata={op_name="jit(step)/while"}
  ROOT %result = f32[8]{0} copy(%ar-done)
}
"""
)  # noqa: E501


def test_kinds_bytes_and_positions():
    program = read_program(GPU_TEXT)
    found = [(c.kind, c.num_bytes, program.entry[c.position].name) for c in program.collectives()]
    assert found == [
        ("all-reduce", 32, "ar-start"),
        ("all-reduce", 64, "metrics"),
        ("all-gather", 128, "ag-start"),
        ("reduce-scatter", 32, "rs"),
        ("all-reduce", 64, "loop"),
    ]


def test_the_backward_ends_with_its_last_computation_not_with_a_collective():
    program = read_program(GPU_TEXT)
    assert program.entry[program.last_backward()].name == "backward"


def test_metrics_are_told_apart_by_their_scope_not_by_size():
    assert gradient_collectives(GPU_TEXT) == sorted(
        [("all-reduce", 32), ("all-gather", 128), ("reduce-scatter", 32), ("all-reduce", 64)]
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"text \(=''...\) must be a compiled HLO module"),
        ("module @jit_step", r"text \(='module @jit_step'...\) must be a compiled HLO module"),
        (GPU_TEXT.replace(", is_scheduled=true", ""), "the HLO module is not scheduled: compile it first"),
        (HEADER, "the HLO module has no entry computation: the text is cut off"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read_program(text)
