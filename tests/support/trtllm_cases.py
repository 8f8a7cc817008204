"""What the tests of both `trtllm` back ends do alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from attention_batches import Batch, MLABatch
from flashinfer_standin import COUNTER_BYTES, StandIns, allocations
from torch import Tensor

from attention import GraphLimits
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


def check_replan_allocates_nothing(
    backend: TRTLLMMHABackend | TRTLLMMLABackend,
    limits: GraphLimits,
    captured: Batch | MLABatch,
    later: Batch | MLABatch,
) -> None:
    backend.init_graph_buffers(limits)
    before = backend.nbytes
    plan = backend.plan_for_graph(captured.metadata)
    with allocations() as count:
        backend.replan(plan, later.metadata)
    assert count() == 0
    assert backend.nbytes == before + 4 * COUNTER_BYTES


def check_same_call(first_call: Mapping[str, Any], second_call: Mapping[str, Any]) -> None:
    """The same tensors, but for the query, and the same scalars."""
    for name, value in first_call.items():
        if isinstance(value, Tensor) and name != "query":
            assert value.data_ptr() == second_call[name].data_ptr(), name
        elif isinstance(value, int | float | str | None):
            assert value == second_call[name], name
