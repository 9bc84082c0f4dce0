import signal

import pytest

from torchref.launch import RankPool, shared_pool

# A shell makes its background jobs ignore Ctrl-C, and all that they start; tests of interrupts send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Up to 8 ranks over Gloo, shared by all tests of the session."""
    return shared_pool()
