"""Experts by flashinfer's CUTLASS kernels: routing, both GEMMs and the weighted sum in one call.

The kernel takes each expert's up projection before its gate projection, so the weights are kept only in that order; the
plain ones are deleted. The kernel is configured as the first of two ranks with equally many experts: ids 0 to E - 1 are
local, and any other id (another rank's, or padding) adds nothing. Global ids are converted before the call.

Its fused last step adds with atomics, in any order; it is turned off, because a step must be reproducible.

Source: flashinfer's documentation of `cutlass_fused_moe`; the kernels are TensorRT-LLM's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from moe.experts.base import FusedExperts
from ubatch import ConfigError, import_optional, report_sm_use

_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 8  # of hidden and intermediate sizes, for 16 bytes of either dtype
_NOBODY = -1  # an id of no rank


class FlashInferExperts(FusedExperts):
    """Experts by `flashinfer.fused_moe.cutlass_fused_moe`. CUDA, bfloat16 and float16; fp8 input is dequantised.

    Raises:
        ConfigError: flashinfer is missing or too old, or weights that its kernel does not take.
    """

    capturable: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    """Device types that the kernel runs on."""

    def __init__(self, w13: Tensor, w2: Tensor, first_expert: int = 0) -> None:
        super().__init__(w13, w2, first_expert)
        if self.w13.device.type not in self.devices:
            raise ConfigError(f"flashinfer experts run on {' and '.join(self.devices)}, not on {self.w13.device}.")
        if self.w13.is_cuda and self.dtype not in _DTYPES:
            raise ConfigError(f"flashinfer experts compute in bfloat16 or float16, not in {self.dtype}.")
        if self.hidden_size % _ALIGNMENT or self.intermediate_size % _ALIGNMENT:
            raise ConfigError(
                f"flashinfer experts need sizes that are multiples of {_ALIGNMENT}, not hidden {self.hidden_size} and "
                f"intermediate {self.intermediate_size}. Use experts_backend='grouped'."
            )
        self._fused_moe = find_fused_moe()
        gate, up = self.w13.detach().chunk(2, dim=1)
        self.w31 = nn.Parameter(torch.cat((up, gate), dim=1), requires_grad=False)
        self.w2 = nn.Parameter(self.w2.detach().contiguous(), requires_grad=False)
        del self.w13

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        self.check_input(hidden_states, topk_ids, topk_weights, scales)
        self._refuse_gradients(hidden_states, topk_weights)
        report_sm_use("flashinfer experts", obeys=self.obeys_sms)
        x = self.dequantized(hidden_states, scales).contiguous()
        out = torch.empty_like(x)
        if not x.shape[0]:
            return out
        self._fused_moe(
            input=x,
            token_selected_experts=self._local_ids(topk_ids),
            token_final_scales=topk_weights.contiguous(),
            fc1_expert_weights=self.w31,
            fc2_expert_weights=self.w2,
            output_dtype=x.dtype,
            quant_scales=[],
            ep_size=2,
            ep_rank=0,
            output=out,
            use_fused_finalize=False,
        )
        return out

    def _local_ids(self, topk_ids: Tensor) -> Tensor:
        """Ids as the kernel counts them, int32."""
        held = self.expert_range
        if held.start == 0:  # larger ids are another rank's already
            return topk_ids.to(torch.int32).contiguous()
        is_local = (topk_ids >= held.start) & (topk_ids < held.stop)
        return torch.where(is_local, topk_ids - held.start, _NOBODY).to(torch.int32).contiguous()


def find_fused_moe() -> Callable[..., Any]:
    """Import flashinfer's kernel. Tests replace this function to supply a stand-in.

    Raises:
        ConfigError: flashinfer cannot be imported, or this version lacks the kernel.
    """
    module = import_optional(
        "flashinfer.fused_moe",
        "Install flashinfer-python, and flashinfer-cubin in the same version if at all, or use "
        "experts_backend='triton' or 'grouped'.",
    )
    found: Callable[..., Any] | None = getattr(module, "cutlass_fused_moe", None)
    if found is None or "use_fused_finalize" not in inspect.signature(found).parameters:
        raise ConfigError(
            "the installed flashinfer has no deterministic cutlass_fused_moe (use_fused_finalize). Install "
            "flashinfer-python 0.6 or later, or use experts_backend='triton' or 'grouped'."
        )
    return found
