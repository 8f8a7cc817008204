"""Number of a runner's KV blocks: given in blocks, in bytes, or as a share of a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention import CacheSpec
from ubatch import ConfigError

__all__ = ["DEFAULT_KV_CACHE_MEMORY", "KVMemory", "blocks_beside"]

DEFAULT_KV_CACHE_MEMORY = 256 << 20
"""Bytes of a KV cache if no size is given."""


@dataclass(frozen=True)
class KVMemory:
    """The size of a KV cache; at most one of the three is given, 256 MiB if none is.

    Attributes:
        gpu_memory_utilization: share of the GPU's memory that this process may use, above 0 and at most 1; the cache
            gets what weights, the largest step and graphs leave of it, see `model_runner.memory.memory_profile`.
            Memory of other processes is not counted as the GPU's.
        simulated: memory is measured by something other than CUDA, so any device is allowed.

    Raises:
        ConfigError: at construction, if two sizes are given, the share is out of range, or the device is no GPU.
    """

    device: torch.device
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    simulated: bool = False

    def __post_init__(self) -> None:
        names = ("num_kv_blocks", "kv_cache_memory", "gpu_memory_utilization")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} contradict each other: all give the size of the KV cache.")
        share = self.gpu_memory_utilization
        if share is None:
            return
        if not 0 < share <= 1:
            raise ConfigError(f"gpu_memory_utilization must be above 0 and at most 1, not {share}.")
        if self.device.type != "cuda" and not self.simulated:
            raise ConfigError(
                f"gpu_memory_utilization is {share}, but the model runs on {self.device.type!r}; give kv_cache_memory "
                f"(bytes) instead."
            )

    def num_blocks(self, spec: CacheSpec, measure: Callable[[float], int]) -> int:
        """Blocks of the cache; call it when the model is loaded.

        Args:
            measure: returns the blocks that fit in a share of the GPU's memory.

        Raises:
            ConfigError: not even one block fits.
        """
        if self.num_kv_blocks is not None:
            return self.num_kv_blocks
        if self.gpu_memory_utilization is not None:
            return measure(self.gpu_memory_utilization)
        return spec.blocks_in(DEFAULT_KV_CACHE_MEMORY if self.kv_cache_memory is None else self.kv_cache_memory)


def blocks_beside(bytes_per_block: int, allowed: int, held: int, share: float, parts: str = "") -> int:
    """Blocks that fit in `allowed - held` bytes, without the cache's additional block for padding.

    Args:
        held: bytes used by everything except the cache.
        parts: what `held` consists of, for the message.

    Raises:
        ConfigError: not even one block fits.
    """
    blocks = (allowed - held) // bytes_per_block - 1
    if blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization {share} allows {allowed} bytes; the model takes {held}{parts and f' ({parts})'}, "
            f"and two KV blocks {2 * bytes_per_block}. Raise it, lower max_num_batched_tokens, or free memory of "
            "the GPU."
        )
    return blocks
