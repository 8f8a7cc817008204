"""Write new tokens to the cache, for back ends whose kernels do not: with torch, or on a GPU with one kernel."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from attention.interface import MLAInputs
from attention.kv_cache import MLAKVCache, PagedKVCache

FP8_CAPABILITY = (8, 9)
"""GPUs of this compute capability and newer convert to fp8."""


def store_kv(kv_cache: PagedKVCache, layer: int, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """`kv_cache.write(layer, k, v, slots)`, with `slots` from `write_slots`."""
    if _fuses(kv_cache):
        from attention.kernels.cache import write_kv

        write_kv(kv_cache, layer, k, v, slots)
    else:
        kv_cache.write(layer, k, v, slots)


def store_latents(kv_cache: MLAKVCache, layer: int, inputs: MLAInputs, slots: Tensor) -> None:
    """Rotate every token's key part and store it with the token's latent; `slots` from `write_slots`."""
    if _fuses(kv_cache):
        from attention.kernels.latent import write_latent

        write_latent(kv_cache, layer, inputs.latent, inputs.k_rope, inputs.rope, slots)
    else:
        kv_cache.write(layer, inputs.latent, inputs.rope.rotate(inputs.k_rope), slots)


def _fuses(kv_cache: PagedKVCache | MLAKVCache) -> bool:
    """Whether the Triton kernels can write this cache."""
    return kv_cache.device.type == "cuda" and _has_kernels(kv_cache.device, kv_cache.spec.fp8)


@cache
def _has_kernels(device: torch.device, fp8: bool) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    return not fp8 or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
