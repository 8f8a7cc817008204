"""Experts by Triton kernels, for rows of tokens.

    align_pairs     gives each (token, choice) its row, sorted by expert; cuts rows into tiles
    project_up      gathers the tokens' rows: silu(x w1^T) * (x w3^T)
    project_down    . w2^T, times the router's weight, back at the pair's place
    sum_choices     every token adds its pairs, in the order in which the router chose them

A row's bits depend only on its token, and sums have a fixed order. So a token's output is the same in every batch that
is computed with the same tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe.experts.quantization import FP8
from moe.experts.triton_batched import Cuts, Kept, TritonBatchedExperts, Work, share_of
from moe.kernels.align import align_pairs
from moe.kernels.grouped_gemm import Rows
from moe.kernels.quantize import quantize_rows
from moe.kernels.reduce import sum_choices
from ubatch.kernels import rows_contiguous
from ubatch.kernels.triton_jit import power_of_2


class TritonExperts(TritonBatchedExperts):
    """Experts of both layouts; see `TritonBatchedExperts`."""

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        self.check_input(hidden_states, topk_ids, topk_weights, scales)
        self._check_place(hidden_states)
        if not topk_ids.numel():
            return hidden_states.new_zeros(hidden_states.shape, dtype=self.dtype)
        if self.weights_dtype != FP8:
            rows = Rows(rows_contiguous(self.dequantized(hidden_states, scales)))
        else:
            rows = (
                Rows(*quantize_rows(hidden_states)) if scales is None else Rows(rows_contiguous(hidden_states), scales)
            )

        topk_ids, topk_weights = topk_ids.contiguous(), topk_weights.contiguous()
        num_tokens, top_k = topk_ids.shape
        first, held = self.expert_range.start, len(self.expert_range)
        room = power_of_2(num_tokens)
        # Tokens without a local expert may be missing.
        pairs_here = max(1.0, top_k * held / self.num_experts) if self.num_experts else top_k

        def cut(ids: Tensor, tile_rows: int) -> Work:
            return Work(rows, align_pairs(ids, first, held, tile_rows), top_k, topk_weights)

        cuts = Cuts(
            share_of(self.w13.device),
            f"{room} tokens x {top_k}",
            room * pairs_here / held,
            lambda tile_rows: cut(topk_ids, tile_rows),
            Kept(lambda tile_rows: cut(self._even_routing(num_tokens, top_k), tile_rows)),
        )
        pairs = self._run(cuts)
        return sum_choices(pairs.unflatten(0, (num_tokens, top_k)), topk_ids, first, held)

    def _even_routing(self, num_tokens: int, top_k: int) -> Tensor:
        """Random ids `[N, k]`, evenly spread over the experts on average; a warm-up's own ids may all be the same."""
        device, held = self.w13.device, self.expert_range
        generator = torch.Generator(device).manual_seed(0)
        choices = max(self.num_experts or len(held), top_k)
        ids = torch.rand(num_tokens, choices, generator=generator, device=device).topk(top_k, dim=1).indices
        return ids if self.num_experts else ids + held.start
