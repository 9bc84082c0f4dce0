"""Frameworks take turns, round by round, so that a machine that drifts moves the times of both alike.

Each framework has processes of its own, and none of them may run while the other measures. They connect to a socket of
their parent's, and each asks for its turn before every round:

| a framework's processes             | what happens                                                              |
|-------------------------------------|---------------------------------------------------------------------------|
| all ask                             | all get the turn, once the other framework's ask as well, or have ended   |
| some compute, the others ask        | nothing: the round goes on                                                |
| all have ended, or never started    | the other framework goes on without them                                  |

What a process waits in is a read of a socket, which takes no core and no GPU; a barrier of NCCL would compute.
"""

from __future__ import annotations

import os
import selectors
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

_SIGN_OF_LIFE_S = 20.0  # between reports of a process that waits


class Turns:
    """The parent's side: gives the turn to one framework after the other."""

    def __init__(self, num_processes: Mapping[str, int]) -> None:
        """Opens the socket, for so many processes of each framework."""
        self._folder = tempfile.mkdtemp(prefix="turns-")  # which only this user may enter
        self.address = os.path.join(self._folder, "socket")
        self._expected = dict(num_processes)
        self._order = list(num_processes)  # the one whose turn is next comes first
        self._waiting: dict[str, set[socket.socket]] = {name: set() for name in num_processes}
        self._open: dict[str, set[socket.socket]] = {name: set() for name in num_processes}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, woken = socket.socketpair()
        self._selector.register(woken, selectors.EVENT_READ, "")
        self._has_left: set[str] = set()
        self._thread = threading.Thread(target=self._serve, name="turns", daemon=True)
        self._thread.start()

    def leave(self, framework: str) -> None:
        """Waits no longer for a framework, whose processes have ended or will never start."""
        self._has_left.add(framework)
        self._wake.send(b".")

    def close(self) -> None:
        """Closes the socket: a process that still asks for its turn raises."""
        self._wake.close()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._listener:
                    self._accept()
                elif not source.recv(64):  # closed
                    if not key.data:
                        return
                    self._open[key.data].discard(source)
                    self._waiting[key.data].discard(source)
                    self._selector.unregister(source)
                    source.close()
                elif key.data:
                    self._waiting[key.data].add(source)
            self._give()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        framework, _, asked = connection.recv(64).decode().partition("\n")
        self._expected[framework] -= 1
        self._open[framework].add(connection)
        if asked:
            self._waiting[framework].add(connection)
        self._selector.register(connection, selectors.EVENT_READ, framework)

    def _give(self) -> None:
        present = [name for name in self._order if name not in self._has_left and not self._is_over(name)]
        if not present or not all(self._waits(name) for name in present):
            return
        for connection in self._waiting[present[0]]:
            connection.send(b".")
        self._waiting[present[0]].clear()
        self._order.remove(present[0])
        self._order.append(present[0])

    def _is_over(self, framework: str) -> bool:
        return self._expected[framework] <= 0 and not self._open[framework]

    def _waits(self, framework: str) -> bool:
        return self._expected[framework] <= 0 and self._waiting[framework] == self._open[framework]


@contextmanager
def join(address: str, framework: str, sign_of_life: Callable[[], object]) -> Iterator[Callable[[], None]]:
    """Joins a process of a framework to the turns of its parent; call it in each process.

    ``address`` is that of the parent's socket, empty where a framework is measured alone; ``sign_of_life`` is called
    now and then while the process waits.

    Yields:
        What waits for the next turn; the one before ends with the call, the last one with the context.
    """
    if not address:
        yield lambda: None
        return
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    connection.send(f"{framework}\n".encode())
    connection.settimeout(_SIGN_OF_LIFE_S)

    def wait_for_turn() -> None:
        connection.send(b".")
        while True:
            try:
                said = connection.recv(1)
            except TimeoutError:
                sign_of_life()
                continue
            if not said:
                raise ConnectionError("the benchmark that gives turns has ended")
            return

    with connection:
        yield wait_for_turn
