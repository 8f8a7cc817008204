"""A token's output: the sum of its pairs' rows, always in the order in which the router chose them."""

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import cdiv, jit, power_of_2

_MAX_BLOCK = 1024  # columns of one program


@jit("ids", "weights", "gave_up", "first_expert")
def _sum_kernel(
    out: tl.tensor,
    rows: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    gave_up: tl.tensor,
    first_expert: tl.tensor,
    E: tl.constexpr,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    MAY_GIVE_UP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = token * TOP_K + choice
        local = tl.load(ids + pair) - first_expert
        is_local = (local >= 0) & (local < E)
        written = tl.where(is_local, H, 0)  # rows of other ranks' experts were never written
        row = tl.load(rows + pair * H + columns, mask=columns < written, other=0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + pair, mask=is_local, other=0)
        total += row
    if MAY_GIVE_UP:
        total = tl.where(tl.load(gave_up) != 0, float("nan"), total)
    tl.store(out + token * H + columns, total, mask=columns < H)


def sum_choices(
    rows: Tensor,
    topk_ids: Tensor,
    first_expert: int,
    num_experts: int,
    topk_weights: Tensor | None = None,
    gave_up: Tensor | None = None,
) -> Tensor:
    """`out[n] = sum over j of rows[n, j]`, in float32, over the choices whose expert is local.

    Args:
        rows: `[N, k, H]`, contiguous; rows of other ranks' experts are undefined.
        topk_ids: `[N, k]` int32 or int64, global ids.
        first_expert: global id of the first local expert.
        topk_weights: `[N, k]` float32 if `rows` are not weighted yet; weights of other ranks' experts may be NaN.
        gave_up: `[1]` int32, not 0 if the rows are incomplete: then all sums are NaN.

    Returns:
        `[N, H]`, dtype of `rows`; zeros for a token without an expert here.
    """
    tokens, top_k, columns = rows.shape
    out = torch.empty(tokens, columns, dtype=rows.dtype, device=rows.device)
    if out.numel():
        block = min(power_of_2(columns), _MAX_BLOCK)
        _sum_kernel[tokens, cdiv(columns, block)](
            *(out, rows, topk_ids.contiguous(), None if topk_weights is None else topk_weights.contiguous()),
            *(gave_up, first_expert),
            E=num_experts,
            H=columns,
            TOP_K=top_k,
            WEIGHTED=topk_weights is not None,
            MAY_GIVE_UP=gave_up is not None,
            BLOCK=block,
        )
    return out
