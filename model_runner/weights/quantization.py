"""How a checkpoint's weights are quantised: `quantization_config` in its `config.json`, read and checked.

    fp8                  DeepSeek-V3, Kimi-K2, Qwen3's -FP8: a scale per block, `w.weight_scale_inv`; without a block
                         size one per tensor, of either name
    compressed-tensors   format float-quantized: a scale per tensor, per channel (row) or per block, `w.weight_scale`
    mxfp4                gpt-oss's experts: `w_blocks` and `w_scales`, see `model_runner.weights.scaled`

The file says which tensors are quantised, by their dtype: published lists of modules that are not are incomplete, and
match in several ways. The list counts where nothing is stored (`load_format dummy`). Scales of activations are not
read: activations are not rounded, or by scales of their own (`moe.experts.quantization`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model_runner.errors import CheckpointError
from model_runner.weights.hf_config import HFConfig
from ubatch.errors import shown

_ADVICE = (
    "Weights may be bfloat16, float16, float32, or fp8 by quant_method 'fp8' or compressed-tensors 'float-quantized'. "
    "Choose a checkpoint of the model in one of these, or dequantise this one to bfloat16."
)
MXFP4 = "mxfp4"
_LONGEST_NAME = 100
"""Characters of a group's name that messages show."""
_KNOWN_METHODS = {
    "auto-round": "integers of 2 to 8 bits",
    "awq": "AWQ, integers of 4 bits",
    "bitsandbytes": "integers of 8 bits, or NF4",
    "fbgemm_fp8": "fp8 of FBGEMM",
    "gptq": "GPTQ, integers of 2 to 8 bits",
    "modelopt": "ModelOpt, such as NVFP4",
    "modelopt_fp4": "NVFP4",
    "mxfp4": "MXFP4, which only gpt-oss may have",
    "nvfp4": "NVFP4",
    "quark": "Quark",
    "torchao": "torchao",
}
"""Methods that are refused, and what they are."""


