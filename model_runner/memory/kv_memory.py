"""How many KV blocks a runner has: a number, some bytes, or what a GPU has left beside all else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention import CacheSpec
from ubatch import ConfigError

__all__ = ["DEFAULT_KV_CACHE_MEMORY", "KVMemory", "blocks_beside"]

DEFAULT_KV_CACHE_MEMORY = 256 << 20
"""Bytes of a KV cache whose size nobody gives."""


@dataclass(frozen=True)
class KVMemory:
    """The size of a KV cache; at most one of the three is given, 256 MiB if none is.

    Attributes:
        device: where the cache will be.
        num_kv_blocks: in blocks.
        kv_cache_memory: in bytes.
        gpu_memory_utilization: share of the GPU's memory that this process may use, above 0 and at most 1; the cache
            gets what weights, the largest step and graphs leave of it, see `model_runner.memory.memory_profile`. What
            other processes hold does not count as the GPU's.
        simulated: something else than CUDA tells what memory there is, so any device does.

    Raises:
        ConfigError: at construction, for two of them, a share that cannot be, or a share of a device that is no GPU.
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
        """Blocks of the cache; to be called when the model is loaded.

        Args:
            spec: of the cache.
            measure: blocks that fit in a share of the GPU's memory.

        Raises:
            ConfigError: not even one block fits.
        """
        if self.num_kv_blocks is not None:
            return self.num_kv_blocks
        if self.gpu_memory_utilization is not None:
            return measure(self.gpu_memory_utilization)
        return spec.blocks_in(DEFAULT_KV_CACHE_MEMORY if self.kv_cache_memory is None else self.kv_cache_memory)


def blocks_beside(bytes_per_block: int, allowed: int, held: int, share: float, parts: str = "") -> int:
    """Blocks that fit in `allowed` bytes beside `held` ones; the cache has one block more, for padding.

    Args:
        bytes_per_block: of the cache, and of what else has as many blocks.
        allowed: bytes of this process.
        held: by all but the cache.
        share: that was asked for.
        parts: what `held` consists of, for the message.

    Raises:
        ConfigError: none fits.
    """
    blocks = (allowed - held) // bytes_per_block - 1
    if blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization {share} allows {allowed} bytes; the model takes {held}{parts and f' ({parts})'}, "
            f"and two KV blocks {2 * bytes_per_block}. Raise it, lower max_num_batched_tokens, or free memory of "
            "the GPU."
        )
    return blocks
