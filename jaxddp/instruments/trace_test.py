import gzip
import json

import jax
import pytest

from jaxddp.comparison_test import refusal
from jaxddp.instruments.trace import Event, Trace, read_trace


def on_gpu(line, start_us, end_us, kind):
    return Event("/device:GPU:0", line, "named", start_us, end_us, kind)


def test_exposed_is_what_a_device_communicates_without_computing():
    trace = Trace((
        on_gpu("Stream #1", 0, 10, "products"), on_gpu("Stream #1", 12, 14, "other kernels"),
        on_gpu("Stream #2", 5, 20, "all-reduce"),
    ))  # fmt: skip
    assert trace.overlaps() == {"/device:GPU:0": (20, 12, 15, 8)}
    assert trace.kinds() == {"all-reduce": (1, 15), "products": (1, 10), "other kernels": (1, 2)}


def test_what_runs_inside_of_an_operation_is_not_its_own_time():
    """A loop holds a product and a collective: it computes only while neither runs."""
    trace = Trace((
        on_gpu("XLA Ops", 0, 100, "other kernels"), on_gpu("XLA Ops", 10, 40, "products"),
        on_gpu("XLA Ops", 50, 90, "all-reduce"),
    ))  # fmt: skip
    assert trace.kinds() == {"all-reduce": (1, 40), "products": (1, 30), "other kernels": (1, 30)}
    assert trace.overlaps() == {"/device:GPU:0": (100, 60, 40, 40)}


def reduced(num_bytes, *times_us, kind="all-reduce"):
    return [Event("/device:GPU:0", "2", "nccl", 0, us, kind, num_bytes, 8) for us in times_us]


def test_curves_are_the_shortest_times_of_several_sizes():
    events = [*reduced(2**10, 30, 20), *reduced(2**20, 90, 70), *reduced(2**24, 60), *reduced(None, 1)]
    events += reduced(2**10, 5, kind="all-gather")  # a single size is no curve
    assert Trace(tuple(events)).curves() == {"all-reduce": {"8": [(2**10, 20), (2**20, 70), (2**24, 60)]}}
    assert "collectives of several known sizes" in refusal(Trace(tuple(reduced(2**10, 5))).curves)


def nccl(name, start_us, for_us, **args):
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": start_us, "dur": for_us,
            "args": {"device": 0, "stream": 7, **args}}  # fmt: skip


def kineto(*events):
    started = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 9, "ts": 0, "dur": 99, "args": {}}
    return {"traceEvents": [*events, started], "distributedInfo": {"world_size": 4}}


def test_nccl_of_kineto_has_sizes_and_ranks(tmp_path):
    message = {"Collective name": "_allgather_base", "In msg nelems": 8, "Out msg nelems": 16, "Group size": 2,
               "dtype": "BFloat16"}  # fmt: skip
    events = (
        nccl("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 3, **message),
        nccl("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", 4, 5),
        nccl("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 10, 5),
        nccl("void cutlass::Kernel<cutlass_80_tensorop>", 11, 2, stream=8),
    )
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(json.dumps(kineto(*events)).encode()))
    trace = read_trace(tmp_path)
    assert trace.collectives() == {
        ("all-gather", 32, 2): [3], ("all-reduce", None, 4): [5], ("collective", None, 4): [5]
    }  # fmt: skip
    assert trace.overlaps() == {"/device:GPU:0": (15, 2, 13, 11)}  # the host's operations are not the device's


def test_torch_on_cpus_has_products_and_all_tensors_of_a_collective(tmp_path):
    def ran(name, **args):
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": 9, "ts": len(name), "dur": 1, "args": args}

    message = {"Input Dims": [[1000], [2000]], "Input type": ["float", "float"], "Group size": 2}
    (tmp_path / "rank0.json").write_text(
        json.dumps([ran("aten::mm"), ran("aten::bmm"), ran("gloo:all_reduce", **message)])
    )
    trace = read_trace(tmp_path)
    assert {kind: count for kind, (count, _) in trace.kinds().items()} == {"products": 2, "all-reduce": 1}
    assert trace.collectives() == {("all-reduce", 12_000, 2): [1]}


XSPACE = """
planes {
  name: "/device:GPU:3"
  lines { name: "Stream #7(NCCL)" events { metadata_id: 1 duration_ps: 4000000 } events {
    metadata_id: 2 offset_ps: 5000000 duration_ps: 4000000 stats { metadata_id: 1 str_value: "psum_scatter.4" } } }
  lines { name: "XLA Modules" events { metadata_id: 3 duration_ps: 9000000 } }
  event_metadata { key: 1 value { id: 1 name: "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL" } }
  event_metadata { key: 2 value { id: 2 name: "loop_fusion" } }
  event_metadata { key: 3 value { id: 3 name: "jit_step" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
"""


def test_gpus_of_jax_are_read_by_their_streams(tmp_path):
    file = tmp_path / "vm.xplane.pb"
    file.write_bytes(jax.profiler.ProfileData.text_proto_to_serialized_xspace(XSPACE))
    assert [(event.device, event.start_us, event.end_us, event.kind) for event in read_trace(file).events] == [
        ("/device:GPU:3", 0, 4, "reduce-scatter"), ("/device:GPU:3", 5, 9, "reduce-scatter")
    ]  # fmt: skip


def test_jaxs_trace_as_json_has_the_same_without_sizes(tmp_path):
    def named(kind, name, tid):
        return {"ph": "M", "pid": 1, "tid": tid, "name": kind, "args": {"name": name}}

    def ran(tid, name, ts, **args):
        return {"ph": "X", "pid": 1, "tid": tid, "ts": ts, "dur": 4, "name": name, "args": args}

    events = [
        named("process_name", "/device:GPU:3", 0), named("thread_name", "Stream #7(NCCL)", 7),
        named("thread_name", "XLA Modules", 8), ran(7, "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 0, hlo_op="rs.1"),
        ran(8, "jit_step", 0), ran(7, "loop_fusion", 5, hlo_op="psum_scatter.4"),
    ]  # fmt: skip
    (tmp_path / "vm.trace.json").write_text(json.dumps({"traceEvents": events}))
    assert [(event.device, event.start_us, event.end_us, event.kind, event.num_bytes)
            for event in read_trace(tmp_path / "vm.trace.json").events] == [
        ("/device:GPU:3", 0, 4, "reduce-scatter", None), ("/device:GPU:3", 5, 9, "reduce-scatter", None)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.json.gz", gzip.compress(b"[" * 99, mtime=0)[:20], "must be one of jax.profiler or Kineto: EOFError"),
        ("other.json", b"[1, 2]", "must be one of jax.profiler or Kineto: AttributeError"),
        ("cut.xplane.pb", b"\x0a\xff\xff\x00/device:GPU:0", "must be one of jax.profiler or Kineto: RuntimeError"),
        ("host.json", b'{"traceEvents": []}', "must hold events of a device: nothing ran on one"),
        ("", b"", "must be a profile or hold one"),
    ],
)
def test_what_is_no_profile_is_one_line(tmp_path, name, content, message):
    (tmp_path / (name or "nothing")).write_bytes(content)
    assert f"{name}) {message}" in refusal(read_trace, tmp_path / name)
