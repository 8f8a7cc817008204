"""How many KV blocks a runner has: a number, some bytes, or what a GPU has left beside the weights."""

from __future__ import annotations

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
        gpu_memory_utilization: share of the GPU's memory that this process may use, weights included, above 0 and at
            most 1; the cache gets what is left of it once the model is loaded. What other processes hold does not
            count as the GPU's. The rest is for a step's own tensors and the attention back ends' workspaces.

    Raises:
        ConfigError: at construction, for two of them, a share that cannot be, or a share of a device that is no GPU.
    """

    device: torch.device
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None

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
        if self.device.type != "cuda":
            raise ConfigError(
                f"gpu_memory_utilization is {share}, but the model runs on {self.device.type!r}; give kv_cache_memory "
                f"(bytes) instead."
            )

    def num_blocks(self, spec: CacheSpec) -> int:
        """Blocks of the cache; to be called when the model is loaded.

        Raises:
            ConfigError: not even one block fits.
        """
        if self.num_kv_blocks is not None:
            return self.num_kv_blocks
        if self.gpu_memory_utilization is not None:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
            held = torch.cuda.memory_reserved(self.device)
            allowed = int((free + held) * self.gpu_memory_utilization)
            return blocks_beside(spec, allowed, held, self.gpu_memory_utilization)
        return spec.blocks_in(DEFAULT_KV_CACHE_MEMORY if self.kv_cache_memory is None else self.kv_cache_memory)


def blocks_beside(spec: CacheSpec, allowed: int, held: int, share: float) -> int:
    """Blocks that fit in `allowed` bytes beside `held` ones; the cache has one block more, for padding.

    Raises:
        ConfigError: none fits.
    """
    blocks = (allowed - held) // spec.bytes_per_block - 1
    if blocks < 1:
        raise ConfigError(
            f"gpu_memory_utilization {share} allows {allowed} bytes; the model takes {held}, and two KV blocks "
            f"{2 * spec.bytes_per_block}. Raise it, or free memory of the GPU."
        )
    return blocks
