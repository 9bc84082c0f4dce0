import dataclasses

import pytest

from jaxddp.instruments.hlo import parse_module
from jaxddp.instruments.schedule import read_schedule
from jaxddp.instruments.testdata import fixture_names, handmade, schedule_of
from jaxddp.instruments.work import MatmulKind, Work, trip_count, work_of

F32, BF16 = MatmulKind("f32", "default"), MatmulKind("bf16", "default")


def count(*lines, others=""):
    """Counts the last of an entry computation's lines; gives its work and what was noted."""
    module = parse_module(handmade(*lines, others=others))
    return without_shapes(work_of(next(reversed(module.entry.values())))), [*dict.fromkeys(module.notes)]


def without_shapes(work):
    kinds = [kind._replace(shape=()) for kind in work.matmul_flops]
    return dataclasses.replace(work, matmul_flops=dict(zip(kinds, work.matmul_flops.values(), strict=True)))


def work(*lines, others=""):
    counted, notes = count(*lines, others=others)
    assert notes == []
    return counted


def fused(*lines):
    return "%fused () -> f32[] {\n" + "".join(f"  {line}\n" for line in lines) + "}\n\n"


def p(*shapes):
    return "\n  ".join(f"%p{number} = {shape} parameter({number})" for number, shape in enumerate(shapes))


def matmul_flops(work):
    return sum(work.matmul_flops.values())


# One instruction at a time. Bytes are elements x 4 unless said otherwise.


@pytest.mark.parametrize(
    ("shapes", "line", "flops", "num_bytes"),
    [
        (["f32[8,4]"], "f32[8,4]{1,0} add(%p0, %p0)", 32, 128 + 128),  # read once
        (["bf16[10]"], "f32[10]{0} convert(%p0)", 0, 20 + 40),
        (["f32[10]", "f32[10]"], "pred[10]{0} compare(%p0, %p1), direction=LT", 10, 40 + 40 + 10),
        (["f32[]"], "f32[6,5]{1,0} broadcast(%p0), dimensions={}", 0, 120),
        (["f32[100]"], "f32[10]{0} slice(%p0), slice={[5:15]}", 0, 40 + 40),
        (["f32[1000,16]", "s32[4,1]"], "f32[4,16]{1,0} gather(%p0, %p1), slice_sizes={1,16}", 0, 256 + 256),
        (["f32[100]", "f32[10]", "s32[]"], "f32[100]{0} dynamic-update-slice(%p0, %p1, %p2)", 0, 40 + 40),
    ],
)
def test_one_instruction(shapes, line, flops, num_bytes):
    assert work(p(*shapes), f"ROOT %y = {line}") == Work({}, flops, num_bytes)


@pytest.mark.parametrize(
    "line",
    [
        "%y = f32[30] bitcast(%p0)", "%y = (f32[6,5]) tuple(%p0)", "%y = f32[] constant(3)",
        "%y = f32[6,5]{1,0} all-reduce(%p0), to_apply=%fused", "%y = (f32[6,5], f32[48,5]) all-gather-start(%p0)",
        "%y = f32[6,5] all-to-all-done(%p0)", "%y = (f32[6,5], u32[]) send(%p0)", "%y = f32[6,5] fusion-done(%p0)",
    ],
)  # fmt: skip
def test_what_costs_nothing(line):
    assert work(p("f32[6,5]"), f"ROOT {line}", others=fused("ROOT %a = f32[] parameter(0)")) == Work()


def test_reductions():
    add = fused("%a = f32[] parameter(0)", "%b = f32[] parameter(1)", "ROOT %c = f32[] add(%a, %b)")
    zero = "%zero = f32[] constant(0)"
    # 32 elements read and added; 32 + 1 + 8 elements move.
    reduce = "ROOT %y = f32[8]{0} reduce(%p0, %zero), dimensions={1}, to_apply=%fused"
    assert work(p("f32[8,4]"), zero, reduce, others=add) == Work({}, 32, (32 + 1 + 8) * 4)
    # Touches 3 x 16 elements of the operand, reads 3 x 16 updates.
    scatter = "ROOT %y = f32[99,16]{1,0} scatter(%p0, %p1, %p2), to_apply=%fused"
    assert work(p("f32[99,16]", "s32[3,1]", "f32[3,16]"), scatter, others=add) == Work({}, 48, (48 + 48) * 4)


FUSION = "ROOT %y = {} fusion({}), kind=kLoop, calls=%fused"


def test_a_fusion_moves_what_enters_and_leaves_it():
    inside = fused(
        p("f32[10]"), "%a = f32[10] negate(%p0)", "%b = f32[10] exponential(%a)", "%c = f32[10] add(%a, %b)",
        "ROOT %t = (f32[10], f32[10]) tuple(%b, %c)",
    )  # fmt: skip
    assert work("%x = f32[10] parameter(0)", FUSION.format("(f32[10], f32[10])", "%x"), others=inside) == Work(
        {}, 30, 40 + 2 * 40
    )


