"""Small checkpoints with a layer for multi-token prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint, with_config
from safetensors.torch import load_file, save_file

__all__ = ["APART", "LAYERS", "make_mtp_checkpoint"]

LAYERS = 3
APART = {
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "eh_proj": "mtp.fc.weight",
    "shared_head.norm": "mtp.norm.weight",
}
"""Qwen3-Next's names of the tensors around the layer. Its norms multiply by 1 + weight."""


def make_mtp_checkpoint(
    path: Path, family: str = "DeepseekV3", first: str = "linear_attention", **overrides: Any
) -> Path:
    """A checkpoint of three layers; the fourth is for multi-token prediction, as in published ones.

    Every other layer of a hybrid is of the kind `first`. `overrides`: fields of the config.
    """
    hybrid = family == "Qwen3Next"
    kinds = {"layer_types": [first, "full_attention"] * 2} if hybrid else {}
    make_checkpoint(path, family, num_hidden_layers=LAYERS + 1, **kinds, **overrides)
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    place, hidden = f"model.layers.{LAYERS}", weights["model.norm.weight"].shape[0]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{place}.{name}.weight"] = torch.rand(hidden, generator=generator) + 0.5
    weights[f"{place}.eh_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
    if hybrid:
        weights = {name.replace(place, "mtp.layers.0"): weight for name, weight in weights.items()}
        for name, own in APART.items():
            weights[own] = weights.pop(f"mtp.layers.0.{name}.weight") - int(own != "mtp.fc.weight")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    own = {"layer_types": kinds["layer_types"][:LAYERS]} if hybrid else {"num_nextn_predict_layers": 1}
    return with_config(path, num_hidden_layers=LAYERS, **own)
