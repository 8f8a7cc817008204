"""Experts for serving on a CPU: as `grouped`, with their weights kept only in the kernels' layout.

packed      oneDNN's packed layout
native      this project's kernels in C: all of a layer in one call, sorting and summing included. With products this
            fast, torch's small operators would take a third of a decode step's time

The plain weights are deleted: these experts cannot be saved, trained or moved to another device. A model runner picks
them if they are faster; use `grouped` to keep the weights.
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.cpu_linear import PackedLinear, kernel_rows
from moe.experts.torch_experts import GroupedExperts, RowPlan
from moe.grouped_linear import GroupedLinear, add_rows, run_layer
from moe.segments import segment_offsets
from ubatch import ConfigError
from ubatch.kernels import rows_contiguous


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


_CACHED_BYTES = 4 << 20  # bytes of all experts' rows that stay in the cache when written and read again


class PackedExperts(RepackedExperts):
    """Experts with packed weights. CPU; errors as `FusedExperts`, `PackedLinear` and `RepackedExperts`."""

    def __init__(self, w13: Tensor, w2: Tensor, first_expert: int = 0) -> None:
        super().__init__(w13, w2, first_expert)
        self._packed = [(PackedLinear(up), PackedLinear(down)) for up, down in zip(self.w13, self.w2, strict=True)]
        del self.w13, self.w2

    @classmethod
    def check_movable(cls) -> None:
        """Refused: only oneDNN knows the layout.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "experts back end 'packed' keeps weights in a layout that only oneDNN knows, so they cannot move between "
            "ranks. Use 'native' or 'grouped'."
        )

    def _run_experts(self, hidden_states: Tensor, plan: RowPlan, slots: range) -> Tensor:
        """See `GroupedExperts`. With few rows, gather and activation run once for all experts."""
        self.check_usable(hidden_states)
        rows = plan.rows_of(slots)
        if len(rows) * (self.hidden_size + 2 * self.intermediate_size) * hidden_states.itemsize > _CACHED_BYTES:
            return super()._run_experts(hidden_states, plan, slots)
        used = [self._packed[slot] for slot in slots if plan.rows_per_expert[slot]]
        lens = [count for count in plan.rows_per_expert[slots.start : slots.stop] if count]
        x = hidden_states.index_select(0, plan.token_of_row[rows.start : rows.stop]).split(lens)
        both = torch.cat([first.unchecked(part) for (first, _), part in zip(used, x, strict=True)])
        gate, up = both.chunk(2, dim=-1)
        down = (F.silu(gate) * up).split(lens)
        return torch.cat([second.unchecked(part) for (_, second), part in zip(used, down, strict=True)])

    def rows_of_call(self, rows: int) -> int:
        return kernel_rows(rows)

    def run_expert(self, slot: int, x: Tensor) -> Tensor:
        first, second = self._packed[slot]
        gate, up = first(x).chunk(2, dim=-1)
        return second(F.silu(gate) * up)


class NativeExperts(RepackedExperts):
    """Experts on `GroupedLinear`. CPU; errors as `FusedExperts`, `GroupedLinear` and `RepackedExperts`."""

    def __init__(self, w13: Tensor, w2: Tensor, first_expert: int = 0) -> None:
        super().__init__(w13, w2, first_expert)
        self._up = GroupedLinear(self.w13, gated=True)
        del self.w13
        self._down = GroupedLinear(self.w2)
        del self.w2

    def slot_tensors(self) -> Sequence[Tensor]:
        return [*super().slot_tensors(), self._up.packed, self._down.packed]

    def forward(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        if self.dtype is torch.float32 and torch.is_grad_enabled() and topk_weights.requires_grad:
            return super().forward(hidden_states, topk_ids, topk_weights, scales)
        self.check_input(hidden_states, topk_ids, topk_weights, scales)
        x = hidden_states if scales is None else self.dequantized(hidden_states, scales)
        self.check_usable(x, topk_ids, topk_weights)
        x = x if x.stride(1) == 1 else rows_contiguous(x)
        return run_layer(self._up, self._down, x, topk_ids, topk_weights, self.expert_range.start)

    def _run_experts(self, hidden_states: Tensor, plan: RowPlan, slots: range) -> Tensor:
        self.check_usable(hidden_states)
        first_row = segment_offsets(torch.tensor(plan.rows_per_expert[slots.start : slots.stop]))
        rows = plan.rows_of(slots)
        tokens = plan.token_of_row[rows.start : rows.stop]
        inner = self._up(rows_contiguous(hidden_states), first_row, tokens, first_expert=slots.start)
        return self._down(inner, first_row, first_expert=slots.start)

    def _add_rows(self, rows: Tensor, row_of_pair: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
        if rows.dtype is torch.float32 and torch.is_grad_enabled() and weights.requires_grad:
            return super()._add_rows(rows, row_of_pair, offsets, weights)
        self.check_usable(weights)
        return add_rows(rows, row_of_pair, offsets, weights.float().contiguous())

    def run_expert(self, slot: int, x: Tensor) -> Tensor:
        self.check_usable(x)
        rows = torch.tensor([0, x.shape[0]])
        return self._down(self._up(x.contiguous(), rows, first_expert=slot), rows, first_expert=slot)
