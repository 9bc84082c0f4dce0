"""Reads a profile that somebody took of a run: its collectives and kernels, and how much communication was exposed.

    jax.profiler          *.xplane.pb, or its trace.json.gz
    torch.profiler        trace.json or trace.json.gz of Kineto

A device communicates while one of its collectives runs, computes while anything else does, and what it communicates
without computing is exposed.
"""

import gzip
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ..network import KINDS
from .schedule import Operation, read_schedule, walk

_COMPUTES = PRODUCTS, ATTENTION, COPIES, OTHERS = "products", "attention", "copies", "other kernels"
_KINDS = {  # in letters only, as XLA, JAX, NCCL, Gloo and c10d spell them
    "reducescatter": "reduce-scatter", "psumscatter": "reduce-scatter", "allreduce": "all-reduce", "psum": "all-reduce",
    "allgather": "all-gather", "alltoall": "all-to-all", "ppermute": "collective-permute",
    "collectivepermute": "collective-permute", "broadcast": "broadcast", "sendrecv": "send", "send": "send",
    "recv": "recv", "reduce": "reduce",
}  # fmt: skip
_OF_XLA = re.compile(
    r"(all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute|psum_scatter|psum|all_gather|reduce_scatter"
    r"|all_to_all|ppermute)(_invariant)?(-start|-done)?[.\d]*$"
)
_OF_NCCL = re.compile(r"(?:nccl|rccl)(?:Dev)?Kernel_?(\w+)|gloo:(\w+)|nccl:(\w+)", re.IGNORECASE)
_PRODUCT = re.compile(
    r"(?i)gemm|cutlass|nvjet|xmma|cublas|[._]dot|matmul|wgmma|::b?mm$|addmm|Cijk|conv(?!ert)|ampere_s"
)
# Planes and lines of what devices do; others of a plane repeat it by module or by step.
_DEVICE_LINE = re.compile(r"/device:(TPU:.* XLA Ops$|GPU:.* Stream #)")
_COPY = re.compile(r"mem(cpy|set)|copy|__amd_rocclr", re.IGNORECASE)
_ATTENTION = re.compile(r"flash|fmha|attention|attn", re.IGNORECASE)
_ITEMSIZES = {
    "double": 8, "long": 8, "longint": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2, "c10::half": 2,
    "c10::bfloat16": 2, "short": 2, "byte": 1, "char": 1, "bool": 1, "unsignedchar": 1, "signedchar": 1,
}  # fmt: skip


class Event(NamedTuple):
    """A kernel, a copy or a collective on a device."""

    device: str
    line: str  # the stream or the thread of the device
    name: str
    start_us: float
    end_us: float
    kind: str  # a kind of collective, or one of _COMPUTES
    num_bytes: int | None = None  # of a collective's full buffer; None if the profile does not say
    num_ranks: int | None = None  # that take part in a collective; None as well


class Overlap(NamedTuple):
    """Microseconds of a device: from its first event to its last, computing, communicating, and only that."""

    span_us: float
    compute_us: float
    communication_us: float
    exposed_us: float


