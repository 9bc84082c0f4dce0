"""Compiles one program for devices that are not there, as a script that ``targets.py`` starts.

Plugins, platforms and XLA's flags belong to a whole process. Standard input is the pickled request, standard output the
pickled text and memory of the compiled program, or one string: why there is none. Arguments are the parent's process
id and a folder or "": the process ends as soon as the compiler for TPUs has written the scheduled module there.
"""

import ctypes
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def compile_request(request: dict[str, Any]) -> tuple[str | None, dict[str, int]]:
    """Compiles an exported program; gives its text, and its ``memory_analysis()`` by name."""
    import jax
    from jax import export
    from jax.experimental import topologies
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    jax.config.update("jax_enable_x64", request["enable_x64"])
    devices = topologies.get_topology_desc(**request["topology"]).devices
    types = tuple(AxisType[name] for name in request["axis_types"])
    mesh = jax.make_mesh(request["shape"], request["axis_names"], axis_types=types, devices=devices)
    exported = export.deserialize(request["exported"])
    shardings = list(exported.in_shardings_jax(mesh))
    if not any(shardings):  # a shard_map in it has the mesh, and takes its parts of what all devices have
        shardings = [NamedSharding(mesh, PartitionSpec())] * len(shardings)
    outputs = list(exported.out_shardings_jax(mesh))
    jitted = jax.jit(exported.call, in_shardings=tuple(shardings), out_shardings=outputs, **request["options"])
    args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    compiled = jitted.lower(*args).compile()
    memory = compiled.memory_analysis()
    return compiled.as_text(), {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}


def end_once_written(folder: Path) -> None:
    """Ends this process when the whole text of a scheduled module is in a folder."""
    while True:
        time.sleep(0.1)
        for path in folder.glob("*-TLP-hlo.txt"):
            text = path.read_text()
            if "\nENTRY " in text and text.endswith("}\n\n"):  # the last computation, and whole
                os._exit(0)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no child outlives its parent
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent has ended")
    answer_to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps the compilers' output out of the answer
    if sys.argv[2]:
        threading.Thread(target=end_once_written, args=(Path(sys.argv[2]),), daemon=True).start()
    try:
        answer: Any = compile_request(pickle.load(sys.stdin.buffer))
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    pickle.dump(answer, answer_to)
    answer_to.flush()
    os._exit(0)  # the interpreter's shutdown of the plugins takes a second
