"""The process that compiles one program for devices that are not there; started by ``targets.py``.

Plugins, platforms and XLA's flags belong to a whole process, so each compilation has its own. It runs as a script
and imports nothing of this package: JAX starts here with the environment that the parent chose.

    standard input     a pickled ``dict``: the request, as ``targets.py`` makes it
    standard output    a pickled ``(kind, content)``: ``("compiled", dict)`` or ``("refused", text)``; see ``_watch``
    argument           number of a pipe's end, which is closed when the parent has ended: then this process ends too
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles an exported program; gives ``text`` and ``memory`` of the compiled one."""
    import jax
    from jax import export
    from jax.experimental import topologies
    from jax.sharding import AxisType

    for name in request["disabled_plugins"]:
        importlib.import_module(f"jax_plugins.{name}").initialize = lambda: None  # type: ignore[attr-defined]
    jax.config.update("jax_enable_x64", request["enable_x64"])
    devices = topologies.get_topology_desc(**request["topology"]).devices
    names, shape = request["axis_names"], request["shape"]
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
    exported = export.deserialize(request["exported"])
    jitted = jax.jit(
        exported.call,
        in_shardings=tuple(exported.in_shardings_jax(mesh)),
        out_shardings=list(exported.out_shardings_jax(mesh)),
        donate_argnums=request["donate_argnums"],
        compiler_options=request["compiler_options"],
    )
    args = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    compiled = jitted.lower(*args).compile()
    memory = compiled.memory_analysis()
    sizes = {name: getattr(memory, name) for name in dir(memory) if name.endswith("_in_bytes")}
    return {"text": compiled.as_text(), "memory": sizes}


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(1)


def _watch(folder: Path, answer: Any) -> None:
    """Answers with the scheduled module as soon as the TPU compiler has written it, in a quarter of its time."""
    while True:
        time.sleep(0.1)
        for path in folder.glob("*-TLP-hlo.txt"):
            text = path.read_text()
            if "\nENTRY " in text and text.endswith("}\n\n"):  # the last computation, and whole
                answer("compiled", {"text": text, "memory": {}})


def _main() -> None:
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    answer_to, is_answered = os.fdopen(os.dup(1), "wb"), threading.Lock()
    os.dup2(2, 1)  # keeps the compilers' output out of the answer

    def answer(kind: str, content: Any) -> None:
        said = pickle.dumps((kind, content))
        is_answered.acquire()  # once
        answer_to.write(said)
        answer_to.flush()
        os._exit(0)  # the interpreter's shutdown of the plugins takes a second

    try:
        request = pickle.load(sys.stdin.buffer)
        if folder := request["text_folder"]:
            threading.Thread(target=_watch, args=(Path(folder), answer), daemon=True).start()
        answer("compiled", compile_request(request))
    except Exception as error:
        answer("refused", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    _main()
