"""Experts of an fp8 checkpoint on Triton's kernels: their weights stay in fp8, and activations are rounded to fp8."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, with_config
from fp8_checkpoints import FP8, PROMPTS, Kind, blockwise, compressed, kept_projections, round_operands, write_fp8
from model_checks import prompt_logits
from safetensors.torch import load_file
from torch import Tensor, nn
from triton_batches import DEVICE  # before Triton is imported

from model_runner import ModelRunner, RandomQwen3Moe, make_random_qwen3_moe
from model_runner.drafting.network import load_draft
from moe import FusedMoEModularKernel, fp8_block, fp8_linear_block

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_experts_per_tok": 2}
MOE = {**SIZES, "num_experts": 4, "mlp_only_layers": []}
DEEPSEEK = {
    **SIZES,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "intermediate_size": 100,
}
BLOCKS = blockwise(128, 128)


def experts_of(model: nn.Module) -> list[Any]:
    """The experts of every MoE layer."""
    return [module.experts for module in model.modules() if isinstance(module, FusedMoEModularKernel)]


def plain_and_rounded(meant: Path, projections: list[str]) -> tuple[Tensor, Tensor]:
    """Logits in float32 on the CPU: of the weights as they are, and with the fp8 operands rounded."""
    with ModelRunner(meant, num_kv_blocks=16, experts_backend="reference") as runner:
        plain = prompt_logits(runner, PROMPTS)
        round_operands(runner.model, projections)
        return plain, prompt_logits(runner, PROMPTS)


CASES = [("Qwen3Moe", MOE, torch.float32), ("DeepseekV3", DEEPSEEK, torch.float8_e8m0fnu)]


@pytest.mark.parametrize(("family", "sizes", "scales"), CASES, ids=["Qwen3-MoE", "DeepSeek-V3, ue8m0"])
def test_logits_are_those_of_rounded_operands(
    family: str, sizes: dict[str, Any], scales: torch.dtype, tmp_path: Path
) -> None:
    kind = blockwise(128, 128, scales=scales)
    path, meant = write_fp8(make_checkpoint(tmp_path / "plain", family, **sizes), tmp_path, kind)
    with ModelRunner(path, num_kv_blocks=16, device=DEVICE, experts_backend="triton") as runner:
        held = experts_of(runner.model)
        assert {(each.w13.dtype, each.w2.dtype, each.dtype) for each in held} == {(FP8, FP8, torch.float32)}
        found = prompt_logits(runner, PROMPTS)
        stored = load_file(path / "model.safetensors")
        name = "model.layers.1.mlp.experts.3.{}_proj.weight{}"
        w13 = [stored[name.format(half, "")] for half in ("gate", "up")]
        assert torch.equal(held[-1].w13[3].cpu().view(torch.uint8), torch.cat(w13).view(torch.uint8))
        w13_scale = [stored[name.format(half, "_scale_inv")].float() for half in ("gate", "up")]
        assert torch.equal(held[-1].w13_scale[3].cpu(), torch.cat(w13_scale))
        assert torch.equal(held[-1].w2_scale[3].cpu(), stored[name.format("down", "_scale_inv")].float())
        projections = kept_projections(runner.model)
    plain, expected = plain_and_rounded(meant, projections)
    assert expected.abs().max() > 0.5
    assert (found - expected).abs().max() < 1e-2
    assert (plain - expected).abs().max() > 2e-2, "or the activations were not rounded"


def dtypes(path: Path, **options: Any) -> set[torch.dtype]:
    with ModelRunner(path, num_kv_blocks=4, device=DEVICE, experts_backend="triton", **options) as runner:
        return {each.w13.dtype for each in experts_of(runner.model)}


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            compressed("channel", block=(1, 0)),
            {},
            "quantised weights are dequantised to torch.float32: the checkpoint's scales are for no blocks, those of "
            "experts back end 'triton' for blocks of (128, 128)",
        ),
        (
            blockwise(64, 128),
            {},
            "quantised weights are dequantised to torch.float32: the checkpoint's scales are for blocks of (64, 128), "
            "those of experts back end 'triton' for blocks of (128, 128)",
        ),
        (
            BLOCKS,
            {"moe_intermediate_size": 96},
            "projections stored in fp8 stay so; routed experts become torch.float32: blocks of (128, 128) do not "
            "divide the experts' sizes (128, 96)",
        ),
    ],
)
def test_other_experts_are_dequantised_and_it_is_said(
    kind: Kind, changes: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = write_fp8(make_checkpoint(tmp_path / "plain", "Qwen3Moe", **{**MOE, **changes}), tmp_path, kind)
    with caplog.at_level(logging.INFO, "model_runner"):
        assert dtypes(path) == {torch.float32}
    assert said in caplog.messages


def test_a_layer_with_an_expert_that_is_not_in_fp8_is_dequantised(tmp_path: Path) -> None:
    kind = blockwise(128, 128, plain=["layers.0.mlp.experts.2.up_proj"])
    path, _ = write_fp8(make_checkpoint(tmp_path / "plain", "Qwen3Moe", **MOE), tmp_path, kind)
    assert dtypes(path) == {FP8, torch.float32}


def test_random_weights_and_drafts_are_in_fp8_too(tmp_path: Path) -> None:
    """Of a model whose weights are not here, with one layer listed as not quantised."""
    path = make_checkpoint(tmp_path / "plain", "DeepseekV3", **DEEPSEEK)
    kind = blockwise(128, 128, plain=["model.layers.1"])
    with_config(path, quantization_config=kind.config, num_hidden_layers=3, num_nextn_predict_layers=1)
    (path / "model.safetensors").unlink()
    with ModelRunner(path, num_kv_blocks=16, device=DEVICE, experts_backend="triton", load_format="dummy") as runner:
        assert [each.w13.dtype for each in experts_of(runner.model)] == [torch.float32, FP8]
        assert prompt_logits(runner, PROMPTS).isfinite().all()
        draft: Any = load_draft("mtp", None, runner)
        assert [each.w13.dtype for each in experts_of(draft)] == [FP8]
        w13 = experts_of(draft)[0].w13.float() * experts_of(draft)[0].w13_scale[0, 0, 0]
        assert w13.std() == pytest.approx(128**-0.5, rel=0.05)


def test_gpus_without_products_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    for capability, block in (((8, 0), None), ((8, 9), (128, 128)), ((9, 0), (128, 128))):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, known=capability: known)
        assert fp8_block("triton", gpu) == fp8_block("triton_batched", gpu) == block
        assert fp8_linear_block(gpu) == block
    assert fp8_block("grouped", torch.device("cpu")) is None


@pytest.mark.gpu
def test_auto_keeps_them_in_fp8_on_a_gpu(tmp_path: Path) -> None:
    size = RandomQwen3Moe(128, 256, 2, num_experts=8, moe_intermediate_size=128)
    path, meant = write_fp8(
        make_random_qwen3_moe(tmp_path / "plain", size=size, layers_per_shard=None), tmp_path, BLOCKS
    )
    with ModelRunner(path, num_kv_blocks=16, device="cuda", dtype=torch.bfloat16) as runner:
        in_fp8 = torch.cuda.get_device_capability() >= (8, 9)
        assert {each.w13.dtype for each in experts_of(runner.model)} == {FP8 if in_fp8 else torch.bfloat16}
        found, projections = prompt_logits(runner, PROMPTS), kept_projections(runner.model)
    _, expected = plain_and_rounded(meant, projections)
    assert (found - expected).norm() < 9e-2 * expected.norm()