def test_a_fusion_reads_the_parts_that_it_uses():
    # Two slices of 10 of the 100 elements, then 10 sums.
    inside = fused(
        p("f32[100]"), "%a = f32[10] slice(%p0), slice={[0:10]}", "%b = f32[10] slice(%p0), slice={[20:30]}",
        "ROOT %c = f32[10] add(%a, %b)",
    )  # fmt: skip
    assert work("%x = f32[100] parameter(0)", FUSION.format("f32[10]", "%x"), others=inside) == Work({}, 10, 80 + 40)
    # Only a tenth of the exponentials is computed.
    inside = fused(p("f32[100]"), "%a = f32[100] exponential(%p0)", "ROOT %b = f32[10] slice(%a), slice={[0:10]}")
    assert work("%x = f32[100] parameter(0)", FUSION.format("f32[10]", "%x"), others=inside) == Work({}, 10, 40 + 40)
    # An array that is given twice is read once.
    inside = fused(p("f32[10]", "f32[10]"), "ROOT %a = f32[10] add(%p0, %p1)")
    assert work("%x = f32[10] parameter(0)", FUSION.format("f32[10]", "%x, %x"), others=inside) == Work({}, 10, 40 + 40)


def test_a_fusion_that_updates_in_place():
    update = "ROOT %u = f32[100] dynamic-update-slice({}, %n, %p2)"
    given = p("f32[100]", "f32[10]", "s32[]")
    outside = "%x = f32[100] parameter(0)", "%a = f32[10] parameter(1)", "%i = s32[] parameter(2)"
    fusion = FUSION.format("f32[100]", "%x, %a, %i")
    # Reads 10 elements and an index, writes 10.
    inside = fused(given, "%n = f32[10] negate(%p1)", update.format("%p0"))
    assert work(*outside, fusion, others=inside) == Work({}, 10, 40 + 4 + 40)
    # What is updated is made inside: all 100 are written, and from all 100.
    inside = fused(given, "%n = f32[10] negate(%p1)", "%e = f32[100] negate(%p0)", update.format("%e"))
    assert work(*outside, fusion, others=inside) == Work({}, 110, 400 + 40 + 4 + 400)


def test_a_loop_counts_as_often_as_it_runs_and_once_if_that_is_unknown():
    # Each round an addition of 4 elements and a comparison of one.
    inside = (
        "%body () -> f32[4] {\n  %a = f32[4] parameter(0)\n  ROOT %b = f32[4] add(%a, %a)\n}\n\n"
        "%cond () -> pred[] {\n  %a = s32[] parameter(0)\n  ROOT %b = pred[] compare(%a, %a), direction=NE\n}\n\n"
    )
    once = Work({}, 4 + 1, 16 + 16 + 4 + 1)
    loop = "ROOT %w = f32[4] while(%p0), condition=%cond, body=%body"
    known = ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    assert work(p("f32[4]"), loop + known, others=inside) == once.times(7)
    assert count(p("f32[4]"), loop, others=inside) == (once, ["loop w: trip count unknown, counted once"])


def test_calls_and_branches():
    heavy = "%heavy () -> f32[4] {\n  %a = f32[4] parameter(0)\n  ROOT %b = f32[4] negate(%a)\n}\n\n"
    light = "%light () -> f32[4] {\n  ROOT %a = f32[4] parameter(0)\n}\n\n"
    call = "ROOT %y = f32[4] call(%p0), to_apply=%heavy"
    assert work(p("f32[4]"), call, others=heavy) == Work({}, 4, 32)
    branch = "ROOT %y = f32[4] conditional(%i, %p0, %p0), branch_computations={%light, %heavy}"
    assert work(p("f32[4]"), "%i = s32[] constant(0)", branch, others=light + heavy) == Work({}, 4, 32)  # the dearest


def test_asynchronous_work_is_that_of_its_start():
    twice = fused(p("f32[4]"), "%a = f32[4] negate(%p0)", "ROOT %b = f32[4] negate(%a)")
    start = "ROOT %y = ((f32[4]{0}), f32[4]{0}, u32[]) KIND-start(%p0), calls=%fused"
    assert work(p("f32[4]"), start.replace("KIND", "fusion"), others=twice) == Work({}, 8, 32)
    assert work(p("f32[4]"), start.replace("KIND", "async"), others=twice) == Work({}, 8, 64)


