"""Experts for serving on a CPU: as `grouped`, but the weights are kept only in oneDNN's packed layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.cpu_linear import PackedLinear, kernel_rows
from moe.experts.cpu.repacked import RepackedExperts
from moe.experts.grouped import RowPlan
from ubatch import ConfigError

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
