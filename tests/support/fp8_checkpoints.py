"""Checkpoints with fp8 weights, and what these mean: rounded and multiplied back here, by code of its own."""

import json
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from checkpoints import with_config
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from model_runner import Checkpoint, ExpertParallel, model_class
from model_runner.decoder.layers import Projection
from model_runner.parallel.tensor_parallel import Shard
from moe import ExpertPlacement, FusedMoEModularKernel
from moe.experts.torch_experts import ReferenceExperts

FP8 = torch.float8_e4m3fn
PROMPTS = [[5, 17, 99, 3, 42], [1]]
"""Few: rounding sends a token in a hundred to another expert."""
PLAIN = re.compile(r"norm|embed_tokens|lm_head|mlp\.gate\.|bias$")
"""Names of tensors that are never quantised."""


@dataclass(frozen=True)
class Kind:
    """How weights are quantised.

    Attributes:
        config: `quantization_config`.
        block: rows and columns that share a scale; 0 means all.
        suffix: of the scales' names.
        scales: dtype they are stored in; ue8m0 rounds them up to a power of 2.
        shape: dimensions of the scales that are stored.
        plain: names of layers whose weights stay as they are.
    """

    config: dict[str, Any]
    block: tuple[int, int]
    suffix: str = "_scale_inv"
    scales: torch.dtype = torch.float32
    dims: int = 2
    plain: Collection[str] = ()


def blockwise(*block: int, scales: torch.dtype = torch.float32, plain: Collection[str] = (), **more: Any) -> Kind:
    """As DeepSeek-V3 and Qwen3's -FP8 are published."""
    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head", *plain],
        **more,
    }
    return Kind(config, (block[0], block[1]), scales=scales, plain=plain)


def compressed(strategy: str, *, block: tuple[int, int] = (0, 0), dims: int = 2, plain: Collection[str] = ()) -> Kind:
    """As llm-compressor writes them."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = list(block)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$", *plain],
    }
    return Kind(config, block, "_scale", dims=dims, plain=plain)


def quantize(w: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """fp8 and scales of a matrix, block after block."""
    rows, columns = kind.block[0] or w.shape[0], kind.block[1] or w.shape[1]
    out = torch.empty(w.shape, dtype=FP8)
    scales = torch.empty(-(-w.shape[0] // rows), -(-w.shape[1] // columns))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale = w[here].abs().max() / 448
            scale = 2 ** scale.log2().ceil() if kind.scales.itemsize == 1 else scale.to(kind.scales).float()
            out[here] = (w[here] / scale).clamp(-448, 448).to(FP8)
            scales[i, j] = scale
    return out, scales


def dequantize(stored: Tensor, scales: Tensor, kind: Kind) -> Tensor:
    """The matrix that these mean, in float32, number by number."""
    rows, columns = kind.block[0] or stored.shape[0], kind.block[1] or stored.shape[1]
    which = (torch.arange(stored.shape[0]) // rows)[:, None], (torch.arange(stored.shape[1]) // columns)[None]
    return stored.float() * scales[which]


def rounded(x: Tensor) -> Tensor:
    """Activations as fp8's products round them: 128 numbers of a row share a scale."""
    blocks = x.reshape(-1, 128)
    scales = blocks.abs().amax(1, keepdim=True).clamp(min=1e-4) * (1 / 448)
    return ((blocks / scales).to(FP8).float() * scales).view(x.shape)


def kept_projections(model: nn.Module) -> list[str]:
    """Names of the projections that are in fp8."""
    return [
        name for name, module in model.named_modules() if isinstance(module, Projection) and module.scales is not None
    ]


class Rounding(ReferenceExperts):
    """The formula with every operand rounded."""

    def _expert(self, slot: int, x: Tensor) -> Tensor:
        gate, up = (self.w13[slot] @ rounded(x)).chunk(2)
        return self.w2[slot] @ rounded(nn.functional.silu(gate) * up)


def round_operands(model: nn.Module, projections: Collection[str]) -> None:
    """Make the routed experts of a plain model, and these projections, round what they multiply."""
    for name in projections:
        model.get_submodule(name).register_forward_pre_hook(lambda _, args: (rounded(args[0]),))
    for kernel in model.modules():
        if isinstance(kernel, FusedMoEModularKernel):
            kernel.experts = Rounding(kernel.experts.w13, kernel.experts.w2)


def write_fp8(path: Path, to: Path, kind: Kind) -> tuple[Path, Path]:
    """The checkpoint at `path` in fp8, and one with the float32 weights that it means."""
    fp8, meant = (Path(shutil.copytree(path, to / name)) for name in ("fp8", "meant"))
    for file in path.glob("*.safetensors"):
        stored, values = dict[str, Tensor](), dict[str, Tensor]()
        for name, w in load_file(file).items():
            plain = PLAIN.search(name) or any(part in name for part in kind.plain)
            if w.dim() != 2 or plain:
                stored[name] = values[name] = w
                continue
            stored[name], scales = quantize(w.float(), kind)
            values[name] = dequantize(stored[name], scales, kind)
            scales = scales.reshape(scales.shape[: kind.dims] if kind.dims else ())
            stored[name + kind.suffix] = scales.to(kind.scales) if kind.scales != torch.uint8 else exponents(scales)
        save_file(stored, fp8 / file.name)
        save_file({name: w.float().contiguous() for name, w in values.items()}, meant / file.name)
    index = fp8 / "model.safetensors.index.json"
    if index.exists():
        weight_map = {}
        for file in sorted(fp8.glob("*.safetensors")):
            weight_map |= dict.fromkeys(load_file(file), file.name)
        index.write_text(json.dumps({"weight_map": weight_map}))
    with_config(fp8, quantization_config=kind.config)
    with_config(meant, dtype="float32")
    return fp8, meant


def exponents(scales: Tensor) -> Tensor:
    """ue8m0 as bytes."""
    return scales.to(torch.float8_e8m0fnu).view(torch.uint8)


class HeldExperts(nn.Module):
    """A layer that only holds its experts."""

    def __init__(self, all2all: Any, experts: nn.Module, shared: nn.Module | None, **others: Any) -> None:
        super().__init__()
        self.experts, self.shared = experts, shared


def load_share(checkpoint: Checkpoint, shard: Shard, experts: range, placement: ExpertPlacement | None = None) -> Any:
    """A rank's model, of which nothing is run; its slots are `experts`."""
    kind = model_class(checkpoint.architecture)
    config = kind.read_config(checkpoint.config, checkpoint.generation_config())
    traits = SimpleNamespace(other_ranks=True)
    all2all: Any = SimpleNamespace(experts=experts, num_experts=config.num_experts, traits=traits)
    tensor: Any = SimpleNamespace(shard=shard)
    parallel = ExpertParallel(all2all, "grouped", tensor, placement=placement)
    with mock.patch("model_runner.decoder.sparse_mlp.FusedMoEModularKernel", HeldExperts):
        return kind.load(config, checkpoint, parallel)


def one_weight(path: Path, stored: dict[str, Tensor], config: dict[str, Any] | None = None, **values: Any) -> Path:
    """A folder with these tensors, of no real model."""
    path.mkdir(exist_ok=True)
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text('{"architectures": ["Some"]}')
    return with_config(path, **({} if config is None else {"quantization_config": config}), **values)
