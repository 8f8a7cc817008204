"""Softmax attention over separate pieces of the keys, merged by the logarithm of each piece's denominator.

    state    an output and its `lse` (log-sum-exp): the natural logarithm of the sum of exp(score) over its keys
    merge    the mean of two outputs, weighted with exp(lse): exactly the attention over the keys of both

A piece without a visible key has `lse` -inf and weight 0.

Source: online softmax (Milakov and Gimelshein, 2018); merging as in flash decoding.
"""

import torch
from torch import Tensor

_SCORE_BYTES = 64 << 20  # largest score tensor, in bytes; more queries are computed in several passes


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention that also returns its `lse`, by batched products: `scaled_dot_product_attention` cannot return it.

    Scores and softmax are float32 at least. A query that sees no key gets 0, and `lse` -inf.

    Args:
        q: `[n, heads, L, d]`.
        k: `[n, kv_heads, K, d]`; `heads / kv_heads` neighbouring heads share one.
        v: `[n, kv_heads, K, dv]`.
        scale: factor on the scores.
        mask: added to the scores, 0 or -inf, `[n or 1, 1, L or 1, K]`; None hides nothing.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`, after scaling.
        sinks: `[heads]`, one more term (a logit) in each head's denominator.

    Returns:
        The output, `[n, heads, L, dv]`, and its `lse`, `[n, heads, L]`, the sink included.
    """
    count, heads, length, _ = q.shape
    bytes_per_query = max(1, count * heads * k.shape[2]) * torch.float32.itemsize
    step = max(1, _SCORE_BYTES // bytes_per_query)
    parts = []
    for start in range(0, length, step):
        rows = slice(start, start + step)
        hidden = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
        parts.append(_attend(q[:, :, rows], k, v, scale, hidden, soft_cap, sinks))
    if len(parts) == 1:
        return parts[0]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, soft_cap: float | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    count, heads, length, dim = q.shape
    kv_heads, num_keys = k.shape[1:3]
    group = heads // kv_heads
    # Heads that share keys become rows of one product, so that keys are never repeated.
    rows = q.reshape(count, kv_heads, group * length, dim)
    scores = (rows @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32))
    scores = scores.view(count, kv_heads, group, length, num_keys)
    if soft_cap is not None:
        scores, scale = scores.mul_(scale / soft_cap).tanh_(), soft_cap
    scores = scores.mul_(scale)
    if mask is not None:
        scores = scores.add_(mask.unsqueeze(2))
    lse = scores.logsumexp(dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype).view(kv_heads, group, 1))
    weights = scores.sub_(_finite(lse).unsqueeze(-1)).exp_().to(v.dtype)
    out = weights.view(count, kv_heads, group * length, num_keys) @ v
    return out.view(count, heads, length, -1), lse.view(count, heads, length)


def merge_states(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two states of the same queries over disjoint keys into the attention over all keys.

    A state with `lse` -inf is ignored; its output may hold anything.

    Args:
        out: `[..., dv]`.
        lse: `[...]`, natural logarithms.
        other: the other output, same shape.
        other_lse: the other `lse`, same shape.

    Returns:
        The merged output, in `out`'s dtype, and its `lse`.
    """
    merged = torch.logaddexp(lse, other_lse)
    total = _finite(merged)
    result = _weighted(out, lse, total) + _weighted(other, other_lse, total)
    return result.to(out.dtype), merged


def _weighted(out: Tensor, lse: Tensor, total: Tensor) -> Tensor:
    share = (lse - total).exp().unsqueeze(-1)
    return (out * share).masked_fill(lse.isneginf().unsqueeze(-1), 0)


def _finite(lse: Tensor) -> Tensor:
    """`lse` with 0 for -inf, so that subtracting it from -inf gives -inf, not nan."""
    return lse.masked_fill(lse.isneginf(), 0)
