import pytest

from jaxddp.comparison_test import refusal
from jaxddp.instruments.hlo_test import ADD
from jaxddp.instruments.schedule import Overlap, read_schedule
from jaxddp.instruments.testdata import handmade
from jaxddp.network import Network

ALL = "replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add"


def module(*lines, before=""):
    """A program on 8 devices of some instructions after the parameters p (256 bytes) and q (64 bytes)."""
    given = "%p = f32[16,4]{1,0} parameter(0)", "%q = bf16[8,4]{1,0} parameter(1)"
    text = handmade(*given, *lines[:-1], f"ROOT {lines[-1]}", others=f"{ADD}{before}\n")
    return text.replace("\n", ", num_partitions=8\n", 1)


def computation(name, *lines):
    body = ["%x = f32[16,4]{1,0} parameter(0)", *lines]
    body[-1] = "ROOT " + body[-1]
    return f"%{name} (x: f32[16,4]) -> f32[16,4] {{\n" + "\n".join(f"  {line}" for line in body) + "\n}\n"


def op(line, scope=""):
    return f'{line}, metadata={{op_name="jit(step)/{scope}"}}'


def single(*lines, **options):
    """The one operation of a program that communicates."""
    found = [operation for operation in read_schedule(module(*lines, **options)).operations if operation.starts]
    assert len(found) == 1
    return found[0]


BACKWARD, OPTIMIZER = "transpose(jvp())/dot", "jaxddp.optimizer/mul"
SYNC, METRICS = "jaxddp.sync/psum", "jaxddp.metrics/psum"


@pytest.mark.parametrize(
    ("line", "kind", "num_bytes"),
    [
        ("%c = f32[16,4]{1,0} all-reduce(%p)", "all-reduce", 256),
        ("%c = (f32[16,4]{1,0}, bf16[8,4]{1,0}) all-reduce(%p, %q)", "all-reduce", 320),
        ("%c = f32[2,4]{1,0} reduce-scatter(%p), dimensions={0}", "reduce-scatter", 256),
        ("%c = bf16[64,4]{1,0} all-gather(%q), dimensions={0}", "all-gather", 512),
        ("%c = f32[16,4]{1,0} all-to-all(%p), dimensions={0}", "all-to-all", 256),
        ("%c = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-to-all(%p, %p)", "all-to-all", 512),
        ("%c = f32[16,4]{1,0} collective-broadcast(%p)", "collective-broadcast", 256),
        ("%c = f32[16,4]{1,0} ragged-all-to-all(%p, %p, %q, %q, %q, %q)", "ragged-all-to-all", 256),
    ],
)
def test_kinds_and_bytes_of_the_full_buffer(line, kind, num_bytes):
    found = single(f"{line}, {ALL}")
    assert (found.starts.kind, found.starts.num_bytes) == (kind, num_bytes)
    assert not found.starts.is_async and found.waits_for == "c"
    assert found.total_work.flops == found.total_work.num_bytes == 0  # it is not the device's own


@pytest.mark.parametrize(
    ("start", "num_bytes"),
    [
        ("%s = f32[16,4]{1,0} all-reduce-start(%p)", 256),
        ("%s = ((f32[16,4]{1,0}), f32[16,4]{1,0}) all-reduce-start(%p)", 256),
        ("%s = (bf16[8,4]{1,0}, bf16[64,4]{1,0}) all-gather-start(%q), dimensions={0}", 512),
        ("%s = ((f32[16,4], bf16[8,4]), (f32[128,4], bf16[64,4])) all-gather-start(%p, %q), dimensions={0}", 2560),
        ("%s = (f32[16,4], f32[16,4], u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p)", 256),
        ("%s = ((f32[16,4]), f32[2,4]) async-start(%p), calls=%wrapped", 256),
    ],
)
@pytest.mark.parametrize("is_sync", [False, True])
def test_a_start_issues_and_a_done_waits(start, num_bytes, is_sync):
    kind = start.split("(%")[0].split()[-1].removesuffix("-start").replace("async", "reduce-scatter")
    config = f'backend_config={{"collective_backend_config":{{"is_sync":{str(is_sync).lower()}}}}}'
    wrapped = computation("wrapped", f"%rs = f32[2,4] reduce-scatter(%x), dimensions={{0}}, {ALL}")
    started = f"{start}, {ALL if 'calls' not in start else 'channel_id=1'}, {config}"
    ended = f"%d = f32[16,4] {'async' if 'calls' in start else kind}-done(%s)"
    schedule = read_schedule(module(started, "%m = f32[16,4] multiply(%p, %p)", ended, before=wrapped))
    issued, _, waited = schedule.operations[2:]
    assert (issued.starts.kind, issued.starts.num_bytes, issued.starts.is_async) == (kind, num_bytes, not is_sync)
    assert (issued.waits_for, waited.starts, waited.waits_for) == ("", None, "s")
    assert schedule.notes == ()