def test_memory_on_the_chip_of_a_tpu():
    main, chip = "f32[4]{0:T(128)}", "f32[4]{0:T(128)S(1)}"
    prefetch = f"ROOT %y = ({chip}, {main}, u32[]{{:S(2)}}) copy-start(%p0)"
    assert work(p(main), prefetch) == Work({}, 0, 16)
    assert work(p(main), prefetch.replace("S(1)", "")) == Work({}, 0, 32)
    negate = fused(p(chip), f"ROOT %b = {main} negate(%p0)")
    assert work(f"%x = {chip} parameter(0)", FUSION.format(main, "%x"), others=negate) == Work({}, 4, 16)
    assert work(p(chip), f"ROOT %y = {chip} negate(%p0)") == Work({}, 4, 0)
    assert work(p("f32[8]{0:T(128)S(1)}"), f"ROOT %y = {main} slice(%p0), slice={{[0:4]}}") == Work({}, 0, 16)
    # Without tiles it is no TPU's: GPUs give this space to collectives, in main memory.
    assert work(p("f32[4]{0:S(1)}"), "ROOT %y = f32[4]{0:S(1)} negate(%p0)") == Work({}, 4, 32)


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ('f32[8] custom-call(%p0), custom_call_target="mine"', "mine: its FLOPs are unknown"),
        ("c64[4] fft(%p0), fft_type=FFT, fft_length={4}", "fft: its FLOPs are unknown"),
    ],
)
def test_what_cannot_be_counted_is_said(line, note):
    counted, (said,) = count(p("c64[4]"), f"ROOT %y = {line}")
    assert counted == Work({}, 0, 64) and said.startswith(note)


@pytest.mark.parametrize("name", fixture_names("gpu-products-*"))
def test_products_of_two_precisions_and_a_convolution(name):
    schedule = schedule_of(name)
    assert without_shapes(schedule.work()).matmul_flops == {
        BF16: 2 * 192 * 192 * 384,
        MatmulKind("f32", "highest"): 2 * 384 * 384 * 192,
        # 4 images, 32 features out of 96, 6 x 16 outputs, windows of 3 x 3: GPU programs pad first.
        F32: 2 * 4 * 32 * 96 * (6 * 3) * (16 * 3),
    }
    assert schedule.notes == ()


def test_matrix_products():
    # 3 batches x 4 x 6 results, each over 5: 2 * 3 * 24 * 5. Reads 60 + 90, writes 72.
    dot = (
        "ROOT %y = f32[3,4,6]{2,1,0} dot(%p0, %p1), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}"
    )
    lines = p("f32[3,4,5]", "f32[3,5,6]"), dot
    assert work(*lines) == Work({F32: 720}, 0, (60 + 90 + 72) * 4)
    (kind,) = read_schedule(handmade(*lines)).work().matmul_flops
    assert kind == F32._replace(shape=(3, 4, 6, 5))
    # Two contracted dims, bfloat16 factors, float32 result: 2 * 1 * 12.
    dot = "ROOT %y = f32[] dot(%p0, %p0), lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1}"
    assert work(p("bf16[3,4]"), dot + ", operand_precision={high,high}") == Work(
        {MatmulKind("bf16", "high"): 24}, 0, 24 + 4
    )


def test_matrix_products_of_libraries():
    # Contracts dim 0 of [8,4] with dim 0 of [8,6]; the workspace does not count.
    gemm = (
        'ROOT %y = (bf16[4,6]{1,0}, s8[4194304]{0}) custom-call(%p0, %p1), custom_call_target="__cublas$gemm", '
        'backend_config={"operation_queue_id":"0","wait_on_operation_queues":[],"gemm_backend_config":{"alpha_real":1,'
        '"alpha_imag":0,"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"precision_config":'
        '{"operand_precision":["HIGHEST","HIGHEST"],"algorithm":"ALG_UNSET"},"epilogue":"DEFAULT"}}'
    )
    kind = MatmulKind("bf16", "highest")
    assert work(p("bf16[8,4]", "bf16[8,6]"), gemm) == Work({kind: 2 * 24 * 8}, 0, (32 + 48 + 24) * 2)


@pytest.mark.parametrize(("target", "mask", "flops"), [("Softmax", "NO_MASK", 4), ("SoftmaxBackward", "CAUSAL", 5)])
def test_cudnns_attention_is_counted_by_the_shape_of_its_scores(target, mask, flops):
    """Two batches of 3 heads, 16 queries and 32 keys of width 8: products of 2 x 2 x 3 x 16 x 32 x 8 FLOPs."""
    call = (
        f'ROOT %y = (bf16[2,16,3,8], u8[0]{{0}}) custom-call(%p0, %p1, %p1), custom_call_target="__cudnn$fmha{target}",'
        ' backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":'
        f'["2","3","16","32"]}},"is_flash_attention":true,"mask_type":"{mask}"}}}}'
    )
    kind = BF16._replace(is_attention=True)
    counted = work(p("bf16[2,16,3,8]", "bf16[2,32,3,8]"), call)
    assert counted.matmul_flops == {kind: flops * 2 * 3 * 16 * 32 * 8} and counted.vector_flops == 0


