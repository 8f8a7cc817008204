"""Small checkpoints of every model family, written by transformers itself, and its answers.

Some have a layer for multi-token prediction.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_runner import known_architectures, model_class
from model_runner.weights.files import HFConfig

if TYPE_CHECKING:  # else imported where it is used: ranks that only run checkpoints start seconds earlier
    from transformers import PreTrainedModel

_CONFIGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
COMMON, GROUPED, TINY, LATENT_ROPE = (_CONFIGS[name] for name in ("common", "grouped", "tiny", "latent_rope"))
_OWN: Mapping[str, Mapping[str, Any]] = _CONFIGS["own"]
"""What else belongs into a family's config, so that all that it has is computed."""
_EXTRA = frozenset({"head_dim"})
"""Entries that configs may have without a field for them."""
ZERO_CENTRED = ("Qwen3Next", "Qwen3_5Moe")
"""Families whose norms multiply by 1 + weight, except those of linear attention."""


def config_class(family: str) -> Any:
    """The class of a family's config in transformers."""
    import transformers

    return getattr(transformers, f"{family}ForCausalLM").config_class


def known_fields(family: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the entries that the family's config has."""
    known = _EXTRA | {field.name for field in dataclasses.fields(config_class(family))}
    return {name: value for name, value in entries.items() if name in known}


class _Families(Mapping[str, Mapping[str, Any]]):
    """Every registered family (`{family}ForCausalLM`) and the fields of a small config of it, which its class gives."""

    def __getitem__(self, family: str) -> Mapping[str, Any]:
        return known_fields(family, TINY) | dict(_OWN.get(family, {}))

    def __iter__(self) -> Iterator[str]:
        suffix = "ForCausalLM"
        return (name.removesuffix(suffix) for name in known_architectures() if name.endswith(suffix))

    def __len__(self) -> int:
        return len(list(iter(self)))


FAMILIES = _Families()


def make_checkpoint(path: Path | str, family: str, *, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """A random checkpoint at `path`.

    Args:
        path: the folder.
        family: one of `FAMILIES`, or any other of transformers.
        max_shard_size: of its files.
        overrides: fields of the config; and `seed` and `dtype`.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(overrides.pop("seed", 0))
    dtype = overrides.pop("dtype", torch.float32)
    config = config_class(family)(**{**FAMILIES[family], **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            # As transformers makes them, norms are ones and biases zeros: forgetting one would not show.
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
                if family in ZERO_CENTRED and ".linear_attn." not in name:
                    tensor -= 1
            elif name.endswith("A_log"):  # slow decay: a lost state shows, and transformers' chunks are precise
                tensor.uniform_(-4, 0)
            elif "bias" in name:
                tensor.uniform_(-0.3, 0.3)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return Path(path)


def with_tensors(
    path: Path, more: Mapping[str, Tensor | None] | None = None, to: Path | None = None, **config: Any
) -> Path:
    """Write a checkpoint of one file again, here or in another folder.

    Args:
        path: the checkpoint.
        more: tensors that it has then; None is one that it has not.
        to: the folder; the same by default.
        config: changes of its config; `...` removes an entry.
    """
    to = path if to is None else to
    to.mkdir(exist_ok=True)
    (to / "config.json").write_text((path / "config.json").read_text())
    tensors = {**load_file(path / "model.safetensors"), **(more or {})}
    kept = {name: each for name, each in tensors.items() if each is not None}
    save_file(kept, to / "model.safetensors", metadata={"format": "pt"})
    return with_config(to, **config)


def with_config(path: Path, **changes: Any) -> Path:
    """Change entries of a checkpoint's config; `...` removes one."""
    file = path / "config.json"
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    return path


def read_config(family: str, **changes: Any) -> Any:
    """What a family reads from the config of its small checkpoint, with changes; `...` removes an entry."""
    values = {"n_group": 1, "topk_group": 1, **FAMILIES[family], **changes}
    config = HFConfig({name: value for name, value in values.items() if value is not ...}, Path("config.json"))
    kind = model_class(f"{family}ForCausalLM", config)
    return kind.read_config(config, HFConfig({}, Path("generation_config.json")))


def make_qwen3_moe_checkpoint(path: Path | str, *, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """A random Qwen3-MoE checkpoint at `path`; see `make_checkpoint`."""
    return make_checkpoint(path, "Qwen3Moe", max_shard_size=max_shard_size, **overrides)


def checkpoint_fixture(make: Callable[..., Path] = make_qwen3_moe_checkpoint, *args: Any, **fields: Any) -> Any:
    """A module's fixture: what `make` writes into a folder of its own."""

    @pytest.fixture(scope="module")
    def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make(tmp_path_factory.mktemp("checkpoint"), *args, **fields)

    return checkpoint


def family_checkpoints_fixture() -> Any:
    """A module's fixture: the small checkpoint of a family, made when it is first asked for."""

    @pytest.fixture(scope="module")
    def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
        return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp(family), family))

    return checkpoint


def load_reference(path: Path | str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' own model of a checkpoint, by default fp32, evaluation mode."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Logits of every position, `[tokens, vocab]`."""
    return model(torch.tensor([token_ids])).logits[0]


def reference_greedy(
    model: PreTrainedModel, prompt: list[int], num_tokens: int, guess: Sequence[int] = ()
) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens with transformers' own KV cache, and the logits `[vocab]` that each came from.

    A guess of all of them that is right is read in one go, which takes a fraction of the time.
    """
    if len(guess) == num_tokens:
        logits = reference_logits(model, [*prompt, *guess[:-1]])[len(prompt) - 1 :]
        if logits.argmax(-1).tolist() == list(guess):
            return list(guess), list(logits)
    with torch.no_grad():
        out = model(torch.tensor([prompt]), use_cache=True)
        last, tokens = [out.logits[0, -1]], [int(out.logits[0, -1].argmax())]
        while len(tokens) < num_tokens:
            out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            last.append(out.logits[0, -1])
            tokens.append(int(out.logits[0, -1].argmax()))
    return tokens, last


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
