"""Slots of routed tokens, and the load of every expert, in one kernel; see `moe.expert_map`."""

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import cdiv, jit

_BLOCK = 256


@jit("num_pairs", "top_k", "experts")
def _map_and_count_kernel(
    slots: tl.tensor,
    counts: tl.tensor,
    ids: tl.tensor,
    table: tl.tensor,
    turns: tl.tensor,
    num_pairs: tl.tensor,
    top_k: tl.tensor,
    experts: tl.tensor,
    MAPPED: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    expert = tl.load(ids + pairs, mask=inside, other=-1)
    known = (expert >= 0) & (expert < experts)
    if COUNTED:
        tl.atomic_add(counts + expert, tl.full([BLOCK], 1, tl.int64), mask=known, sem="relaxed")
    if MAPPED:
        row = table + (pairs // top_k) % tl.load(turns) * (experts + 1)
        tl.store(slots + pairs, tl.load(row + expert, mask=known, other=-1).to(tl.int64), mask=inside)


def map_and_count(
    topk_ids: Tensor, experts: int, mapping: tuple[Tensor, Tensor] | None, counts: Tensor | None
) -> Tensor:
    """Arguments and result as `moe.expert_map.reference_map_and_count`; all on one device."""
    table, turns = (None, None) if mapping is None else mapping
    ids = topk_ids.contiguous()
    slots = topk_ids if mapping is None else torch.empty_like(ids)
    if ids.numel():
        _map_and_count_kernel[cdiv(ids.numel(), _BLOCK),](
            *(None if mapping is None else slots, counts),
            *(ids, table, turns, ids.numel(), ids.shape[1], experts),
            MAPPED=mapping is not None,
            COUNTED=counts is not None,
            BLOCK=_BLOCK,
        )
    return slots
