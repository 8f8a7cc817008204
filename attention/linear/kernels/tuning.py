"""The ways to run prompts that are timed on a GPU, and the batches that they are timed on.

A batch has 4,096 random tokens, in as many prompts as the step has, rounded: a few prompts need their states in many
parts, and many prompts do not, so that a chunk is read fewer times. States are not written. Where nothing can be timed,
the first choice is used.
"""

from functools import cache

import torch
from torch import Tensor

from attention.linear.kernels.scan import ScanChoice, scan_chunks
from attention.linear.states import GatedDeltaShape
from ubatch.kernels import autotune
from ubatch.kernels.triton_jit import INTERPRETED, power_of_2

_TOKENS, _MOST_PROMPTS = 4096, 8
_Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@cache
def scan_choices(shape: GatedDeltaShape, dtype: torch.dtype) -> tuple[ScanChoice, ...]:
    """The choices that are timed for activations of this dtype; the default first.

    None of bfloat16 has one stage: by Triton 3.6, chunks of 64 then gave wrong numbers or read foreign memory on an
    H200, with 16 and with 32 columns.
    """
    most = power_of_2(shape.v_dim, 16)
    if INTERPRETED:
        return (ScanChoice(most, 4, 1),)
    if dtype == torch.float32:
        return (ScanChoice(min(most, 32), 4, 1),)
    tried = [
        ScanChoice(min(most, columns), num_warps, 2, prepare_warps)
        for prepare_warps in (4, 8)
        for columns, num_warps in ((32, 4), (32, 8), (64, 8))
    ]
    return tuple(dict.fromkeys(tried))


def tune_scan(
    shape: GatedDeltaShape, dtype: torch.dtype, num_prompts: int, chunk: int, device: torch.device
) -> ScanChoice:
    """The fastest way to run prompts like these.

    Args:
        dtype: of activations.
        num_prompts: requests in chunks.
        chunk: tokens of a chunk.
    """
    prompts = min(power_of_2(num_prompts), _MOST_PROMPTS)
    made: list[_Batch] = []

    def answer(choice: ScanChoice) -> Tensor:
        if not made:  # allocated only if something is measured
            made.append(_random_batch(shape, dtype, prompts, chunk, device))
        mixed, g, beta, states, records, chunks = made[0]
        out = torch.empty(_TOKENS, shape.num_v_heads, shape.v_dim, device=device)
        inputs = mixed, g, beta, states, out, records, chunks
        scan_chunks(*inputs, choice, shape, chunk=chunk, most=0, write=False)
        return out

    heads = f"{shape.num_k_heads} / {shape.num_v_heads} heads of {shape.k_dim} and {shape.v_dim}"
    key = f"linear attention, {heads}, {dtype}, {prompts} prompts in chunks of {chunk}"
    return autotune(key, scan_choices(shape, dtype), answer, device=device, answer=answer)


def _random_batch(shape: GatedDeltaShape, dtype: torch.dtype, prompts: int, chunk: int, device: torch.device) -> _Batch:
    """Inputs, gates, states, records and chunks of equally long prompts."""
    random, each = torch.Generator(device).manual_seed(0), _TOKENS // prompts
    mixed = torch.randn(_TOKENS, shape.conv_dim, dtype=dtype, device=device, generator=random)
    g, beta = torch.rand(2, _TOKENS, shape.num_v_heads, device=device, generator=random)
    states = torch.zeros(prompts, shape.num_v_heads, shape.k_dim, shape.v_dim, device=device)
    records = [[slot, 1, slot * each, each, 0, slot * each // chunk] for slot in range(prompts)]
    chunks = [[slot, start] for slot in range(prompts) for start in range(0, each, chunk)]
    return mixed, -g, beta, states, torch.tensor(records, device=device), torch.tensor(chunks, device=device)
