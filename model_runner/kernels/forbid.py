"""-inf for tokens that a mask of bits does not allow. `model_runner.sampling.grammar` has the reference."""

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import cdiv, jit

_BLOCK = 1024
_BITS = tl.constexpr(32)


@jit("logits", "rows", "masks", "vocab", "words")
def _forbid_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    masks: tl.tensor,
    vocab: tl.tensor,
    words: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    number, token = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + number)
    inside = token < vocab
    word = tl.load(masks + number.to(tl.int64) * words + token // _BITS, mask=inside, other=-1)
    forbidden = (word >> (token % _BITS)) & 1 == 0
    tl.store(logits + row * vocab + token, float("-inf"), mask=inside & forbidden)


def forbid(logits: Tensor, rows: Tensor | None, masks: Tensor) -> None:
    """See `model_runner.sampling.grammar.forbid`; one launch."""
    count, words = masks.shape
    vocab = logits.shape[1]
    where = torch.arange(count, device=logits.device) if rows is None else rows
    if count:
        _forbid_kernel[(count, cdiv(vocab, _BLOCK))](logits, where, masks, vocab, words, _BLOCK)
