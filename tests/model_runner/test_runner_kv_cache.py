"""The runner's KV cache in fp8: what it is scaled by, and what it costs in accuracy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, make_qwen3_moe_checkpoint, with_tensors
from model_checks import PROMPTS, admitted, all_logits
from torch import Tensor

from attention import PagedKVCache
from model_runner import CheckpointError, ModelRunner, ScheduledRequest
from ubatch import ConfigError, UBatchConfig

SCALES = {0: (0.0123, 0.0456), 2: (1e-3, 3e-8)}
"""Of keys and values of the layers that have some. bf16 would round them, fp16 would lose the last one."""


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose first and last layer bring scales, of the shapes that quantisers write."""
    path = make_qwen3_moe_checkpoint(tmp_path_factory.mktemp("scaled"))
    return with_tensors(
        path,
        {
            f"model.layers.{layer}.self_attn.{part}_scale": torch.full(shape, scale)
            for layer, scales in SCALES.items()
            for part, scale, shape in zip("kv", scales, ((), (1,)), strict=True)
        },
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_are_the_checkpoints_own_whatever_the_model_computes_in(scaled: Path, dtype: torch.dtype) -> None:
    with ModelRunner(scaled, num_kv_blocks=4, kv_cache_dtype="fp8", dtype=dtype) as runner:
        assert isinstance(runner.kv_cache, PagedKVCache)
        assert runner.kv_cache.spec.fp8
        for layer in range(3):
            wanted = torch.tensor(SCALES.get(layer, (1.0, 1.0))).tolist()  # as float32 has them
            assert list(runner.kv_cache.scales(layer)) == wanted


def logits_of(path: Path, kv_cache_dtype: str, dbo: UBatchConfig) -> tuple[list[Tensor], int]:
    """Of a prefill and one decode step, and how many of the two were overlapped."""
    with ModelRunner(path, num_kv_blocks=64, block_size=4, kv_cache_dtype=kv_cache_dtype, dbo=dbo) as runner:
        requests = admitted(runner, PROMPTS)
        steps = []
        for _ in range(2):
            shares = [ScheduledRequest(request, request.num_uncomputed_tokens) for request in requests]
            steps.append(all_logits(runner, shares))
            for share in shares:
                share.request.advance(share.num_tokens, 7)
        return steps, runner.statistics().engaged


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV2"])
def test_fp8_is_near_and_does_not_depend_on_lanes(tmp_path: Path, family: str) -> None:
    path = make_checkpoint(tmp_path, family)
    alone = UBatchConfig(enable_dbo=False)
    lanes = UBatchConfig(dbo_decode_token_threshold=2, dbo_prefill_token_threshold=2)
    exact, _ = logits_of(path, "auto", alone)
    whole, _ = logits_of(path, "fp8", alone)
    split, engaged = logits_of(path, "fp8", lanes)
    assert engaged == 2
    for wanted, got, cut in zip(exact, whole, split, strict=True):
        error = (got - wanted).abs()
        assert error.max() > 1e-4  # it is stored in fp8
        assert error.median() < 0.02 * wanted.abs().max()
        torch.testing.assert_close(cut, got, atol=1e-4, rtol=1e-4)


def test_an_unknown_kv_cache_dtype_is_refused(scaled: Path) -> None:
    with pytest.raises(ConfigError, match="unknown kv_cache_dtype 'fp9'; did you mean 'fp8'"):
        ModelRunner(scaled, kv_cache_dtype="fp9")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("model.layers.1.self_attn.k_scale", "but not the other of"),
        ("model.layers.1.self_attn.k_proj.k_scale", "'model.layers.1.self_attn.k_proj.k_scale', which is not under"),
        ("model.layers.0.self_attn.kv_scale", "is not understood here. Run it with kv_cache_dtype='auto'"),
    ],
)
def test_scales_that_would_be_ignored_are_refused(scaled: Path, tmp_path: Path, extra: str, message: str) -> None:
    with_tensors(scaled, {extra: torch.tensor(0.5)}, tmp_path)
    with pytest.raises(CheckpointError, match=message):
        ModelRunner(tmp_path, num_kv_blocks=4, kv_cache_dtype="fp8")
    ModelRunner(tmp_path, num_kv_blocks=4).close()
