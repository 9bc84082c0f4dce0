import pytest

from jaxddp.conftest import pytest_configure as pytest_configure  # and no GPUs, and Ctrl-C
from torchref.launch import RankPool, shared_pool


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Up to 8 ranks over Gloo, shared by all tests of the session."""
    return shared_pool()
