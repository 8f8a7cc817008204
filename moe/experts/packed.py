"""Experts for serving on a CPU: as `grouped`, but the weights are kept only as oneDNN reads them fastest.

The plain weights are gone after that: there is nothing to save, to train or to move to another device. A model runner
picks this where it pays; who needs the weights again takes `grouped`.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.cpu_linear import PackedLinear, kernel_rows
from moe.cpu_threads import compute_threads, run_parts
from moe.experts.grouped import GroupedExperts, RowPlan
from ubatch import ConfigError

__all__ = ["PackedExperts"]

_Rows: TypeAlias = tuple[int, int]
"""Where an expert lies among those held here, and its rows."""

_LEAST_EXPERTS = 2  # fewer are not worth a thread of their own
_READING_ROWS = 8  # reading an expert's weights takes as long as computing so many rows
_CACHED_BYTES = 4 << 20  # of all experts' rows: as many may be written and read again without leaving the cache


class PackedExperts(GroupedExperts):
    """Experts with packed weights. CPU and float32; errors as `FusedExperts` and `PackedLinear`."""

    def __init__(self, w13: Tensor, w2: Tensor, first_expert: int = 0) -> None:
        super().__init__(w13, w2, first_expert)
        self._packed = [(PackedLinear(up), PackedLinear(down)) for up, down in zip(self.w13, self.w2, strict=True)]
        del self.w13, self.w2

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What `to`, `cuda`, `half` and their like end in."""
        moved = fn(torch.empty(0))
        if moved.dtype is not self.dtype or moved.device.type != "cpu":
            raise ConfigError(
                f"packed experts are float32 on the CPU for good and cannot become {moved.dtype} on {moved.device}. "
                "Use experts_backend='grouped'."
            )
        return super()._apply(fn, recurse)

    def __deepcopy__(self, memo: dict[int, object]) -> PackedExperts:
        raise ConfigError("packed experts cannot be copied. Use experts_backend='grouped'.")

    def _run_experts(self, hidden_states: Tensor, plan: RowPlan) -> Tensor:
        """See `GroupedExperts`. Every core takes some of the experts, where torch has several."""
        results = hidden_states.new_empty(plan.token_of_row.shape[0], self.hidden_size)
        lens = [(slot, rows) for slot, rows in enumerate(plan.rows_per_expert) if rows]
        parts, start = [], 0
        for share in _cut(lens, compute_threads()):
            parts.append(partial(self._run_share, hidden_states, plan.token_of_row, results, share, start))
            start += sum(rows for _, rows in share)
        run_parts(parts)
        return results

    def _run_share(
        self, hidden_states: Tensor, token_of_row: Tensor, results: Tensor, share: Sequence[_Rows], start: int
    ) -> None:
        """Some experts, whose rows lie side by side from `start` on."""
        end = start + sum(rows for _, rows in share)
        row_bytes = (self.hidden_size + 2 * self.intermediate_size) * hidden_states.itemsize
        if (end - start) * row_bytes <= _CACHED_BYTES:
            x = hidden_states.index_select(0, token_of_row[start:end])
            self._run_at_once(x, share, results[start:end])
            return
        for slot, rows in share:
            # Where an expert takes more rows than it has, the rows behind them, which are others', fill them up.
            tokens = token_of_row[start : start + kernel_rows(rows)]
            results[start : start + rows] = self.run_expert(slot, hidden_states.index_select(0, tokens))[:rows]
            start += rows

    def _run_at_once(self, x: Tensor, share: Sequence[_Rows], results: Tensor) -> None:
        """With few rows, what is done to each expert's is done to all at once."""
        lens = [rows for _, rows in share]
        packed = [self._packed[slot] for slot, _ in share]
        up = torch.cat([first.unchecked(rows) for (first, _), rows in zip(packed, x.split(lens), strict=True)])
        gate, up = up.chunk(2, dim=-1)
        down = (F.silu(gate) * up).split(lens)
        torch.cat([second.unchecked(rows) for (_, second), rows in zip(packed, down, strict=True)], out=results)

    def run_expert(self, slot: int, x: Tensor) -> Tensor:
        """See `GroupedExperts`."""
        first, second = self._packed[slot]
        gate, up = first(x).chunk(2, dim=-1)
        return second(F.silu(gate) * up)


def _cut(experts: Sequence[_Rows], most: int) -> Iterator[Sequence[_Rows]]:
    """At most so many shares, each of neighbours that take about as long as those of another."""
    shares = min(most, max(1, len(experts) // _LEAST_EXPERTS))
    ends = list(accumulate(rows + _READING_ROWS for _, rows in experts))
    first = 0
    for share in range(1, shares + 1):
        last = len(experts) if share == shares else bisect(ends, ends[-1] * share / shares)
        if last > first:
            yield experts[first:last]
        first = max(first, last)
