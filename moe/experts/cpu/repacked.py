"""Experts for serving whose weights are kept only as their products read them fastest.

The plain weights are gone after that: there is nothing to save, to train or to move to another device. A model runner
picks such experts where they pay; who needs the weights again takes `grouped`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from moe.experts.grouped import GroupedExperts
from ubatch import ConfigError

__all__ = ["RepackedExperts"]


class RepackedExperts(GroupedExperts):
    """What such experts refuse. A subclass takes `w13` and `w2` apart in its `__init__`, and deletes them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda`, `half` and their like end in."""
        moved = fn(torch.empty(0, dtype=self.dtype, device="cpu"))
        if moved.dtype is not self.dtype or moved.device.type != "cpu":
            raise ConfigError(
                f"repacked experts are float32 on the CPU for good and cannot become {moved.dtype} on {moved.device}. "
                "Use experts_backend='grouped'."
            )
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        raise ConfigError("repacked experts cannot be copied. Use experts_backend='grouped'.")

    def check_usable(self, x: Tensor) -> None:
        """Refuse what these weights cannot do.

        Raises:
            ConfigError: `x` is not on the CPU, or a gradient is wanted of it.
        """
        if x.device.type != "cpu":
            raise ConfigError(f"repacked experts are on the CPU, but their input is on {x.device}. Move it.")
        if torch.is_grad_enabled() and x.requires_grad:
            raise ConfigError(
                "repacked experts have no gradients. Use torch.inference_mode(), or experts_backend='grouped'."
            )
