"""The reference: one token and one expert at a time, exactly as in the formula."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.experts.torch_experts import TorchExperts


class ReferenceExperts(TorchExperts):
    """A plain loop over tokens and their choices. Slow; tests compare the fast experts with it."""

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        self.check_input(hidden_states, topk_ids, topk_weights, scales)
        hidden_states = self.dequantized(hidden_states, scales)
        rows = [
            self._token(x, ids, weights)
            for x, ids, weights in zip(hidden_states, topk_ids.tolist(), topk_weights, strict=True)
        ]
        return torch.stack(rows) if rows else hidden_states.new_zeros(0, self.hidden_size)

    def run_batched(self, hidden_states: Tensor, rows_per_expert: Tensor, scales: Tensor | None = None) -> Tensor:
        """See `BatchedExperts`. Rows behind the counts are NaN, so that code that reads them is noticed."""
        self.check_batched_input(hidden_states, rows_per_expert, scales)
        hidden_states = self.dequantized(hidden_states, scales)
        results = torch.full_like(hidden_states, float("nan"))
        for slot, rows in enumerate(rows_per_expert.tolist()):
            for row in range(rows):
                results[slot, row] = self._expert(slot, hidden_states[slot, row])
        return results

    def _token(self, x: Tensor, ids: list[int], weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert_id, weight in zip(ids, weights, strict=True):
            if expert_id in self.expert_range:
                y = y + weight.to(x.dtype) * self._expert(expert_id - self.expert_range.start, x)
        return y

    def _expert(self, slot: int, x: Tensor) -> Tensor:
        up = self.w13[slot] @ x
        y = self.w2[slot] @ self.activate(up if self.b13 is None else up + self.b13[slot])
        return y if self.b2 is None else y + self.b2[slot]