def test_a_done_waits_through_updates_and_other_dones_do_not_wait():
    text = module(
        "%s = ((f32[16,4]), f32[2,4]) async-start(%p), calls=%wrapped",
        "%u = ((f32[16,4]), f32[2,4]) async-update(%s), calls=%wrapped",
        "%k = (f32[16,4], f32[16,4], u32[]) copy-start(%p)", "%kd = f32[16,4] copy-done(%k)",
        "%d = f32[2,4] async-done(%u), calls=%wrapped",
        before=computation("wrapped", f"%rs = f32[2,4] reduce-scatter(%x), {ALL}"),
    )  # fmt: skip
    schedule = read_schedule(text)
    assert [o.name for o in schedule.operations if o.starts] == ["s"]
    assert [(o.name, o.waits_for) for o in schedule.operations if o.waits_for] == [("d", "s")]


SENT = "%t = token[] after-all()", "%n = (f32[16,4], u32[], token[]) send(%p, %t), channel_id=1"
SENT_IN_A_LOOP = "%loop = f32[16,4] while(%p), condition=%cond, body=%body"


@pytest.mark.parametrize("lines", [SENT, (SENT_IN_A_LOOP,)])
def test_what_is_sent_without_a_collective_is_named(lines):
    before = computation("body", *(line.replace("%p", "%x") for line in SENT)) + computation(
        "cond", "%never = pred[] custom-call(%x)"
    )
    schedule = read_schedule(module(*lines, before=before))
    assert schedule.collectives() == [] and schedule.work().flops == 0
    assert "send n: what it transfers is not counted" in schedule.notes


def test_a_permutation_takes_as_long_as_its_slowest_pair():
    network = Network(300, latency_us=0, host_gb_per_s=25, devices_per_host=8)
    around = [(rank, (rank + 1) % 16) for rank in range(16)]
    within = [(rank, rank ^ 1) for rank in range(16)]
    for pairs, gb_per_s in ((around, 25), (within, 300)):
        printed = ",".join(f"{{{source},{target}}}" for source, target in pairs)
        found = single(f"%c = f32[16,4]{{1,0}} collective-permute(%p), source_target_pairs={{{printed}}}").starts
        assert found.seconds(network) == 256 / (gb_per_s * 1e9)
    stays = single("%c = f32[16,4]{1,0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}").starts
    assert stays.seconds(network) == 0


@pytest.mark.parametrize(
    ("printed", "group"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3)),
        ("replica_groups={}", tuple(range(8))),
        ("channel_id=1", tuple(range(8))),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5)),
        ("replica_groups=mesh['data'=2, 'model'=4] {'model'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}", (0, 4, 1, 5)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'a'}", (0, 1, 4, 5)),
        ("source_target_pairs={{0,1},{1,2},{2,0}}", (0, 1, 2)),
        ("replica_groups=V3", tuple(range(8))),
    ],
)
def test_groups(printed, group):
    schedule = read_schedule(module(f"%c = f32[16,4] all-reduce(%p), {printed}, to_apply=%add"))
    assert schedule.collectives()[0].group == group
    assert schedule.notes == ("collective c: group not understood, all devices are assumed",) * printed.endswith("V3")


