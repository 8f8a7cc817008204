"""bfloat16 on a CPU: as near to float32 as transformers in bfloat16, and a row's result is its own.

A token that bfloat16 sends to another expert than float32 is far off, here as there, and a few such tokens are most of
a pooled error. So pooled errors are compared where every expert is visited, and medians where experts are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from bf16_cases import bf16_errors, teacher_forced
from c_kernels import needs_c
from checkpoints import make_checkpoint
from torch import Tensor

from model_runner import ModelRunner
from ubatch import UBatchConfig


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Qwen3Moe", {"num_experts_per_tok": 8}),
        ("Mixtral", {"num_experts_per_tok": 8}),
        ("DeepseekV3", {"num_experts_per_tok": 8, "topk_group": 4}),
        ("Llama", {}),
        ("Qwen3", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ],
    ids=["Qwen3Moe", "Mixtral", "DeepseekV3", "Llama", "Qwen3", "Llama with biases"],
)
def test_logits_are_as_near_to_float32_as_those_of_transformers(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """Of prompts in one step, and of decode steps."""
    prefill, decode, transformers = bf16_errors(tmp_path, family, seeds=2, **overrides).pooled()
    assert 0 < prefill <= transformers
    assert 0 < decode <= transformers


@pytest.mark.wide
@pytest.mark.long
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "DeepseekV3"])
def test_so_are_they_where_experts_are_chosen(family: str, tmp_path: Path) -> None:
    prefill, decode, transformers = bf16_errors(tmp_path, family, seeds=2).medians()
    assert 0 < prefill <= transformers
    assert 0 < decode <= transformers


@pytest.mark.slow
@pytest.mark.timeout(140)
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "DeepseekV3"])
def test_no_more_tokens_are_far_off(family: str, tmp_path: Path) -> None:
    """Pooled over thousands of rows, within twice the standard error of the difference."""
    length = 32
    errors = bf16_errors(tmp_path, family, seeds=6, prompts=64, length=length)
    for ours in (errors.prefill, errors.decode):
        more = (ours.square() - errors.transformers.square()).view(-1, length).mean(dim=1)  # of a prompt
        assert float(more.mean()) <= 2 * float(more.std()) / math.sqrt(more.numel())


# -- a row's result is its own -------------------------------------------------------------------------------------

_LENGTHS = (9, 24, 3, 17, 40, 5, 12, 30)
_STEPS = 4
_TOGETHER = (tuple(range(8)),)
WAYS: dict[str, tuple[Sequence[Sequence[int]], int, bool]] = {
    "alone": (tuple((index,) for index in range(8)), 1, False),
    "in other batches": (((7, 0), (3, 1, 2), (6, 5, 4)), 1, False),
    "on two threads": (_TOGETHER, 2, False),
    "in two lanes": (_TOGETHER, 1, True),
    "in two lanes on two threads": (_TOGETHER, 2, True),
}
"""Groups of requests that share a step, threads, and whether the step is overlapped."""
WIDE = {"hidden_size": 512, "vocab_size": 4096, "intermediate_size": 384, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def decoded(
    path: Path, groups: Sequence[Sequence[int]], threads: int, overlap: bool, attention: str = "auto"
) -> Tensor:
    """Logits of decode steps; prompts are read alone and on one thread, so that all ways begin with the same cache."""
    generator = torch.Generator().manual_seed(1)
    prompts, forced = (
        [torch.randint(0, 131, (length,), generator=generator).tolist() for length in lengths]
        for lengths in (_LENGTHS, [_STEPS] * 8)
    )
    dbo = UBatchConfig(enable_dbo=overlap, dbo_decode_token_threshold=2, dbo_prefill_token_threshold=1000)
    options = {"num_kv_blocks": 256, "block_size": 8, "attention_backend": attention}
    with ModelRunner(path, dtype=torch.bfloat16, dbo=dbo, **options) as runner:
        logits = teacher_forced(runner, prompts, forced, groups, threads)
        assert runner.statistics().engaged == (_STEPS if overlap else 0)
    return logits


@pytest.mark.wide
@pytest.mark.long
@pytest.mark.sample(2)
@needs_c
@pytest.mark.parametrize("overrides", [{}, WIDE], ids=["tiny", "wide"])
@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "DeepseekV3", "Llama"])
def test_decode_steps_are_the_same_to_the_last_bit(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    """Whoever shares the batch, on any number of threads, in lanes or not: attention and products are ours."""
    path = make_checkpoint(tmp_path, family, dtype=torch.bfloat16, **overrides)
    expected = decoded(path, _TOGETHER, 1, overlap=False)
    for name, (groups, threads, overlap) in WAYS.items():
        assert torch.equal(decoded(path, groups, threads, overlap), expected), name


@pytest.mark.wide
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_with_a_librarys_products_they_are_the_same_within_rounding(
    way: tuple[Sequence[Sequence[int]], int, bool], tmp_path: Path
) -> None:
    """Those of latent attention are torch's here. A token may go to another expert, so the median row decides."""
    path = make_checkpoint(tmp_path, "DeepseekV3", dtype=torch.bfloat16)
    expected = decoded(path, _TOGETHER, 1, overlap=False, attention="torch").float()
    difference = (decoded(path, *way, attention="torch").float() - expected).square().mean(dim=-1).sqrt()
    assert float(difference.median()) <= 2**-9 * float(expected.abs().max())
