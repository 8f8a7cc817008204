"""The ways to run prompts that are timed on a GPU, and the batches that they are timed on.

A batch has 4,096 random tokens, in one prompt or in several: one prompt needs its state in many parts, and several do
not, so that a chunk is read fewer times. States are not written. Where nothing can be timed, the first choice is used.
"""

from functools import cache, partial

import torch
from torch import Tensor

from attention.linear.kernels.prepare import SMALLEST
from attention.linear.kernels.scan import ScanChoice, scan_chunks
from attention.linear.plan import CHUNK
from attention.linear.states import GatedDeltaShape
from ubatch.kernels import autotune
from ubatch.kernels.triton_jit import INTERPRETED, power_of_2

_TOKENS, _MANY = 4096, 8
_Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@cache
def scan_choices(shape: GatedDeltaShape, dtype: torch.dtype) -> tuple[ScanChoice, ...]:
    """The choices that are timed for activations of this dtype; the default first.

    None of bfloat16 has one stage: by Triton 3.6, chunks of 64 then gave wrong numbers or illegal memory accesses on an
    H200, with 16 and with 32 columns.
    """
    most = power_of_2(shape.v_dim, SMALLEST)
    if INTERPRETED:
        return (ScanChoice(most, 4, 1),)
    if dtype != torch.bfloat16:
        return (ScanChoice(min(most, 32), 4, 1),)
    tried = [
        ScanChoice(min(most, columns), num_warps, 2, prepare_warps)
        for prepare_warps in (4, 8)
        for columns, num_warps in ((32, 4), (32, 8), (64, 8))
    ]
    return tuple(dict.fromkeys(tried))


def tune_scan(shape: GatedDeltaShape, dtype: torch.dtype, chunk: int, device: torch.device) -> ScanChoice:
    """The fastest way to run prompts, on average over one prompt and several. Chunks of short prompts are not timed.

    Args:
        dtype: of activations.
        chunk: tokens of a chunk.
    """
    choices = scan_choices(shape, dtype)
    if chunk < CHUNK:
        return choices[0]
    made: dict[int, _Batch] = {}

    def run(choice: ScanChoice, prompts: int = 1) -> Tensor:
        if prompts not in made:  # allocated only if something is measured
            made[prompts] = _random_batch(shape, dtype, prompts, chunk, device)
        mixed, g, beta, states, records, chunks = made[prompts]
        out = torch.empty(_TOKENS, shape.num_v_heads, shape.v_dim, device=device)
        inputs = mixed, g, beta, states, out, records, chunks
        scan_chunks(*inputs, choice, shape, chunk=chunk, most=0, write=False)
        return out

    heads = f"{shape.num_k_heads} / {shape.num_v_heads} heads of {shape.k_dim} and {shape.v_dim}"
    key = f"linear attention, {heads}, {dtype}, chunks of {chunk}"
    return autotune(key, choices, run, device=device, answer=run, also=[partial(run, prompts=_MANY)])


def _random_batch(shape: GatedDeltaShape, dtype: torch.dtype, prompts: int, chunk: int, device: torch.device) -> _Batch:
    """Inputs, gates, states, records and chunks of equally long prompts."""
    random, each = torch.Generator(device).manual_seed(0), _TOKENS // prompts
    mixed = torch.randn(_TOKENS, shape.conv_dim, dtype=dtype, device=device, generator=random)
    g, beta = torch.rand(2, _TOKENS, shape.num_v_heads, device=device, generator=random)
    states = torch.zeros(prompts, shape.num_v_heads, shape.k_dim, shape.v_dim, device=device)
    records = [[slot, 1, slot * each, each, 0, slot * each // chunk] for slot in range(prompts)]
    chunks = [[slot, start] for slot in range(prompts) for start in range(0, each, chunk)]
    return mixed, -g, beta, states, torch.tensor(records, device=device), torch.tensor(chunks, device=device)
