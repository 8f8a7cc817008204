"""Tests here may be coroutine functions."""

import pytest
from async_tests import pytest_pyfunc_call as pytest_pyfunc_call


@pytest.fixture
def no_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has chosen an interface for gloo and NCCL; afterwards it is as before."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
