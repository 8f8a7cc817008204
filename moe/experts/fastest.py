"""Which experts are the fastest on this machine's CPU: asked once per process, by running them."""

from __future__ import annotations

from functools import cache, partial

import torch

from moe.cpu_linear import best_times, packing_pays
from moe.experts.registry import make_experts
from ubatch import ConfigError
from ubatch.c_jit import why_not_c

__all__ = ["fastest_cpu_experts"]

_EXPERTS, _HIDDEN, _INTERMEDIATE, _TOP_K = 8, 512, 256, 4
_TOKENS = (16, 256)  # of a decode step, and of a prefill; they count alike


def fastest_cpu_experts(dtype: torch.dtype, device: torch.device) -> str:
    """The experts back end for a model of `dtype` on `device`: `native` where C can be compiled and is faster, else
    `packed` where oneDNN's layout pays, else `grouped`."""
    if dtype is not torch.float32 or device.type != "cpu":
        return "grouped"
    otherwise = "packed" if packing_pays(dtype, device) else "grouped"
    return "native" if why_not_c() is None and _native_is_faster(otherwise) else otherwise


@cache
def _native_is_faster(than: str) -> bool:
    with torch.inference_mode():
        w13 = torch.ones(_EXPERTS, 2 * _INTERMEDIATE, _HIDDEN, device="cpu")
        w2 = torch.ones(_EXPERTS, _HIDDEN, _INTERMEDIATE, device="cpu")
        try:
            both = [make_experts(name, w13, w2) for name in ("native", than)]
        except ConfigError:  # this kernel cannot be compiled, though others can
            return False
        relative = 1.0
        for tokens in _TOKENS:
            x, weights = torch.ones(tokens, _HIDDEN, device="cpu"), torch.ones(tokens, _TOP_K, device="cpu")
            ids = (torch.arange(tokens, device="cpu")[:, None] + torch.arange(_TOP_K, device="cpu")) % _EXPERTS
            native, other = best_times([partial(experts, x, ids, weights) for experts in both])
            relative *= native / other
        return relative < 1
