"""A `trtllm` back end on the CPU, over stand-ins."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
from flashinfer_standin import COUNTER_BYTES, StandIns

from attention.backends.trtllm.mha import TRTLLMMHABackend
from attention.backends.trtllm.mla import TRTLLMMLABackend


def install(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, backend: type[TRTLLMMHABackend | TRTLLMMLABackend]
) -> StandIns:
    """Stand-ins in flashinfer's place, a small workspace, and the back end on the CPU."""
    standins = StandIns()
    monkeypatch.setattr(module, "find_kernel", standins.find)
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 4 * COUNTER_BYTES)
    monkeypatch.setattr(backend, "traits", replace(backend.traits, devices=("cpu",)))
    return standins
