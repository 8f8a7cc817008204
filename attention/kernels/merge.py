"""Merges two attention states over different keys; `attention.lse.merge_states` is the same in torch.

Source: as in Flash-Decoding (Dao et al., 2023).
"""

import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import cdiv, jit, power_of_2

__all__ = ["merge_states"]

_STATES_PER_PROGRAM = 16


@jit("num_states")
def _merge_kernel(
    out: tl.tensor,
    lse: tl.tensor,
    other: tl.tensor,
    other_lse: tl.tensor,
    num_states: tl.tensor,
    DIM: tl.constexpr,
    BLOCK_STATES: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    state = tl.program_id(0).to(tl.int64) * BLOCK_STATES + tl.arange(0, BLOCK_STATES)
    dims = tl.arange(0, BLOCK_D)
    is_state = state < num_states
    inside = is_state[:, None] & (dims < DIM)[None, :]
    row = state[:, None] * DIM + dims[None, :]
    mine = tl.load(lse + state, mask=is_state, other=float("-inf"))
    its = tl.load(other_lse + state, mask=is_state, other=float("-inf"))
    highest = tl.maximum(mine, its)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    my_weight, its_weight = tl.exp(mine - shift), tl.exp(its - shift)
    weight_sum = my_weight + its_weight
    divisor = tl.where(weight_sum > 0, weight_sum, 1.0)
    # The output of a state that saw no key is not read: it may hold nan, and 0 * nan is nan.
    a = tl.load(out + row, mask=inside & (my_weight > 0)[:, None], other=0).to(tl.float32)
    b = tl.load(other + row, mask=inside & (its_weight > 0)[:, None], other=0).to(tl.float32)
    merged = (a * my_weight[:, None] + b * its_weight[:, None]) / divisor[:, None]
    tl.store(out + row, merged, mask=inside)
    tl.store(lse + state, tl.where(weight_sum > 0, shift + tl.log(divisor), float("-inf")), mask=is_state)


def merge_states(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Make `out` and `lse` the attention over the keys of both states, in place.

    Args:
        out: `[..., head_dim]`, contiguous.
        lse: `[...]` float32, contiguous, natural logarithms; where it is -inf no key was seen, and `out` is ignored.
        other: the other state's output, same shape, contiguous.
        other_lse: the other state's LSE, same shape, contiguous.
    """
    if not out.numel():
        return
    dim = out.shape[-1]
    _merge_kernel[cdiv(lse.numel(), _STATES_PER_PROGRAM),](
        out,
        lse,
        other,
        other_lse,
        lse.numel(),
        DIM=dim,
        BLOCK_STATES=_STATES_PER_PROGRAM,
        BLOCK_D=power_of_2(dim),
    )
