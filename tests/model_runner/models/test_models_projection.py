"""The linear layers of models, plain and packed: the same numbers, and what a packed one refuses."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from c_kernels import needs_c
from checkpoints import make_checkpoint
from model_checks import PROMPTS
from torch.nn import functional as F

from model_runner import ModelRunner, SamplingParams, generate, split_cost
from model_runner.decoder import ops
from model_runner.decoder.layers import Projection, pack_projections
from ubatch import ConfigError


def packed_projection(
    bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Projection, torch.Tensor, torch.Tensor | None]:
    weight, b = torch.randn(40, 24, dtype=dtype), torch.randn(40, dtype=dtype) if bias else None
    projection = Projection(weight, b)
    pack_projections(torch.nn.Sequential(projection))
    return projection, weight, b


@needs_c
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_packing_changes_no_result(bias: bool) -> None:
    packed, weight, b = packed_projection(bias)
    for shape in ((0, 24), (1, 24), (2, 9, 24), (70, 24)):
        x = torch.randn(shape)
        before = x.clone()
        for projection in (packed, Projection(weight, b)):
            torch.testing.assert_close(projection(x), F.linear(x, weight, b), atol=1e-5, rtol=1e-5)
        assert torch.equal(x, before)
    again = packed(x)
    packed.pack()
    assert torch.equal(packed(x), again)


@pytest.mark.long
@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_packed_weight_gives_its_rows_and_logits(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 45, dtype=dtype)
    plain, packed = Projection(weight), Projection(weight.clone())
    packed.pack()
    ids = torch.tensor([69, 0, 31, 32, 33, 0])
    for indices in (ids, ids[:0]):
        assert torch.equal(packed.rows(indices), plain.rows(indices))
    with pytest.raises(IndexError):
        packed.rows(torch.tensor([70]))
    x = torch.randn(5, 45, dtype=dtype)
    logits = packed.scores(x)
    assert logits.dtype is torch.float32
    torch.testing.assert_close(logits, x.float() @ weight.float().T, atol=1e-5, rtol=1e-5)
    assert plain.scores(x).dtype is dtype


@needs_c
@torch.inference_mode()
def test_a_packed_sum_with_a_bias_is_rounded_once() -> None:
    packed, weight, bias = packed_projection(dtype=torch.bfloat16)
    assert bias is not None
    x = torch.randn(9, 24, dtype=torch.bfloat16)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert (packed(x) != exact.bfloat16()).float().mean() < 0.01


@needs_c
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_weight_is_kept_once_and_stays_where_it_is(dtype: torch.dtype) -> None:
    packed, *_ = packed_projection(dtype=dtype)
    assert list(packed.state_dict()) == ["bias"]
    assert packed.eval().to("cpu").to(dtype) is packed
    with pytest.raises(ConfigError, match=rf"are {dtype} .* become torch.float16 on cpu.*experts_backend='grouped'"):
        packed.half()
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(packed)
    with pytest.raises(ConfigError, match="weights must be float32 or bfloat16"):
        Projection(torch.randn(4, 4).half()).pack()


def test_a_plain_one_is_a_module_like_any_other() -> None:
    plain = Projection(torch.randn(4, 3), torch.randn(4))
    x = torch.randn(2, 3)
    copied = copy.deepcopy(plain)
    assert copied.weight is not plain.weight
    assert torch.equal(copied(x), plain(x))
    assert copied.bfloat16()(x.bfloat16()).dtype is torch.bfloat16
    assert plain(x).dtype is torch.float32


@needs_c
@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen3", "DeepseekV2"])
def test_models_pack_their_projections_with_their_experts(tmp_path: Path, family: str) -> None:
    checkpoint = make_checkpoint(tmp_path, family, attention_bias=True)
    tokens, costs = [], []
    for backend in ("grouped", "native"):
        with ModelRunner(checkpoint, num_kv_blocks=64, experts_backend=backend) as runner:
            projections = [module for module in runner.model.modules() if isinstance(module, Projection)]
            assert len(projections) >= 6
            model: Any = runner.model
            plain = [model.embed_tokens] if model.lm_head is not model.embed_tokens else []  # rows are only looked up
            for module in projections:
                assert (module.weight is None) == (backend == "native" and module not in plain)
            outputs = generate(runner, PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))
            tokens.append([output.token_ids for output in outputs])
            costs.append(split_cost(runner.model))
    assert tokens[0] == tokens[1]
    assert costs[0] == costs[1]


def test_norms_on_the_cpu_are_torchs() -> None:
    x, update, weight = torch.randn(3, 7, 96)[:, ::2][1], torch.randn(4, 96), torch.randn(96)
    for scale in (1e-12, 1.0, 1e12):
        expected = F.rms_norm(x * scale, (96,), weight, 1e-6)
        torch.testing.assert_close(ops.rms_norm(x * scale, weight, 1e-6), expected, atol=0, rtol=2e-6)
    with torch.inference_mode():
        normed, summed = ops.add_rms_norm(update, x, weight, 1e-6)
    torch.testing.assert_close(normed, F.rms_norm(x + update, (96,), weight, 1e-6), atol=0, rtol=2e-6)
    assert torch.equal(summed, x + update)


def test_norms_have_gradients_and_keep_the_dtype() -> None:
    x, weight = torch.randn(4, 16, requires_grad=True), torch.randn(16)
    (own,) = torch.autograd.grad(ops.add_rms_norm(x, torch.ones(4, 16), weight, 1e-6)[0].sum(), x)
    (torchs,) = torch.autograd.grad(F.rms_norm(x + 1, (16,), weight, 1e-6).sum(), x)
    torch.testing.assert_close(own, torchs)
    assert ops.rms_norm(x.detach().bfloat16(), weight.bfloat16(), 1e-6).dtype is torch.bfloat16
