"""A copy that occupies SMs, as the kernels of NCCL and DeepEP do, for transports that emulate them.

One program occupies a whole SM: each of its threads has 128 bytes in flight, which takes more than half of the
registers. So no second copy program fits on the SM, and no program of a GEMM with large tiles. Source: NCCL's kernels,
whose 640 threads have up to 96 registers each.
"""

import torch
import triton.language as tl
from torch import Tensor

from ubatch.kernels.triton_jit import INTERPRETED, cdiv, jit

_WARPS = 32
_WORDS_OF_A_THREAD = 1 if INTERPRETED else 32
_BLOCK = 32 * _WARPS * _WORDS_OF_A_THREAD


@jit()
def _copy_kernel(out: tl.tensor, x: tl.tensor, num_words: tl.tensor, BLOCK: tl.constexpr) -> None:
    for start in tl.range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        words = start + tl.arange(0, BLOCK)
        tl.store(out + words, tl.load(x + words, mask=words < num_words), mask=words < num_words)


def copy_on_sms(out: Tensor, x: Tensor, sms: int) -> None:
    """Copy `x` to `out` with one program on each of `sms` SMs.

    Args:
        out, x: `[bytes]` uint8, contiguous; GPU memory or pinned host memory.
        sms: SMs to use, at least 1.
    """
    whole = x.numel() // 4 * 4
    for part, word in ((slice(whole), torch.int32), (slice(whole, None), torch.uint8)):
        target, source = out[part].view(word), x[part].view(word)
        if words := source.numel():
            _copy_kernel[(min(sms, cdiv(words, _BLOCK)),)](target, source, words, BLOCK=_BLOCK, num_warps=_WARPS)
