"""Experts by torch's grouped matrix product: one launch per projection, for all experts.

    pairs (token, choice)   sorted by expert; those of other ranks last, behind the last group
    two grouped products    gate_up = rows w13^T;  y = (silu(gate) * up) w2^T
    sum                     every token adds its pairs, weighted, in the order in which the router chose them

The row counts stay on the device, so a graph can capture it. torch has a kernel for bfloat16 on GPUs of compute
capability 9 and 10. On other GPUs torch would read the counts and loop over the experts, as `grouped` does, so this
back end refuses them. Rows behind the last group are not written, and they are not added.

Source: torch's documentation of `torch.nn.functional.grouped_mm`, and `aten/src/ATen/native/cuda/GroupedBlas.cpp`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.experts.base import FusedExperts
from ubatch import ConfigError, report_sm_use

_CAPABILITIES = (9, 10)  # major versions
_ALIGNMENT = 8  # of hidden and intermediate sizes, for 16 bytes of bfloat16


class GroupedMMExperts(FusedExperts):
    """Experts by `torch.nn.functional.grouped_mm`. CUDA and bfloat16; on a CPU, where it is slow, other dtypes too.

    Raises:
        ConfigError: a torch without it, or weights or a GPU that its kernel is not for.
    """

    capturable: ClassVar[bool] = True

    def __init__(self, w13: Tensor, w2: Tensor, first_expert: int = 0) -> None:
        super().__init__(w13, w2, first_expert)
        if not hasattr(F, "grouped_mm"):
            raise ConfigError(
                f"torch {torch.__version__} has no torch.nn.functional.grouped_mm. Install torch 2.10 or later, or use "
                "other experts, such as 'triton' or 'grouped'."
            )
        if self.hidden_size % _ALIGNMENT or self.intermediate_size % _ALIGNMENT:
            raise ConfigError(
                f"grouped_mm experts need sizes that are multiples of {_ALIGNMENT}, not hidden {self.hidden_size} and "
                f"intermediate {self.intermediate_size}. Use other experts, such as 'triton' or 'grouped'."
            )
        if self.w13.is_cuda:
            self._check_gpu()

    def _check_gpu(self) -> None:
        capability = torch.cuda.get_device_capability(self.w13.device)
        if self.dtype is not torch.bfloat16 or capability[0] not in _CAPABILITIES:
            raise ConfigError(
                f"grouped_mm experts compute in bfloat16 on GPUs of compute capability 9 and 10, not in {self.dtype} "
                f"on {capability[0]}.{capability[1]}. Use other experts, such as 'triton' or 'grouped'."
            )

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        self.check_input(hidden_states, topk_ids, topk_weights, scales)
        self._refuse_gradients(hidden_states, topk_weights)
        report_sm_use("grouped_mm experts", obeys=self.obeys_sms)
        x = self.dequantized(hidden_states, scales)
        if not topk_ids.numel():
            return x.new_zeros(x.shape)
        tokens, top_k = topk_ids.shape
        held = len(self.expert_range)
        local = topk_ids - self.expert_range.start
        is_local = (local >= 0) & (local < held)
        expert_of_row, pair_of_row = torch.where(is_local, local, held).flatten().sort(stable=True)
        experts = torch.arange(held, dtype=expert_of_row.dtype, device=x.device)
        ends = torch.searchsorted(expert_of_row, experts, right=True, out_int32=True)

        rows = x.index_select(0, pair_of_row // top_k)
        gate, up = F.grouped_mm(rows, self.w13.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.w2.transpose(1, 2), offs=ends)

        places = torch.arange(tokens * top_k, device=x.device)
        row_of_pair = torch.empty_like(pair_of_row).scatter_(0, pair_of_row, places)
        pairs = y.index_select(0, row_of_pair).view(tokens, top_k, self.hidden_size)
        pairs.mul_(topk_weights[:, :, None])  # in float32, rounded once
        return pairs.masked_fill_(~is_local[:, :, None], 0).sum(1)