@dataclass(frozen=True)
class Trace:
    """What ran on the devices of a profile."""

    events: tuple[Event, ...]  # of all devices, in any order
    notes: tuple[str, ...] = ()  # what could not be read, in words

    def own_parts(self) -> Iterator[tuple[Event, float, float]]:
        """From when to when each event ran and no other inside of it."""
        ordered = sorted(self.events, key=lambda event: (event.device, event.line, event.start_us, -event.end_us))
        for _, events in groupby(ordered, key=lambda event: (event.device, event.line)):
            inside: list[Event] = []
            cursor = -math.inf
            for event in (*events, Event("", "", "the last", math.inf, math.inf, OTHERS)):
                while inside and inside[-1].end_us <= event.start_us:
                    ended = inside.pop()
                    yield ended, min(cursor, ended.end_us), ended.end_us
                    cursor = max(cursor, ended.end_us)
                if inside:
                    yield inside[-1], min(cursor, event.start_us), event.start_us
                cursor = max(cursor, event.start_us)
                inside.append(event)

    def kinds(self) -> dict[str, tuple[int, float]]:
        """Number of events and their own microseconds by kind, the longest first."""
        counts, own_us = Counter(event.kind for event in self.events), defaultdict[str, float](float)
        for event, start, end in self.own_parts():
            own_us[event.kind] += end - start
        return {kind: (counts[kind], own_us[kind]) for kind in sorted(counts, key=lambda kind: -own_us[kind])}

    def overlaps(self) -> dict[str, Overlap]:
        """How each device computed and communicated, by their names; XLA's for accelerators, ``/device:GPU:0``."""
        spent: dict[str, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
        for event, *part in self.own_parts():
            spent[event.device][event.kind not in _COMPUTES].append(part)
        found = {}
        for device, (computed, sent) in spent.items():
            compute_us, sent_us, both_us = map(_union_us, (computed, sent, computed + sent))
            span_us = max(end for _, end in computed + sent) - min(start for start, _ in computed + sent)
            found[device] = Overlap(span_us, compute_us, sent_us, min(sent_us, both_us - compute_us))
        return found

    def collectives(self) -> dict[tuple[str, int | None, int | None], list[float]]:
        """How long each took in microseconds, by kind, bytes and number of ranks."""
        times: dict[tuple[str, int | None, int | None], list[float]] = defaultdict(list)
        for event in self.events:
            if event.kind not in _COMPUTES and not re.search(r"-done[.\d]*$", event.name):
                times[event.kind, event.num_bytes, event.num_ranks].append(event.end_us - event.start_us)
        return dict(sorted(times.items(), key=lambda item: (item[0][0], item[0][2] or 0, item[0][1] or 0)))

    def curves(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        """The shortest microseconds by kind, ranks and bytes, as ``network.from_file`` takes them."""
        found: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(dict)
        known: list[tuple[Any, float]] = [(key, min(times)) for key, times in self.collectives().items()]
        sized = [one for one in known if one[0][0] in KINDS and one[0][1] and (one[0][2] or 0) > 1]
        for (kind, num_ranks), alike in groupby(sized, key=lambda one: (one[0][0], one[0][2])):
            curve = [(num_bytes, shortest) for (_, num_bytes, _), shortest in alike]
            if curve[-1][1] > min(shortest for _, shortest in curve) > 0:
                found[kind][str(num_ranks)] = curve
        if not found:
            raise ValueError("the profile must have collectives of several known sizes, of which larger take longer")
        return found


def read_trace(path: str | Path) -> Trace:
    """Reads a profile: a file, or in a folder the newest one, with those of all hosts or ranks beside it."""
    files = _files_of(Path(path))
    events: list[Event] = []
    notes: list[str] = []
    for file in files:
        prefix = f"{file.name.partition('.')[0]} " if len(files) > 1 else ""
        try:
            found, why = (_of_xplane if file.name.endswith(".pb") else _of_json)(file)
        except (EOFError, RuntimeError, LookupError, TypeError, AttributeError, ValueError, gzip.BadGzipFile) as error:
            raise ValueError(f"profile (={str(file)}) must be one of jax.profiler or Kineto: {error!r:.120}") from error
        events += (event._replace(device=f"{prefix}{event.device}") for event in found)
        notes += why
    if not events:
        raise ValueError(f"profile (={str(path)}) must hold events of a device: nothing ran on one")
    return Trace(tuple(events), tuple(dict.fromkeys(notes)))


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    for pattern in ("*.xplane.pb", "*.json.gz", "*.json"):  # of JAX, the first has more
        if found := sorted(path.rglob(pattern), key=lambda file: file.stat().st_mtime):
            return sorted(file for file in found if file.parent == found[-1].parent)
    raise ValueError(f"profile (={str(path)}) must be a profile or hold one: *.xplane.pb, *.json.gz or *.json")


def _of_xplane(file: Path) -> tuple[list[Event], list[str]]:
    from jax.profiler import ProfileData  # which needs no device

    data = file.read_bytes()
    return _of_jax([
        (plane.name, line.name, event.name, event.start_ns / 1e3, event.duration_ns / 1e3, dict(event.stats))
        for plane in ProfileData.from_serialized_xspace(data).planes for line in plane.lines for event in line.events
    ], data)  # fmt: skip


def _of_jax(rows: Sequence[tuple[str, str, str, float, float, Any]], data: bytes) -> tuple[list[Event], list[str]]:
    """What accelerators did, or XLA on CPUs if there are none; ``data`` may hold their programs."""
    on_devices = [row for row in rows if _DEVICE_LINE.match(f"{row[0]} {row[1]}")]
    ran = on_devices or [row for row in rows if row[0] == "/host:CPU" and "hlo_op" in row[-1]]
    programs, notes = _programs(data, {_program_of(stats) for *_, stats in ran})
    events = []
    for plane, line, name, start_us, for_us, stats in ran:
        device, op = plane if on_devices else f"CPU {stats.get('device_ordinal', 0)}", str(stats.get("hlo_op", name))
        made = Event(device, line, name, start_us, start_us + for_us, _kind(name, op))
        known = programs.get(_program_of(stats), {}).get(op)
        if known and made.kind != COPIES and (one := known.starts):
            made = made._replace(name=op, kind=one.kind, num_bytes=one.num_bytes, num_ranks=len(one.group))
        elif known and made.kind != COPIES and known.total_work.matmul_flops:
            made = made._replace(kind=PRODUCTS)
        events.append(made)
    return events, notes


def _program_of(stats: Mapping[str, Any]) -> str:
    return f"{stats.get('hlo_module')}({stats.get('program_id')})"


def _programs(data: bytes, wanted: set[str]) -> tuple[dict[str, dict[str, Operation]], list[str]]:
    """The operations, by program and name, of the compiled programs in an xplane, which ``ProfileData`` leaves out."""
    from jax._src.lib import xla_client  # no public name reads a serialized program

    found, notes = {}, []
    planes = [plane for plane in map(_fields, _fields(data)[1]) if plane[2] == [b"/host:metadata"]]
    for event in (_fields(_fields(entry)[2][0]) for plane in planes for entry in plane[4]):
        name, programs = event[2][0].decode(), [stat[6][0] for stat in map(_fields, event[5]) if stat[6]]
        if name in wanted and programs:
            try:
                module = xla_client.hlo.HloModule.from_serialized_hlo_module_proto(_fields(programs[0])[1][0])
                found[name] = {one.name: one for one, *_ in walk(read_schedule(module.to_string()).operations)}
            except (AttributeError, RuntimeError, ValueError) as error:
                notes.append(f"the program {name} cannot be read, its collectives are known by name: {error}")
    return found, notes


def _fields(data: bytes) -> dict[int, list[Any]]:
    """The values by field of a message of protocol buffers, whose schema no installed package has."""
    found: dict[int, list[Any]] = defaultdict(list)
    at = 0

    def varint() -> int:
        nonlocal at
        start = at
        while data[at] >= 128:
            at += 1
        at += 1
        return sum((byte & 127) << 7 * place for place, byte in enumerate(data[start:at]))

    while at < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            found[number].append(varint())
        else:
            size = varint() if wire == 2 else {1: 8, 5: 4}[wire]
            found[number].append(data[at : at + size])
            at += size
    return found


def _of_json(file: Path) -> tuple[list[Event], list[str]]:
    with (gzip.open if file.name.endswith(".gz") else open)(file, "rt") as text:
        content = json.load(text)
    about = content if isinstance(content, dict) else {"traceEvents": content}
    ran = [each for each in about["traceEvents"] if each.get("ph") == "X"]
    if of_kineto := [each for each in ran if "cat" in each]:
        return _of_kineto(about, of_kineto), []
    named: dict[Any, str] = {}  # planes and lines of JAX's
    for each in about["traceEvents"]:
        if each.get("name") in ("process_name", "thread_name"):
            named[each["pid"], each.get("tid") if each["name"] == "thread_name" else None] = each["args"]["name"]
    return _of_jax([
        (named.get((each["pid"], None), ""), named.get((each["pid"], each["tid"]), ""), each["name"], each["ts"],
         each.get("dur", 0.0), each.get("args", {})) for each in ran
    ], b"")  # fmt: skip


def _of_kineto(about: Mapping[str, Any], ran: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Kernels and copies of GPUs, or operations of torch on CPUs if there are none."""
    on_gpus = [each for each in ran if each["cat"].lower() in ("kernel", "gpu_memcpy", "gpu_memset")]
    job, events = about.get("distributedInfo") or {}, []
    world_size = job.get("world_size") if job.get("pg_count", 1) == 1 else None
    for each in on_gpus or (each for each in ran if each["name"].startswith(("aten::", "gloo:"))):
        args, name = each.get("args", {}), each["name"]
        device = f"/device:GPU:{args['device']}" if on_gpus else f"CPU {each['pid']}"
        kind = _kind(f"nccl:{args['Collective name'].strip('_')}" if "Collective name" in args else name)
        event = Event(device, str(args.get("stream", each["tid"])), name, each["ts"], each["ts"] + each["dur"], kind)
        if kind not in _COMPUTES:
            num_ranks = args.get("Group size", world_size)
            event = event._replace(num_ranks=num_ranks, num_bytes=_kineto_bytes(args, kind, num_ranks))
        events.append(event)
    return events


def _kineto_bytes(args: Mapping[str, Any], kind: str, num_ranks: int | None) -> int | None:
    """Bytes of a collective's full buffer: the larger side of NCCL's, and of Gloo's inputs."""
    if "In msg nelems" in args:
        elements, dtype = max(args["In msg nelems"], args["Out msg nelems"]), args.get("dtype", "")
    elif args.get("Input Dims") and args["Input Dims"][0]:
        dtype = args["Input type"][0]
        elements = sum(math.prod(dim if isinstance(dim, int) else 0 for dim in dims) for dims in args["Input Dims"])
        elements *= (num_ranks or 0) if kind == "all-gather" else 1
    else:
        return None
    return elements * _ITEMSIZES.get(dtype.lower().replace(" ", ""), 0) or None


def _kind(name: str, op: str = "") -> str:
    """The kind of a kernel by its name, and that of XLA's operation."""
    if _COPY.match(name):
        return COPIES
    if called := _OF_XLA.match(op) or _OF_NCCL.search(name):
        letters = re.sub(r"[^a-z]", "", next(filter(None, called.groups())).lower())
        return next((kind for spelt, kind in _KINDS.items() if letters.startswith(spelt)), "collective")
    if _ATTENTION.search(name):
        return ATTENTION
    return PRODUCTS if _PRODUCT.search(f"{name} {op}".rstrip()) else OTHERS


def _union_us(parts: Iterable[tuple[float, float]]) -> float:
    total, last = 0.0, -math.inf
    for start, end in sorted(parts):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