LOOP_BODY = computation(
    "body", "%m = f32[16,4] multiply(%x, %x)", op(f"%r = f32[16,4] all-reduce(%m), {ALL}", SYNC)
) + computation("cond", "%never = pred[] custom-call(%x)")


@pytest.mark.parametrize(
    ("config", "trips"), [('{"known_trip_count":{"n":"5"}}', 5), ('{"known_trip_count":{"n":"0"}}', 0), ("{}", 1)]
)
def test_a_loop_holds_its_collectives_and_multiplies_its_work(config, trips):
    line = f"%loop = f32[16,4] while(%p), condition=%cond, body=%body, backend_config={config}"
    schedule = read_schedule(module(line, before=LOOP_BODY))
    loop = schedule.operations[-1]
    assert (loop.trips, loop.starts, loop.waits_for) == (trips, None, "")
    assert [inner.name for inner in loop.body if inner.starts] == ["r"]
    assert schedule.gradient_collectives() == [("all-reduce", 256)] * trips
    assert schedule.work().vector_flops == 64 * trips
    unknown = "loop loop: trip count unknown, counted once"
    assert (unknown in schedule.notes) == (config == "{}")


def test_a_fusion_that_communicates_does_both_at_once():
    fused = computation(
        "fused", op(f"%r = f32[16,4] all-reduce(%x), {ALL}", SYNC), "%i = s32[] constant(0)",
        "%part = f32[2,4] dynamic-slice(%r, %i, %i), dynamic_slice_sizes={2,4}",
    )  # fmt: skip
    found = single("%all-reduce-scatter.1 = f32[2,4] fusion(%p), kind=kCustom, calls=%fused", before=fused)
    assert (found.starts.kind, found.starts.num_bytes, found.starts.is_async) == ("all-reduce", 256, False)
    assert (found.waits_for, found.starts.op_name) == (found.name, f"jit(step)/{SYNC}")


def test_a_text_that_calls_what_it_does_not_hold_is_refused():
    assert "KeyError: 'gone'" in refusal(read_schedule, module("%c = f32[16,4] call(%p), to_apply=%gone"))


DOT = "dot({}, {}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}"  # of [16,4]: 2 x 16 x 16 x 4 FLOPs


def test_what_holds_several_collectives_is_said():
    two = [f"%r = f32[16,4] all-reduce(%x), {ALL}", f"%t = f32[16,4] all-reduce(%r), {ALL}"]
    schedule = read_schedule(
        module("%c = f32[16,4] fusion(%p), kind=kCustom, calls=%two", before=computation("two", *two))
    )
    assert schedule.gradient_collectives() == [("all-reduce", 256)]
    assert schedule.notes == ("fusion c: holds 2 collectives, only the first is counted",)
    # Each of a branch is counted, and no work of one that does not communicate.
    branches = computation("sends", *two) + computation("computes", f"%d = f32[16,16] {DOT.format('%x', '%x')}")
    line = "%c = f32[16,4] conditional(%q, %p, %p), branch_computations={%sends, %computes}"
    schedule = read_schedule(module(line, before=branches))
    assert schedule.gradient_collectives() == 2 * [("all-reduce", 256)] and not schedule.notes
    assert not schedule.work().flops and schedule.operations[-1].is_conditional


