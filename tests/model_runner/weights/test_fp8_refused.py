"""Quantised weights that cannot be loaded: refused by name, from the config or when the tensor is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import FP8, blockwise, compressed, one_weight, quantize
from torch import Tensor

from model_runner import Checkpoint, CheckpointError, TensorMissing, WrongShape
from model_runner.weights.hf_config import HFConfig
from model_runner.weights.quantization import read_quantization


def drop(ending: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda stored: [stored.pop(name) for name in list(stored) if name.endswith(ending)]


def cut_scales(stored: dict[str, Tensor]) -> None:
    stored["w_scale_inv"] = stored["w_scale_inv"][:-1].contiguous()


def put(**tensors: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda stored: stored.update(tensors)


FP8_CONFIG = blockwise(16, 28).config


@pytest.mark.parametrize(
    ("change", "config", "error", "message"),
    [
        (
            drop("_scale_inv"),
            FP8_CONFIG,
            TensorMissing,
            "'w' is stored in fp8, but its scales 'w_scale_inv' are missing",
        ),
        (cut_scales, FP8_CONFIG, WrongShape, r"'w_scale_inv' has shape \[5, 4\].* asks for \[6, 4\]"),
        (id, blockwise(16, 16).config, WrongShape, r"'w_scale_inv' has shape \[6, 4\].* asks for \[6, 6\]"),
        (id, None, CheckpointError, "float8_e4m3fn .* with scales 'w_scale_inv', but config.json names no"),
        (drop("_scale_inv"), None, CheckpointError, "'w' is stored as float8_e4m3fn .*, but config.json names no"),
        (put(w=torch.ones(82, 90)), FP8_CONFIG, CheckpointError, "'w' is stored as float32 .* with scales"),
        (put(w=torch.ones(82, 90, dtype=torch.int8)), FP8_CONFIG, CheckpointError, "'w' is stored as int8"),
        (put(w=torch.ones(82, 90).to(torch.float8_e5m2)), FP8_CONFIG, CheckpointError, "stored as float8_e5m2"),
        (
            put(w_scale_inv=torch.ones(6, 4, dtype=torch.int8)),
            FP8_CONFIG,
            CheckpointError,
            "scales 'w_scale_inv' are torch.int8",
        ),
        (
            put(w_scale_inv=torch.ones(6, 4, dtype=torch.uint8)),
            FP8_CONFIG,
            CheckpointError,
            "scales 'w_scale_inv' are torch.uint8",
        ),
        (id, compressed("channel", block=(1, 0)).config, TensorMissing, "its scales 'w_scale' are missing"),
        (id, {"quant_method": "awq"}, CheckpointError, r"quant_method 'awq' \(AWQ, integers of 4 bits\), which is not"),
    ],
)
def test_weights_that_cannot_be_dequantised(
    change: Callable[[dict[str, Tensor]], object],
    config: dict[str, Any] | None,
    error: type[Exception],
    message: str,
    tmp_path: Path,
) -> None:
    stored, scales = quantize(torch.randn(82, 90), blockwise(16, 28))
    tensors = {"w": stored, "w_scale_inv": scales}
    change(tensors)
    with pytest.raises(error, match=message):
        Checkpoint(one_weight(tmp_path, tensors, config)).load("w", 82, 90)


def test_experts_in_fp8_of_three_dimensions_are_refused(tmp_path: Path) -> None:
    stored = {"w": torch.ones(2, 16, 16).to(FP8), "w_scale_inv": torch.ones(2, 1, 1)}
    with pytest.raises(CheckpointError, match=r"'w' is stored as float8_e4m3fn \[2, 16, 16\].* or matrices in float8"):
        Checkpoint(one_weight(tmp_path, stored, FP8_CONFIG)).load("w", 2, 16, 16)


def group(**weights: Any) -> dict[str, Any]:
    config = compressed("tensor").config
    config["config_groups"]["group_0"]["weights"].update(weights)
    return config


def with_group(**changes: Any) -> dict[str, Any]:
    config = compressed("tensor").config
    config["config_groups"]["group_0"].update(changes)
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"'gptq' \(GPTQ.*not supported\. Weights may be .*Choose a"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' .ModelOpt, such as NVFP4"),
        ({"quant_method": "mxfp4"}, "'mxfp4' .MXFP4"),
        ({"quant_method": "new"}, "quant_method 'new', which is not supported"),
        ({"bits": 4}, "quant_method None"),
        ("fp8", "quantization_config is 'fp8'.*an object with a quant_method"),
        ({**FP8_CONFIG, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**FP8_CONFIG, "scale_fmt": "e4m3"}, "scale_fmt 'e4m3'"),
        ({**FP8_CONFIG, "weight_block_size": [128]}, r"weight_block_size is \[128\].*two positive integers"),
        ({**FP8_CONFIG, "weight_block_size": [128, 0]}, "two positive integers"),
        ({**FP8_CONFIG, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head'"),
        ({**compressed("tensor").config, "ignore": ["re:("]}, r"ignore is 're:\('.*valid patterns"),
        (
            {**compressed("tensor").config, "format": "nvfp4-pack-quantized"},
            "the format 'nvfp4-pack-quantized' of group_0",
        ),
        ({**compressed("tensor").config, "config_groups": {}}, "config_groups {}"),
        ({**compressed("tensor").config, "transform_config": {"config_groups": {}}}, "transform_config"),
        ({**compressed("tensor").config, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        (group(num_bits=4), "weights of group_0 with num_bits 4 "),
        (group(type="int"), "weights of group_0 with type 'int'"),
        (group(symmetric=False), "symmetric False"),
        (group(strategy="group", group_size=128), "strategy 'group' of group_0"),
        (group(strategy="block", block_structure=None), "block_structure of group_0 is None"),
        (with_group(targets=["Embedding"]), r"targets \['Embedding'\]"),
        (with_group(weights=None), "config_groups.group_0 without weights"),
        (with_group(format="int-quantized"), "the format 'int-quantized'"),
    ],
)
def test_quantisations_that_are_refused(config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_quantization(HFConfig({"quantization_config": config}, Path("config.json")))


def test_what_is_listed_as_not_quantised() -> None:
    config = {**compressed("tensor").config, "ignore": ["lm_head", "model.layers.1", r"re:.*mlp\.gate$"]}
    known = read_quantization(HFConfig({"quantization_config": config}, Path("config.json")))
    assert known is not None
    ignored = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.gate.weight"]
    others = ["model.layers.11.mlp.up_proj.weight", "model.layers.2.mlp.gate_proj.weight", "my_lm_head.weight"]
    assert [name for name in (*ignored, *others) if known.ignores(name)] == ignored
