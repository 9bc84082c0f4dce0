import random

import jax
import jax.numpy as jnp

from jaxddp.compiled.hlo import parse_module
from jaxddp.compiled.testdata import handmade
from jaxddp.compiled.work import MatmulKind, Work, WorkCounter

F32, BF16 = MatmulKind("f32", "default"), MatmulKind("bf16", "default")


def work(*lines):
    """Work of the last of an entry computation's lines."""
    module = parse_module(handmade(*lines))
    main = module.computations["main"]
    return WorkCounter(module).of(next(reversed(main.values())), main)


def p(shape, number=0):
    return f"%p{number} = {shape} parameter({number})"


def matmul_flops(work):
    return sum(work.matmul_flops.values())


def test_matrix_products():
    # 3 batches x 4 x 6 results, each over 5: 2 * 3 * 24 * 5. Reads 60 + 90, writes 72.
    dot = (
        "ROOT %y = f32[3,4,6]{2,1,0} dot(%p0, %p1), lhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_batch_dims={0}, rhs_contracting_dims={1}"
    )
    assert work(p("f32[3,4,5]"), p("f32[3,5,6]", 1), dot) == Work({F32: 720}, 0, (60 + 90 + 72) * 4)
    # Two contracted dims, bfloat16 factors, float32 result: 2 * 1 * 12.
    dot = "ROOT %y = f32[] dot(%p0, %p0), lhs_contracting_dims={0,1}, rhs_contracting_dims={0,1}"
    assert work(p("bf16[3,4]"), dot + ", operand_precision={high,high}") == Work(
        {MatmulKind("bf16", "high"): 24}, 0, 24 + 4
    )


def test_matrix_products_of_libraries():
    # As printed by jax 0.4 to 0.7 for GPUs: contracts dim 0 of [8,4] with dim 0 of [8,6]; the workspace does not count.
    gemm = (
        'ROOT %y = (bf16[4,6]{1,0}, s8[4194304]{0}) custom-call(%p0, %p1), custom_call_target="__cublas$gemm", '
        'backend_config={"operation_queue_id":"0","wait_on_operation_queues":[],"gemm_backend_config":{"alpha_real":1,'
        '"alpha_imag":0,"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],'
        '"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"precision_config":'
        '{"operand_precision":["HIGHEST","HIGHEST"],"algorithm":"ALG_UNSET"},"epilogue":"DEFAULT"}}'
    )
    kind = MatmulKind("bf16", "highest")
    arrays = p("bf16[8,4]"), p("bf16[8,6]", 1)
    assert work(*arrays, gemm) == Work({kind: 2 * 24 * 8}, 0, (32 + 48 + 24) * 2)
    onednn = 'ROOT %y = bf16[4,6]{1,0} custom-call(%p0, %p1), custom_call_target="__onednn$matmul"'
    assert work(p("bf16[4,8]"), p("bf16[8,6]", 1), onednn) == Work({BF16: 2 * 24 * 8}, 0, (32 + 48 + 24) * 2)


