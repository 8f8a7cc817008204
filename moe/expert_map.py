"""From the experts that routers choose to the slots that transports know, and the load of every expert.

    router      topk_ids: experts
    here        slots = table[token % W, expert], and counts[expert] += 1
    transport   slots

Both in one small kernel per layer: C on a CPU, Triton on a GPU, torch elsewhere. Tables and counts lie on the device
and change in place, so a captured or recorded step reads what they hold when it runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from moe.experts.quantization import in_triton
from moe.placement import MOST_ROWS, Ints
from ubatch import ForwardMode, get_forward_context
from ubatch.kernels import compile_c, kernel_of, this_thread, why_not_c

LayerLoad = tuple[Tensor, Tensor]
"""Tokens of each expert of one layer, `[E]` int64: in prefill steps, and in decode steps."""


class ExpertMap:
    """The slots that a rank's tokens go to in one layer.

    Args:
        table: `[W, E + 1]` of `ExpertPlacement.dispatch_table`.
        device: device of the tokens.

    Attributes:
        table: `[MOST_ROWS, E + 1]` int32; rows from W on are not read.
        turns: `[1]` int64, W.
    """

    def __init__(self, table: Ints, device: torch.device | str = "cpu") -> None:
        self.table = torch.zeros(MOST_ROWS, table.shape[1], dtype=torch.int32, device=device)
        self.turns = torch.ones(1, dtype=torch.int64, device=device)
        self.replace(table)

    def replace(self, table: Ints | Tensor) -> None:
        """Change the table in place, in the order of the current stream; a table that lies on the device already, as
        int32, is not waited for."""
        new = torch.as_tensor(table).to(self.table)
        self.table[: len(table)].copy_(new)
        self.turns.fill_(len(table))


class ExpertLoads:
    """The tokens that this rank's router has sent to every expert of a model, by kind of step.

    Padding is not counted. Counts only grow: the load of a window is the difference of two snapshots.

    Attributes:
        counts: `[2, L, E]` int64 on the device: of prefill steps (mixed ones, too), then of decode steps (verify steps,
            too), in every MoE layer.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(2, num_layers, num_experts, dtype=torch.int64, device=device)

    def of_layer(self, layer: int) -> LayerLoad:
        """The counts of one MoE layer, as views."""
        return self.counts[0, layer], self.counts[1, layer]

    def snapshot(self) -> Tensor:
        """A copy on the device, in the order of the current stream."""
        return self.counts.clone()

    def clear(self) -> None:
        """Set all counts to 0: what was counted so far was a warm-up."""
        self.counts.zero_()


def map_and_count(topk_ids: Tensor, expert_map: ExpertMap | None, load: LayerLoad | None) -> Tensor:
    """The slots of routed tokens; adds the tokens to the load of the current step's kind.

    Args:
        topk_ids: `[T, k]` int64, experts; other ids are no expert: slot -1, and not counted.
        expert_map: None if every expert is in the slot of its number.
        load: None if nothing is counted.

    Returns:
        `[T, k]` int64; `topk_ids` itself without a map.
    """
    counts = None
    if load is not None:
        context = get_forward_context()
        mode = None if context is None else context.mode
        counts = load[mode is ForwardMode.DECODE or mode is ForwardMode.TARGET_VERIFY]
    if expert_map is not None:
        mapping, experts = (expert_map.table, expert_map.turns), expert_map.table.shape[1] - 1
    elif counts is not None:
        mapping, experts = None, counts.shape[0]
    else:
        return topk_ids
    if topk_ids.is_cuda and in_triton("cuda"):
        from moe.kernels import expert_map as triton_kernel

        return triton_kernel.map_and_count(topk_ids, experts, mapping, counts)
    own_modes = 0 if this_thread.recording is None else 1  # as `runs_in_c`, without a call per layer
    watched = torch._C._len_torch_dispatch_stack() > own_modes or torch.compiler.is_compiling()
    if watched or not topk_ids.is_cpu or why_not_c() is not None:
        return reference_map_and_count(topk_ids, experts, mapping, counts)
    ids = topk_ids if topk_ids.is_contiguous() else topk_ids.contiguous()
    slots = topk_ids if mapping is None else torch.empty_like(ids)
    table, turns = (None, None) if mapping is None else (mapping[0].data_ptr(), mapping[1].data_ptr())
    counted = None if counts is None else counts.data_ptr()
    _kernel()(ids.data_ptr(), *ids.shape, experts, counted, table, turns, slots.data_ptr())
    return slots


def reference_map_and_count(
    topk_ids: Tensor, experts: int, mapping: tuple[Tensor, Tensor] | None, counts: Tensor | None
) -> Tensor:
    """The same with torch, on every device.

    Args:
        experts: number of experts.
        mapping: `ExpertMap.table` and `ExpertMap.turns`.
        counts: `[E]` int64, added to.
    """
    known = (topk_ids >= 0) & (topk_ids < experts)
    ids = topk_ids.where(known, experts)  # the table's last column
    if counts is not None:
        counts.scatter_add_(0, ids.flatten().clamp(max=experts - 1), known.flatten().to(torch.int64))
    if mapping is None:
        return topk_ids
    table, turns = mapping
    rows = torch.arange(topk_ids.shape[0], device=topk_ids.device) % turns
    return table[rows[:, None], ids].to(torch.int64)


@cache
def _kernel() -> Callable[..., None]:
    source = (Path(__file__).parent / "kernels" / "expert_map.c").read_text(encoding="utf-8")
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return kernel_of(compile_c(source), "map_and_count", *(pointer, number, number, number), *(pointer,) * 4)