@dataclass(frozen=True)
class WeightQuantization:
    """How weights are stored in fp8, or in MXFP4 (then only `method` and `ignored` say something).

    Attributes:
        method: `quant_method`.
        suffixes: of a scale's name; it begins with the name of its weight.
        block: rows and columns that share a scale; None if there are no such blocks.
        per_tensor: a tensor may have a single scale.
        per_channel: a tensor may have one scale per row.
        ue8m0: scales stored as bytes are exponents.
        ignored: modules that are not quantised: names, ends of names, or patterns that begin with `re:`.
    """

    method: str
    suffixes: tuple[str, ...]
    block: tuple[int, int] | None
    per_tensor: bool = False
    per_channel: bool = False
    ue8m0: bool = False
    ignored: tuple[str, ...] = ()

    def scale_shapes(self, shape: tuple[int, int]) -> Mapping[tuple[int, ...], tuple[int, int]]:
        """Every shape that the scales of a weight `shape` may have, with the block that then shares one."""
        rows, columns = shape
        shapes: dict[tuple[int, ...], tuple[int, int]] = {}
        if self.per_tensor:  # one scale is read as one for every row: a pass reads a few rows at a time
            shapes |= dict.fromkeys([(), (1,), (1, 1)], (1, columns))
        if self.per_channel:
            shapes |= dict.fromkeys([(rows,), (rows, 1)], (1, columns))
        if self.block is not None:
            shapes[-(-rows // self.block[0]), -(-columns // self.block[1])] = self.block
        return shapes

    def ignores(self, weight: str) -> bool:
        """Whether the module with this weight is listed as not quantised, itself or a module around it."""
        module = weight.removesuffix(".weight")
        return any(
            re.match(entry[3:], module) is not None
            if entry.startswith("re:")
            else f".{module}".endswith(f".{entry}") or f"{module}.".startswith(f"{entry}.")
            for entry in self.ignored
        )


def read_quantization(config: HFConfig) -> WeightQuantization | None:
    """How the weights are quantised; None if they are not. Scales of the KV cache alone quantise no weights.

    Raises:
        CheckpointError: they are quantised in a way that is not supported; the message names it.
    """
    values = config.values.get("quantization_config")
    if values is None:
        return None
    if not isinstance(values, dict):
        raise config.wrong("quantization_config", values, "an object with a quant_method")
    method = values.get("quant_method")
    if method == "fp8":
        return _read_fp8(config, values)
    if method == "compressed-tensors":
        return _read_compressed(config, values)
    if method == MXFP4 and config.values.get("architectures") == ["GptOssForCausalLM"]:
        return WeightQuantization(MXFP4, (), None, ignored=_names(config, values, "modules_to_not_convert"))
    what = _KNOWN_METHODS.get(str(method))
    raise _unsupported(config, f"quant_method {shown(method)}" + (f" ({what})" if what else ""))


def _read_fp8(config: HFConfig, values: Mapping[str, Any]) -> WeightQuantization:
    if values.get("fmt") not in (None, "e4m3"):
        raise _unsupported(config, f"fmt {shown(values['fmt'])} (only 'e4m3')")
    scale_fmt = values.get("scale_fmt")
    if scale_fmt not in (None, "float", "ue8m0"):
        raise _unsupported(config, f"scale_fmt {shown(scale_fmt)} (only 'float' and 'ue8m0')")
    ignored = _names(config, values, "modules_to_not_convert") + _names(config, values, "ignored_layers")
    suffixes, size = ("_scale_inv", "_scale"), values.get("weight_block_size")
    block = None if size is None else _block(config, "weight_block_size", size)
    kinds = {"per_tensor": block is None, "ue8m0": scale_fmt == "ue8m0"}
    return WeightQuantization("fp8", suffixes, block, ignored=ignored, **kinds)


def _read_compressed(config: HFConfig, values: Mapping[str, Any]) -> WeightQuantization | None:
    groups = values.get("config_groups")
    if not groups and values.get("kv_cache_scheme"):
        return None
    if not isinstance(groups, dict) or not groups:
        raise _unsupported(config, f"config_groups {shown(groups)}")
    sparsity = values.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format") != "dense"):
        raise _unsupported(config, f"sparsity_config {shown(sparsity)}")
    if values.get("transform_config"):
        raise _unsupported(config, "transform_config (rotated weights)")
    common_format = values.get("format")
    found = [_read_group(config, key[:_LONGEST_NAME], group, common_format) for key, group in groups.items()]
    strategies, blocks = {strategy for strategy, _ in found}, {block for _, block in found if block is not None}
    if len(blocks) > 1:
        raise _unsupported(config, f"several block sizes, {sorted(blocks)}")
    kinds = {"per_tensor": "tensor" in strategies, "per_channel": "channel" in strategies}
    ignored, block = _names(config, values, "ignore"), next(iter(blocks), None)
    return WeightQuantization("compressed-tensors", ("_scale",), block, ignored=ignored, **kinds)


def _read_group(config: HFConfig, name: str, group: Any, common_format: Any) -> tuple[str, tuple[int, int] | None]:
    """The strategy of a group of layers, and its block, if it has one."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise _unsupported(config, f"config_groups.{name} without weights")
    given = group.get("format") or common_format
    if given != "float-quantized":
        raise _unsupported(config, f"the format {shown(given)} of {name} (only 'float-quantized')")
    strategy = weights.get("strategy")
    kind = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}
    found = {key: weights.get(key, value) for key, value in kind.items()}
    wrong = ", ".join(f"{key} {shown(value)}" for key, value in found.items() if value != kind[key])
    if wrong:
        raise _unsupported(config, f"weights of {name} with {wrong} (only fp8: {kind})")
    if strategy not in ("tensor", "channel", "block"):
        raise _unsupported(config, f"strategy {shown(strategy)} of {name} (only 'tensor', 'channel' and 'block')")
    given = weights.get("block_structure")
    block = _block(config, f"block_structure of {name}", given) if strategy == "block" else None
    targets = group.get("targets")
    if targets != ["Linear"]:
        raise _unsupported(config, f"targets {shown(targets)} of {name} (only ['Linear'])")
    return strategy, block


def _block(config: HFConfig, name: str, value: Any) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        raise config.wrong(f"quantization_config: {name}", value, "two positive integers, such as [128, 128]")
    return value[0], value[1]


def _names(config: HFConfig, values: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = values.get(name) or []
    if not isinstance(found, list) or any(not isinstance(entry, str) for entry in found):
        raise config.wrong(f"quantization_config: {name}", found, "a list of names of modules")
    for entry in found:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise config.wrong(f"quantization_config: {name}", entry, f"valid patterns ({error})") from error
    return tuple(found)


def _unsupported(config: HFConfig, what: str) -> CheckpointError:
    return CheckpointError(f"{config.path}: quantization_config has {what}, which is not supported. {_ADVICE}")
