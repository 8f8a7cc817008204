"""Sums over variable-length lists of rows: adds up expert outputs per token.

Both places where a token's results are added up (over its experts on one rank, over the ranks that hold them) use
`segment_sum`. It adds in the order of the index, so a token's sum does not depend on which other tokens share the
batch, and it reads every row once, without the intermediate that gather + multiply + sum would write.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_offsets(lengths: Tensor) -> Tensor:
    """Where every segment starts, and where the last one ends.

    Args:
        lengths: `[S]` integers.

    Returns:
        `[S + 1]` int64: 0, then the running sum.
    """
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def segment_sum(rows: Tensor, index: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
    """`out[s] = sum over j in offsets[s] .. offsets[s + 1] of weights[j] * rows[index[j]]`.

    Args:
        rows: `[N, H]`, floating.
        index: `[M]` int64, rows to add, segment by segment.
        offsets: `[S + 1]` int64, from `segment_offsets`.
        weights: `[M]` of the dtype of `rows`, or None for ones.

    Returns:
        `[S, H]`; an empty segment gives zeros, whatever the rows hold.
    """
    if rows.shape[0] == 0:
        return rows.new_zeros(offsets.shape[0] - 1, rows.shape[1])
    return F.embedding_bag(index, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)
