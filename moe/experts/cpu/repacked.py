"""Experts for serving whose weights are kept only in the kernels' layout.

The plain weights are deleted: these experts cannot be saved, trained or moved to another device. A model runner picks
them if they are faster; use `grouped` to keep the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from moe.experts.grouped import GroupedExperts
from ubatch import ConfigError


class RepackedExperts(GroupedExperts):
    """Refuses what such experts do not support. A subclass repacks `w13` and `w2` in `__init__`, and deletes them."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Called by `to`, `cuda`, `half` and the like; refuses another dtype or device."""
        moved = fn(torch.empty(0, dtype=self.dtype, device="cpu"))
        if moved.dtype is not self.dtype or moved.device.type != "cpu":
            raise ConfigError(
                f"repacked experts are {self.dtype} on the CPU for good and cannot become {moved.dtype} on "
                f"{moved.device}. Use experts_backend='grouped'."
            )
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        raise ConfigError("repacked experts cannot be copied. Use experts_backend='grouped'.")

    def check_usable(self, *inputs: Tensor) -> None:
        """Refuse inputs, rows or weights of choices, that these experts do not support.

        Raises:
            ConfigError: one is not on the CPU, or needs a gradient.
        """
        for x in inputs:
            if x.device.type != "cpu":
                raise ConfigError(f"repacked experts are on the CPU, but their input is on {x.device}. Move it.")
            if torch.is_grad_enabled() and x.requires_grad:
                raise ConfigError(
                    "repacked experts have no gradients. Use torch.inference_mode(), or experts_backend='grouped'."
                )
