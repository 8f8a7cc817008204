"""Experts for serving on a CPU: as `grouped`, with products and activation in two loops in C."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.experts.cpu.repacked import RepackedExperts
from moe.experts.grouped import RowPlan
from moe.grouped_linear import GroupedLinear
from moe.segments import segment_offsets

__all__ = ["NativeExperts"]


class NativeExperts(RepackedExperts):
    """Experts on `GroupedLinear`. CPU; errors as `FusedExperts`, `GroupedLinear` and `RepackedExperts`."""

    def __init__(self, w13: Tensor, w2: Tensor, first_expert: int = 0) -> None:
        super().__init__(w13, w2, first_expert)
        self._up = GroupedLinear(self.w13, gated=True)
        del self.w13
        self._down = GroupedLinear(self.w2)
        del self.w2

    def _run_experts(self, hidden_states: Tensor, plan: RowPlan, slots: range) -> Tensor:
        self.check_usable(hidden_states)
        first_row = segment_offsets(torch.tensor(plan.rows_per_expert[slots.start : slots.stop]))
        rows = plan.rows_of(slots)
        tokens = plan.token_of_row[rows.start : rows.stop]
        x = hidden_states if hidden_states.stride(1) == 1 else hidden_states.contiguous()
        inner = self._up(x, first_row, tokens, first_expert=slots.start)
        return self._down(inner, first_row, first_expert=slots.start)

    def run_expert(self, slot: int, x: Tensor) -> Tensor:
        self.check_usable(x)
        rows = torch.tensor([0, x.shape[0]])
        return self._down(self._up(x.contiguous(), rows, first_expert=slot), rows, first_expert=slot)
