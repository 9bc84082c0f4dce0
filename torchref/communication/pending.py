"""What a caller waits for: several handles of the backend, and what is left to do on this side once they are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import Work


class Pending(Work):
    """Several handles as one, with something to do once all are done."""

    def __init__(self, works: Sequence[Work], finish: Callable[[], object] | None = None) -> None:
        """Waits for nothing yet.

        Args:
            works: The handles.
            finish: What to do after the first wait.
        """
        super().__init__()
        self._works = works
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        """Waits for all of them."""
        works, self._works = self._works, []  # a second wait for a send would never return
        for work in works:
            work.wait() if timeout is None else work.wait(timeout)
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True
