"""Experts in MXFP4, as gpt-oss stores them: against transformers' own dequantisation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, with_config
from fp8_checkpoints import one_weight
from model_checks import close, expected_logits, prefill_logits
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from model_runner import Checkpoint, CheckpointError, WrongShape
from model_runner.weights.scaled import MXFP4Blocks
from model_runner.weights.weights import Part

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def stored(experts: int = 3, rows: int = 10, groups: int = 5) -> dict[str, Tensor]:
    blocks = torch.randint(256, (experts, rows, groups, 16), dtype=torch.uint8)
    return {"w_blocks": blocks, "w_scales": torch.randint(0, 240, (experts, rows, groups), dtype=torch.uint8)}


def folder(path: Path, tensors: dict[str, Tensor], architecture: str = "GptOssForCausalLM") -> Path:
    return one_weight(path, tensors, CONFIG, architectures=[architecture])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_whole_and_in_parts(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = stored()
    tensors["w_bias"] = torch.randn(3, 10)
    expected = convert_moe_packed_tensors(tensors["w_blocks"], tensors["w_scales"], dtype=dtype)
    checkpoint = Checkpoint(folder(tmp_path, tensors), dtype=dtype)
    assert torch.equal(checkpoint.load("w", 3, 160, 10), expected)
    monkeypatch.setattr("model_runner.weights.scaled._ROOM", 500)  # some rows at a time
    assert torch.equal(checkpoint.load("w", 3, 160, 10), expected)
    for experts, columns, rows in [((1, 2), (40, 80), (0, 10)), ((2, 1), (31, 2), (3, 7)), ((0, 3), (159, 1), (9, 1))]:
        parts = [Part(*part, total) for part, total in ((experts, 3), (columns, 160), (rows, 10))]
        assert torch.equal(checkpoint.load("w", *parts), expected[tuple(part.slice for part in parts)])
    part = MXFP4Blocks.whole(tensors["w_blocks"], tensors["w_scales"])[1:3, 5:150][1, 40:47]
    part.read(out := torch.empty(7, 10, dtype=dtype))
    assert torch.equal(out, expected[2, 45:52]), "a part of a part, with a number for a dimension, as a pass cuts them"
    assert torch.equal(checkpoint.load("w_bias", 3, 10), tensors["w_bias"].to(dtype))
    assert checkpoint.stored_dtypes() == ("float32",)


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "GptOss", hidden_size=64, intermediate_size=96)
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights[name].shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 124, blocks.shape[:-1], dtype=torch.uint8)
        weights[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    packed = {name.removesuffix("_blocks") for name in weights if name.endswith("_blocks")}
    halves = [name for name in weights if name.endswith(("_blocks", "_scales"))]
    save_file({name: w for name, w in weights.items() if name not in halves}, path / "model.safetensors")
    expected = expected_logits(path)
    save_file({name: w for name, w in weights.items() if name not in packed}, path / "model.safetensors")
    with_config(path, quantization_config=CONFIG)
    close(prefill_logits(path), expected)


def test_what_does_not_fit(tmp_path: Path) -> None:
    tensors = stored()
    with pytest.raises(CheckpointError, match=r"'mxfp4' .MXFP4, which only gpt-oss may have"):
        Checkpoint(folder(tmp_path, tensors, "Qwen3ForCausalLM")).load("w", 3, 160, 10)
    with pytest.raises(WrongShape, match=r"'w' has shape \[3, 160, 10\].* asks for \[3, 10, 160\]"):
        Checkpoint(folder(tmp_path, tensors)).load("w", 3, 10, 160)
    with pytest.raises(WrongShape, match=r"'w_scales' has shape \[3, 10, 4\].* asks for \[3, 10, 5\]"):
        Checkpoint(folder(tmp_path, {**tensors, "w_scales": stored(groups=4)["w_scales"]})).load("w", 3, 160, 10)
    with pytest.raises(CheckpointError, match=r"'w_blocks' is torch.float32 .*MXFP4 is \[experts, rows, groups, 16\]"):
        Checkpoint(folder(tmp_path, {**tensors, "w_blocks": tensors["w_blocks"].float()})).load("w", 3, 160, 10)
