"""How a checkpoint's weights are quantised: `quantization_config` in its `config.json`, read and checked.

    fp8                  DeepSeek-V3, Kimi-K2, Qwen3's -FP8: a scale per block, `w.weight_scale_inv`; without a block
                         size one per tensor, of either name
    compressed-tensors   format float-quantized: a scale per tensor, per channel (row) or per block, `w.weight_scale`
    mxfp4                gpt-oss's experts: `w_blocks` and `w_scales`, see below

The file says which tensors are quantised, by their dtype: published lists of modules that are not are incomplete, and
match in several ways. The list counts where nothing is stored (`load_format dummy`). Scales of activations are not
read: activations are not rounded, or by scales of their own (`moe.experts.quantization`).

Weights stored as fp8 with scales, and their values: `fp8 * scale`, one scale per block.

    stored    a b c d|e f g      rows and columns of float8_e4m3fn; a part of them may begin and end inside a block
              h i j k|l m n
              -------+-----
              o p q r|s t u      the last blocks may be smaller than the others
    scales    x x x x|y y y

A scale per tensor is one for all rows, and one per channel (row) is a block of one row. Values are multiplied in
float32 and rounded once, to the dtype of the destination.

Weights in MXFP4, as gpt-oss stores its experts (`MXFP4Blocks`): `fp4 * 2**(scale - 127)`, a scale for 32 of a row.

    blocks  [experts, rows, groups, 16] bytes, of two numbers each: the first in the lower half
    scales  [experts, rows, groups] bytes

The tensor that a model asks for has rows and columns the other way round, `[experts, 32 * groups, rows]`.

Source of MXFP4: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from model_runner.errors import CheckpointError
from model_runner.weights.files import HFConfig
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


FP8 = torch.float8_e4m3fn

_ROOM = 1 << 18
"""Numbers that are multiplied at once; more if a row of blocks has more."""
_HALVES, _NAN = 256.0, 0x7F
"""Ratio of the numbers with the same exponent bits in fp8 and in float16 (biases 7 and 15), and the only NaN in fp8."""


@dataclass(frozen=True, eq=False)
class ScaledBlocks:
    """A matrix in fp8, or a part of one, in the mapped file: nothing is read until `read`.

    Attributes:
        stored: `[rows, columns]` float8_e4m3fn.
        scales: scale of every block that holds a part of `stored`, `[row blocks, column blocks]`, any floating dtype.
        block: rows and columns of a block.
        first: the place of `stored`'s first number in its block.
    """

    stored: Tensor
    scales: Tensor
    block: tuple[int, int]
    first: tuple[int, int] = (0, 0)

    def data_ptr(self) -> int:
        """Address of the first number, by which a pass sorts."""
        return self.stored.data_ptr()

    def __getitem__(self, index: tuple[int | slice, ...]) -> ScaledBlocks:
        """A part, still a matrix: an integer is one row or column."""
        rows, columns = (*index, slice(None), slice(None))[:2]
        row, row_blocks, first_row = _cut(rows, self.stored.shape[0], self.block[0], self.first[0])
        column, column_blocks, first_column = _cut(columns, self.stored.shape[1], self.block[1], self.first[1])
        scales = self.scales[row_blocks, column_blocks]
        return ScaledBlocks(self.stored[row, column], scales, self.block, (first_row, first_column))

    def read(self, out: Tensor) -> None:
        """Write the values to `out`, of `stored`'s shape (or a row or column of it), rounded to its dtype.

        Takes room for `_ROOM` numbers, or for one row of blocks, besides: 10 bytes for each.
        """
        out = out.view(self.stored.shape) if out.dim() < 2 else out
        (rows, columns), (block_rows, block_columns) = self.stored.shape, self.block
        (first_row, first_column), (num_row_blocks, num_column_blocks) = self.first, self.scales.shape
        width = num_column_blocks * block_columns
        at_once = max(1, _ROOM // (block_rows * width))
        room = torch.empty(min(at_once, num_row_blocks) * block_rows, width, device="cpu")
        for block in range(0, num_row_blocks, at_once):
            scales = self.scales[block : block + at_once].float() * _HALVES
            start, stop = block * block_rows - first_row, (block + scales.shape[0]) * block_rows - first_row
            begin, end = max(start, 0), min(stop, rows)
            numbers = room[: stop - start]
            place = numbers[begin - start : end - start, first_column : first_column + columns]
            place.copy_(_as_halves(self.stored[begin:end]))
            numbers.view(-1, block_rows, num_column_blocks, block_columns).mul_(scales[:, None, :, None])
            out[begin:end].copy_(place)


def _cut(index: int | slice, size: int, block: int, first: int) -> tuple[slice, slice, int]:
    """The numbers of an index, their blocks, and the place of the first number in its block."""
    start, stop, _ = (slice(index, index + 1) if isinstance(index, int) else index).indices(size)
    stop = max(start, stop)
    return slice(start, stop), slice((first + start) // block, -(-(first + stop) // block)), (first + start) % block


def _as_halves(stored: Tensor) -> Tensor:
    """fp8 as float16, divided by `_HALVES`: exponent and mantissa move to their places there.

    On a CPU that is ten times as fast as torch's conversion.
    """
    bits = stored.view(torch.int8).to(torch.int16)
    sign, rest = bits & -0x8000, bits & 0x7F
    if rest.numel() and rest.amax() == _NAN:
        return (stored.float() / _HALVES).half()
    return rest.bitwise_left_shift_(7).bitwise_or_(sign).view(torch.float16)


_GROUP = 32
"""Numbers that are computed at once; more if a row has more."""
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, eq=False)
class MXFP4Blocks:
    """A tensor in MXFP4, or a part of one, in the mapped file: nothing is read until `read`.

    Attributes:
        blocks: see above; the groups that hold a part of the columns.
        scales: see above.
        columns: the first column, and the one behind the last, counted from the first group's.
    """

    blocks: Tensor
    scales: Tensor
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[experts, columns, rows]`, as a model asks for it."""
        return self.blocks.shape[0], self.columns[1] - self.columns[0], self.blocks.shape[1]

    @classmethod
    def whole(cls, blocks: Tensor, scales: Tensor) -> MXFP4Blocks:
        """A whole tensor."""
        return cls(blocks, scales, (0, blocks.shape[2] * _GROUP))

    def data_ptr(self) -> int:
        """Address of the first byte, by which a pass sorts."""
        return self.blocks.data_ptr()

    def __getitem__(self, index: tuple[int | slice, ...]) -> MXFP4Blocks:
        """A part, of three dimensions still: an integer is one expert, column or row."""
        given = (*index, *[slice(None)] * 3)[:3]
        of = [slice(each, each + 1) if isinstance(each, int) else each for each in given]
        expert, column, row = (each.indices(size)[:2] for each, size in zip(of, self.shape, strict=True))
        start, stop = (self.columns[0] + each for each in column)
        first = start // _GROUP
        where = slice(*expert), slice(*row), slice(first, -(-stop // _GROUP))
        return MXFP4Blocks(self.blocks[where], self.scales[where], (start - first * _GROUP, stop - first * _GROUP))

    def read(self, out: Tensor) -> None:
        """Write the values to `out`, of this shape without the dimensions that were integers, rounded to its dtype."""
        out = out.view(self.shape)
        experts, rows, groups, _ = self.blocks.shape
        at_once = max(1, _ROOM // max(1, groups * _GROUP))
        for expert in range(experts):
            for row in range(0, rows, at_once):
                here = expert, slice(row, row + at_once)
                pairs = _pairs().index_select(0, self.blocks[here].flatten().int()).view(-1, groups, _GROUP)
                pairs.mul_(self.scales[here].view(torch.float8_e8m0fnu).float().unsqueeze(-1))
                out[expert, :, row : row + at_once] = pairs.flatten(1)[:, slice(*self.columns)].t()


@cache
def _pairs() -> Tensor:
    """The two numbers of every byte, `[256, 2]`."""
    numbers = torch.tensor([*_POSITIVE, *(-each for each in _POSITIVE)], device="cpu")
    return torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], 1)