def test_convolutions():
    # Rows: 4 outputs of stride 2 over 7 with one row of padding before: windows of 3 meet 2, 3, 3, 2 rows (the last has
    # one below the image). Columns: window 1. 2 * (10 pairs * 5 columns) * 2 images * 6 features out * 3 in.
    image, kernel, result = "f32[2,7,5,3]", "f32[3,1,3,6]", "f32[2,4,5,6]"
    shape, window = "f32[2,4,5,6]{3,2,1,0}", "window={size=3x1 stride=2x1 pad=1_1x0_0}, dim_labels=b01f_01io->b01f"
    plain = work(p(image, kernel), f"ROOT %y = {shape} convolution(%p0, %p1), {window}")
    assert plain == Work({F32: 2 * 50 * 2 * 6 * 3}, 0, (210 + 54 + 240) * 4)
    # The library's gradients do the same products, whichever of the three arrays they give.
    for name, *given, gives in (
        ("Forward", image, kernel, shape), ("BackwardInput", result, kernel, image),
        ("BackwardFilter", image, result, kernel),
    ):  # fmt: skip
        call = f'custom-call(%p0, %p1), {window}, custom_call_target="__cudnn$conv{name}"'
        assert work(p(*given), f"ROOT %y = ({gives}, u8[99]{{0}}) {call}") == plain
    # In 3 groups of 2 features each output sees the 2 of its group: the kernel says so. 2 * 16 results * 6 * 2.
    line = (
        "ROOT %y = f32[1,16,6] convolution(%p0, %p1), window={size=1}, dim_labels=b0f_0io->b0f, feature_group_count=3"
    )
    assert matmul_flops(work(p("f32[1,16,6]", "f32[1,2,6]"), line)) == 2 * 16 * 6 * 2


def test_matrix_products_that_a_tpu_prints_as_convolutions():
    # [6,16,16] x [6,16,8], batch of 6: 2 * 6 * 16 * 8 * 16. The batch is dilated so that each output meets one element.
    line = "ROOT %y = f32[6,16,8] convolution(%p0, %p1), window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf"
    assert matmul_flops(work(p("f32[6,16,16]", "f32[6,16,8]"), line)) == 2 * 6 * 16 * 8 * 16
    # [96,16] x [16,2,8]: 2 heads are a window that is reversed over an image of one. 2 * 96 * 16 * 2 * 8.
    line = (
        "ROOT %y = f32[96,2,8] convolution(%p0, %p1), window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=b0f_i0o->b0f"
    )
    assert matmul_flops(work(p("f32[96,1,16]", "f32[16,2,8]"), line)) == 2 * 96 * 16 * 2 * 8


LOOP = "%cond () -> pred[] {\n  %s = (s32[]) parameter(0)\n  %i = s32[] get-tuple-element(%s), index=0\n" \
    "  %n = s32[] constant(11)\n  ROOT %r = pred[] compare(%i, %n), direction=LT\n}\n\n" \
    "%body () -> (s32[]) {\n  %s = (s32[]) parameter(0)\n  %i = s32[] get-tuple-element(%s), index=0\n" \
    "  %k = s32[] constant(3)\n  %j = s32[] add(%i, %k)\n  ROOT %r = (s32[]) tuple(%j)\n}\n\n"  # fmt: skip


def trips(old, new):
    """Trips of a loop that counts 1, 4, 7, 10 to 11, with one thing about it changed."""
    text = handmade(
        "%one = s32[] constant(1)", "%c = s32[] copy(%one)", "%t = (s32[]) tuple(%c)",
        "ROOT %w = (s32[]) while(%t), condition=%cond, body=%body", others=LOOP,
    )  # fmt: skip
    assert old in text
    return trip_count(parse_module(text.replace(old, new)).entry["w"])


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [
        ("constant(11)", "constant(10)", 3),
        ("constant(11)", "constant(1)", 0),
        ("constant(1)", "constant(-2)", 5),
        ("%one = s32[] constant(1)", "%one = s32[] parameter(0)", None),  # starts anywhere
        ("%n = s32[] constant(11)", "%n = s32[] negate(%i)", None),  # ends anywhere
        ("add(%i, %k)", "add(%i, %i)", None),  # doubles
        ("direction=LT", "direction=NE", None),
        ("ROOT %r = (s32[]) tuple(%j)", "ROOT %r = (s32[]) custom-call(%j)", None),
    ],
)
def test_trips_are_counted_if_the_loop_tells(old, new, count):
    assert trips(old, new) == count
