"""A checkpoint is read whole: a tensor that nobody reads is refused by name, or known, and then the log counts it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, with_tensors
from fp8_checkpoints import blockwise, write_fp8
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_runner import Checkpoint, CheckpointError, ModelRunner, TensorsUnread
from model_runner.models.registry import read_model
from ranks import run_ranks
from ubatch import CommGroup


def numbers(*shape: int) -> Tensor:
    return torch.full(shape, 0.25)


def like(path: Path, prefix: str, new: str) -> dict[str, Tensor]:
    """The tensors behind a prefix, again under another one."""
    tensors = load_file(path / "model.safetensors")
    return {name.replace(prefix, new): each + 1 for name, each in tensors.items() if name.startswith(prefix)}


LAYER = "model.layers.1"
UNREAD: dict[str, tuple[str, dict[str, Tensor] | tuple[str, str], str]] = {
    "a bias of queries": ("Llama", {f"{LAYER}.self_attn.q_proj.bias": numbers(64)}, r"self_attn\.q_proj\.bias"),
    "a bias of the logits": ("Qwen3", {"lm_head.bias": numbers(131)}, r"lm_head\.bias"),
    "a ninth expert": (
        "Mixtral",
        (f"{LAYER}.block_sparse_moe.experts.7", f"{LAYER}.block_sparse_moe.experts.8"),
        "s.8.w1",
    ),
    "one more layer": (
        "Qwen3",
        ("model.layers.2", "model.layers.3"),
        r"model\.layers\.3\.input_layernorm.* and 6 more",
    ),
    "drafts of another family": ("Qwen3", {"mtp.fc.weight": numbers(48, 96)}, r"mtp\.fc\.weight"),
    "a vision tower": ("Qwen3", {"model.visual.patch_embed.weight": numbers(4)}, r"model\.visual\.patch"),
    "a scale of nothing": ("Qwen3", {f"{LAYER}.mlp.extra.weight_scale": numbers(1)}, r"mlp\.extra\.weight_scale"),
    "a name of a megabyte": ("Qwen3", {"x" * 1_000_000: numbers(1)}, r"'x{20,80}\.\.\.x{20,80}'\. The model"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_nobody_reads_is_refused_by_name(case: str, tmp_path: Path) -> None:
    family, add, message = UNREAD[case]
    path = make_checkpoint(tmp_path / "plain", family)
    read_model(Checkpoint(path))
    add = like(path, *add) if isinstance(add, tuple) else add
    with pytest.raises(TensorsUnread, match=message) as caught:
        ModelRunner(with_tensors(path, add, tmp_path / "more"), num_kv_blocks=4)
    assert caught.value.names == tuple(sorted(add))
    number = "a tensor" if len(add) == 1 else f"{len(add)} tensors"
    assert f"stores {number} that {family}ForCausalLM" in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_the_same_are_read_where_the_config_announces_them(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "plain", "Llama", attention_bias=True, mlp_bias=True)
    read_model(Checkpoint(path))
    for name in ("attention_bias", "mlp_bias"):
        with pytest.raises(TensorsUnread, match=r"_proj\.bias"):
            read_model(Checkpoint(with_tensors(path, None, tmp_path / name, **{name: False})))


KNOWN: dict[str, tuple[str, dict[str, Any], dict[str, Tensor], str]] = {
    "frequencies": (
        "Llama",
        {},
        {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": numbers(8) for layer in range(3)},
        "3 (rotary frequencies, which are computed)",
    ),
    "scales of the KV cache": (
        "Llama",
        {},
        {f"{LAYER}.self_attn.{part}_scale": numbers(1) for part in "kv"},
        "2 (scales of the KV cache)",
    ),
    "a vision tower and drafts": (
        "Qwen3_5Moe",
        {},
        {"model.visual.blocks.0.weight": numbers(2), "mtp.fc.weight": numbers(48, 96), "mtp.norm.weight": numbers(48)},
        "2 (multi-token prediction, which only speculative algorithm mtp reads), 1 (vision tower, which is not served)",
    ),
    "drafts of a hybrid": ("Qwen3Next", {}, {"mtp.fc.weight": numbers(48, 96)}, "1 (multi-token prediction"),
    "drafts of MiMo": ("MiMoV2Flash", {}, {"model.mtp.layers.0.x": numbers(1)}, "1 (layers for multi-token"),
    "drafts of DeepSeek": (
        "DeepseekV3",
        {"num_nextn_predict_layers": 1},
        {f"model.layers.3.{name}": numbers(48, 96) for name in ("eh_proj.weight", "self_attn.indexer.wk.weight")},
        "2 (multi-token prediction",
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_ones_are_left_and_counted(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family, config, add, counted = KNOWN[case]
    path = make_checkpoint(tmp_path / "plain", family)
    if family == "Qwen3_5Moe":  # under the names of the whole model
        path = as_seeing(path, tmp_path / "seeing")
    path = with_tensors(path, add, **config)
    with caplog.at_level(logging.INFO), ModelRunner(path, num_kv_blocks=4):
        pass
    (line,) = [each for each in caplog.messages if "that are not read" in each]
    assert counted in line


def as_seeing(path: Path, to: Path) -> Path:
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    text = json.loads((path / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": text}
    return with_tensors(path, dict.fromkeys(tensors) | renamed, to, **(dict.fromkeys(text, ...) | whole))


def test_a_layer_behind_the_last_is_no_draft_layer_unless_it_is_counted_and_has_eh_proj(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "plain", "DeepseekV3")
    another = like(path, "model.layers.2", "model.layers.3")
    with pytest.raises(TensorsUnread):
        read_model(Checkpoint(with_tensors(path, another, tmp_path / "counted", num_nextn_predict_layers=1)))
    drafts = another | {"model.layers.3.eh_proj.weight": numbers(48, 96)}
    with pytest.raises(TensorsUnread, match="counted by num_nextn_predict_layers"):
        read_model(Checkpoint(with_tensors(path, drafts, tmp_path / "uncounted", num_nextn_predict_layers=0)))
    read_model(Checkpoint(with_tensors(path, drafts, tmp_path / "both", num_nextn_predict_layers=1)))


def test_a_tied_output_layer_may_be_stored(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "plain", "Llama", tie_word_embeddings=True)
    read_model(Checkpoint(with_tensors(path, {"lm_head.weight": numbers(131, 48)})))
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.weight' has shape \[4, 48\]"):
        read_model(Checkpoint(with_tensors(path, {"lm_head.weight": numbers(4, 48)})))


def test_scales_belong_to_what_is_read(tmp_path: Path) -> None:
    """Those of weights are read, those of activations are known, others are not."""
    (tmp_path / "fp8").mkdir()
    path, _ = write_fp8(make_checkpoint(tmp_path / "plain", "Mixtral"), tmp_path / "fp8", blockwise(16, 16))
    projection = f"{LAYER}.self_attn.q_proj"
    expert = f"{LAYER}.block_sparse_moe.experts.3.w1"
    known = {f"{name}.input_scale": numbers(1) for name in (projection, expert)}
    with ModelRunner(with_tensors(path, known, tmp_path / "known"), num_kv_blocks=4):
        pass
    second = {f"{projection}.weight_scale": numbers(1), f"{expert}.weight_scale": numbers(1)}
    with pytest.raises(TensorsUnread) as caught:
        read_model(Checkpoint(with_tensors(path, known | second, tmp_path / "second")))
    assert set(caught.value.names) == set(second)
    unquantised = with_tensors(tmp_path / "plain", known, tmp_path / "unquantised")
    with pytest.raises(TensorsUnread, match="input_scale"):
        read_model(Checkpoint(unquantised))


def test_a_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "Llama", max_shard_size="40KB")
    shard = min(path.glob("model-*.safetensors"))
    save_file(load_file(shard) | {"model.layers.0.self_attn.q_norm.weight": numbers(16)}, shard)
    with pytest.raises(TensorsUnread, match=r"self_attn\.q_norm\.weight"):
        ModelRunner(path, num_kv_blocks=4)


def test_random_weights_are_not_compared_with_files(tmp_path: Path) -> None:
    path = with_tensors(make_checkpoint(tmp_path, "Llama"), {"strange": numbers(1)}, vocab_size=140)
    with ModelRunner(path, load_format="dummy", num_kv_blocks=4) as runner:
        assert runner.config.vocab_size == 140


def run_parts(rank: int, world_size: int, path: str) -> str:
    """Half of the experts and of the heads each: what the other rank reads is not unknown."""
    sizes = {"num_kv_blocks": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    try:
        with ModelRunner(path, group=CommGroup.from_process_group(), tensor_parallel_size=2, **sizes):  # type: ignore[arg-type]
            return ""
    except TensorsUnread as error:
        return " ".join(error.names)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_ranks_that_read_a_part_agree(family: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "plain", family)
    assert run_ranks(run_parts, 2, str(path)) == ["", ""]
    more = with_tensors(path, {f"{LAYER}.strange": numbers(1)}, tmp_path / "more")
    assert run_ranks(run_parts, 2, str(more)) == [f"{LAYER}.strange"] * 2