def test_convolutions():
    # Rows: 4 outputs of stride 2 over 7 with one row of padding before: windows of 3 meet 2, 3, 3, 2 rows (the last has
    # one below the image). Columns: window 1. 2 * (10 pairs * 5 columns) * 2 images * 6 features out * 3 in.
    arrays = p("f32[2,7,5,3]"), p("f32[3,1,3,6]", 1)
    shape, window = "f32[2,4,5,6]{3,2,1,0}", "window={size=3x1 stride=2x1 pad=1_1x0_0}, dim_labels=b01f_01io->b01f"
    plain = work(*arrays, f"ROOT %y = {shape} convolution(%p0, %p1), {window}")
    assert plain == Work({F32: 2 * 50 * 2 * 6 * 3}, 0, (210 + 54 + 240) * 4)
    # The library's gradients do the same products, whichever of the three arrays they give.
    target = 'custom_call_target="__cudnn$conv'
    call = f'ROOT %y = ({shape}, u8[99]{{0}}) custom-call(%p0, %p1), {window}, {target}Forward"'
    assert work(*arrays, call) == plain
    call = f'ROOT %y = (f32[2,7,5,3], u8[0]{{0}}) custom-call(%p0, %p1), {window}, {target}BackwardInput"'
    assert work(p("f32[2,4,5,6]"), arrays[1], call) == plain
    call = f'ROOT %y = (f32[3,1,3,6], u8[0]{{0}}) custom-call(%p0, %p1), {window}, {target}BackwardFilter"'
    assert work(arrays[0], p("f32[2,4,5,6]", 1), call) == plain
    # In 3 groups of 2 features each output sees the 2 of its group: the kernel says so. 2 * 16 results * 6 * 2.
    line = (
        "ROOT %y = f32[1,16,6] convolution(%p0, %p1), window={size=1}, dim_labels=b0f_0io->b0f, feature_group_count=3"
    )
    assert matmul_flops(work(p("f32[1,16,6]"), p("f32[1,2,6]", 1), line)) == 2 * 16 * 6 * 2


def test_convolutions_against_every_pair_of_places():
    rng = random.Random(0)
    for _ in range(300):
        stride, base, dilation, low = rng.randint(1, 6), rng.randint(1, 6), rng.randint(1, 4), rng.randint(-3, 5)
        size_in, size_out, size = rng.randint(1, 9), rng.randint(1, 12), rng.randint(1, 6)
        places = (o * stride + k * dilation - low for o in range(size_out) for k in range(size))
        pairs = sum(place % base == 0 and 0 <= place // base < size_in for place in places)
        window = f"window={{size={size} stride={stride} pad={low}_0 lhs_dilate={base} rhs_dilate={dilation}}}"
        line = f"ROOT %y = f32[1,{size_out},1] convolution(%p0, %p1), {window}, dim_labels=b0f_0io->b0f"
        assert matmul_flops(work(p(f"f32[1,{size_in},1]"), p(f"f32[{size},1,1]", 1), line)) == 2 * pairs, line


def test_matrix_products_that_a_tpu_prints_as_convolutions():
    # [6,16,16] x [6,16,8], batch of 6: 2 * 6 * 16 * 8 * 16. The batch is dilated so that each output meets one element.
    line = "ROOT %y = f32[6,16,8] convolution(%p0, %p1), window={size=6 stride=5 lhs_dilate=6}, dim_labels=0bf_0io->0bf"
    assert matmul_flops(work(p("f32[6,16,16]"), p("f32[6,16,8]", 1), line)) == 2 * 6 * 16 * 8 * 16
    # [96,16] x [16,2,8]: 2 heads are a window that is reversed over an image of one. 2 * 96 * 16 * 2 * 8.
    line = (
        "ROOT %y = f32[96,2,8] convolution(%p0, %p1), window={size=2 pad=1_1 rhs_reversal=1}, dim_labels=b0f_i0o->b0f"
    )
    assert matmul_flops(work(p("f32[96,1,16]"), p("f32[16,2,8]", 1), line)) == 2 * 96 * 16 * 2 * 8
    line = "ROOT %y = f32[96,8] convolution(%p0, %p1), dim_labels=bf_io->bf"
    assert matmul_flops(work(p("f32[96,16]"), p("f32[16,8]", 1), line)) == 2 * 96 * 16 * 8


def test_products_are_those_of_xla():
    def products(a, b, c):
        return jnp.einsum("bij,bjk->bik", a, b), jnp.einsum("bij,bik->jk", a, a), c @ c.T

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((3, 4, 5), (3, 5, 6), (7, 8))]
    compiled = jax.jit(products).lower(*shapes).compile()
    module = parse_module(compiled)
    step = WorkCounter(module).total(module.computations[module.entry])
    assert step.matmul_flops == {F32: 2 * (3 * 4 * 6 * 5 + 5 * 5 * 12 + 7 * 7 * 8)}
    assert step.flops == compiled.cost_analysis()["flops"]
