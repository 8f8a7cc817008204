"""The oracle: one token, one expert at a time, exactly as the formula reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.experts.base import FusedExperts

__all__ = ["ReferenceExperts"]


class ReferenceExperts(FusedExperts):
    """A plain loop over tokens and their choices. Slow; what the fast experts are compared with."""

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """See `Experts`."""
        self.check_input(hidden_states, topk_ids, topk_weights)
        rows = [
            self._token(x, ids, weights)
            for x, ids, weights in zip(hidden_states, topk_ids.tolist(), topk_weights, strict=True)
        ]
        return torch.stack(rows) if rows else hidden_states.new_zeros(0, self.hidden_size)

    def _token(self, x: Tensor, ids: list[int], weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert_id, weight in zip(ids, weights, strict=True):
            if expert_id in self.expert_range:
                local = expert_id - self.expert_range.start
                gate, up = (self.w13[local] @ x).chunk(2)
                y = y + weight.to(x.dtype) * (self.w2[local] @ (F.silu(gate) * up))
        return y
