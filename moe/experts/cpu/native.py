"""Experts for serving on a CPU: as `grouped`, with all of a layer in one call in C, sorting and summing included.

With products this fast, torch's small operators would take a third of a decode step's time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe.experts.cpu.repacked import RepackedExperts
from moe.experts.grouped import RowPlan
from moe.grouped_linear import GroupedLinear, add_rows, run_layer
from moe.segments import segment_offsets
from ubatch.kernels import rows_contiguous


class NativeExperts(RepackedExperts):
    """Experts on `GroupedLinear`. CPU; errors as `FusedExperts`, `GroupedLinear` and `RepackedExperts`."""

    def __init__(self, w13: Tensor, w2: Tensor, first_expert: int = 0) -> None:
        super().__init__(w13, w2, first_expert)
        self._up = GroupedLinear(self.w13, gated=True)
        del self.w13
        self._down = GroupedLinear(self.w2)
        del self.w2

    def slot_tensors(self) -> Sequence[Tensor]:
        return [*super().slot_tensors(), self._up.packed, self._down.packed]

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        if self.dtype is torch.float32 and torch.is_grad_enabled() and topk_weights.requires_grad:
            return super().forward(hidden_states, topk_ids, topk_weights, scales)
        self.check_input(hidden_states, topk_ids, topk_weights, scales)
        x = hidden_states if scales is None else self.dequantized(hidden_states, scales)
        self.check_usable(x, topk_ids, topk_weights)
        x = x if x.stride(1) == 1 else rows_contiguous(x)
        return run_layer(self._up, self._down, x, topk_ids, topk_weights, self.expert_range.start)

    def _run_experts(self, hidden_states: Tensor, plan: RowPlan, slots: range) -> Tensor:
        self.check_usable(hidden_states)
        first_row = segment_offsets(torch.tensor(plan.rows_per_expert[slots.start : slots.stop]))
        rows = plan.rows_of(slots)
        tokens = plan.token_of_row[rows.start : rows.stop]
        inner = self._up(rows_contiguous(hidden_states), first_row, tokens, first_expert=slots.start)
        return self._down(inner, first_row, first_expert=slots.start)

    def _add_rows(self, rows: Tensor, row_of_pair: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        if rows.dtype is torch.float32 and torch.is_grad_enabled() and weights.requires_grad:
            return super()._add_rows(rows, row_of_pair, offsets, weights)
        self.check_usable(weights)
        return add_rows(rows, row_of_pair, offsets, weights.float().contiguous())

    def run_expert(self, slot: int, x: Tensor) -> Tensor:
        self.check_usable(x)
        rows = torch.tensor([0, x.shape[0]])
        return self._down(self._up(x.contiguous(), rows, first_expert=slot), rows, first_expert=slot)
