"""A stand-in for flashinfer's fused experts, with the signature that is used, computed in a plain loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["cutlass_fused_moe"]


def cutlass_fused_moe(
    input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype,
    quant_scales, ep_size=1, ep_rank=0, output=None, use_fused_finalize=True,
):  # fmt: skip
    """Computes from what it is given; checks what the kernel's binding checks."""
    tokens, hidden = input.shape
    held, twice_intermediate, _ = fc1_expert_weights.shape
    assert not use_fused_finalize, "adds with atomics"
    assert (token_selected_experts.dtype, token_final_scales.dtype) == (torch.int32, torch.float32)
    assert token_selected_experts.shape == token_final_scales.shape
    assert input.dtype == fc1_expert_weights.dtype == fc2_expert_weights.dtype == output_dtype == output.dtype
    assert fc2_expert_weights.shape == (held, hidden, twice_intermediate // 2)
    assert tokens, "no kernel runs over nothing"
    assert not quant_scales
    for tensor in (input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output):
        assert tensor.is_contiguous()
    assert output.shape == input.shape
    first = ep_rank * held
    result = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token, ids in enumerate(token_selected_experts.tolist()):
        for choice, expert in enumerate(ids):
            if first <= expert < first + held:
                up, gate = (fc1_expert_weights[expert - first].double() @ input[token].double()).chunk(2)
                y = fc2_expert_weights[expert - first].double() @ (F.silu(gate) * up)
                result[token] += token_final_scales[token, choice].item() * y
    output.copy_(result)
    return output