STEP = module(
    op("%forward = f32[16,4] multiply(%p, %p)", "jvp()/mul"),
    op("%b1 = f32[16,16] " + DOT.format("%p", "%forward"), BACKWARD),
    "%packed = f32[16,16] copy(%b1)",
    op(f"%s1 = f32[16,16] all-reduce-start(%packed), {ALL}", SYNC),
    op(f"%s2 = f32[16,4] all-reduce-start(%p), {ALL}", SYNC),
    "%d2 = f32[16,4] all-reduce-done(%s2)",
    op("%b2 = f32[16,16] " + DOT.format("%forward", "%p"), BACKWARD),
    op("%recomputed = f32[16,4] multiply(%p, %p)", "checkpoint/mul"),
    "%scaled = f32[16,16] multiply(%b2, %b2)",
    op("%b3 = f32[16,16] " + DOT.format("%recomputed", "%p"), BACKWARD),
    "%between = f32[16,16] add(%scaled, %b3)",
    op(f"%s3 = f32[16,16] all-reduce-start(%between), {ALL}", SYNC),
    "%squared = f32[16,16] multiply(%b2, %b2)",
    op(f"%metrics = f32[16,16] all-reduce(%squared), {ALL}", METRICS),
    "%d1 = f32[16,16] all-reduce-done(%s1)",
    "%d3 = f32[16,16] all-reduce-done(%s3)",
    op("%moved = f32[16,16] copy(%d3)", BACKWARD),
    "%clipped = f32[16,16] multiply(%moved, %d1)",
    op("%mean = f32[16,16] multiply(%d1, %d1)", "transpose(jvp())/jaxddp.sync/mul"),
    op("%norm = f32[16,16] multiply(%p, %p)", OPTIMIZER),
    op(f"%s4 = f32[2,4] reduce-scatter(%norm), dimensions={{0}}, {ALL}", SYNC),
    op("%updated = f32[16,16] " + DOT.format("%moved", "%p"), "transpose(jvp())/jaxddp.optimizer/mul"),
)


def test_phases():
    phases = {operation.name: operation.phase for operation in read_schedule(STEP).operations}
    of = {phase: {name for name, found in phases.items() if found == phase} for phase in phases.values()}
    assert {"b1", "b2", "b3"} <= of["backward"]  # marked
    assert {"packed", "scaled", "between"} <= of["backward"]  # unmarked, on the way from them to a reduction
    assert of["forward"] == {"p", "q", "forward", "recomputed", "s2", "d2", "s4"}
    # Not backward: what only metrics need, a marked copy after the reduction, other scopes than the model's.
    assert {"squared", "moved", "clipped", "mean", "norm", "updated"} <= of["optimizer"]


def test_a_fusion_is_of_the_phase_that_most_of_its_arithmetic_has():
    def phase(*lines):
        fused = computation("fused", *lines)
        text = module("%f = f32[16,4] fusion(%p), kind=kLoop, calls=%fused", before=fused)
        return read_schedule(text).operations[-1].phase

    one = "%m{} = f32[16,4] multiply({}, %x)"
    backward, optimizer = op(one.format(1, "%x"), BACKWARD), op(one.format(2, "%m1"), OPTIMIZER)
    assert phase(backward, optimizer, op(one.format(3, "%m2"), BACKWARD)) == "backward"
    assert phase(backward, optimizer, op(one.format(3, "%m2"), OPTIMIZER)) == "optimizer"
    assert phase(one.format(1, "%x")) == "forward"


def test_overlap():
    """Backward: 2048 + 2048 + 256 + 2048 + 256 FLOPs. s1 and s2 start after the first, s3 and s4 after the last."""
    schedule = read_schedule(STEP)
    reductions = [("all-reduce", num_bytes) for num_bytes in (256, 1024, 1024)]
    assert schedule.gradient_collectives() == [*reductions, ("reduce-scatter", 1024)]
    assert schedule.overlap() == Overlap(
        bytes_in_flight=1024,  # s1; nothing stands between s2 and its done
        bytes_started_after_backward=2048,
        num_bytes=3328,
    )


def test_overlap_without_gradients_or_without_backward():
    backward = op("%b = f32[16,4] multiply(%p, %p)", BACKWARD)
    metrics = op(f"%m = f32[16,4] all-reduce(%p), {ALL}", METRICS)
    assert read_schedule(module(backward, metrics)).overlap() == Overlap(0, 0, 0)
    assert read_schedule(module(f"%c = f32[16,4] all-reduce(%p), {ALL}")).overlap() == Overlap(0, 256, 256)
