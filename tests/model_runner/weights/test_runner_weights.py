"""Checkpoints: lazy reading, fused loading, and every way in which one can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_fixture, make_qwen3_moe_checkpoint, with_config, with_tensors
from safetensors.torch import load_file

from model_runner import (
    Checkpoint,
    CheckpointError,
    CheckpointFileMissing,
    ModelRunner,
    TensorMissing,
    WrongShape,
    known_architectures,
    register_model,
)
from ubatch import ConfigError, UBatchError

single = checkpoint_fixture()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_qwen3_moe_checkpoint(tmp_path_factory.mktemp("sharded"), max_shard_size="40KB", dtype=torch.bfloat16)
    assert len(list(path.glob("*.safetensors"))) > 3
    return path


def copied(path: Path, to: Path) -> Path:
    return Path(shutil.copytree(path, to / "copy"))


def test_single_file(single: Path) -> None:
    checkpoint = Checkpoint(single)
    expected = load_file(single / "model.safetensors")
    assert checkpoint.names == frozenset(expected)
    assert checkpoint.architecture == "Qwen3MoeForCausalLM"
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(checkpoint.load(name, 32, 48), expected[name])
    fused = checkpoint.load_fused(
        [("model.layers.1.mlp.gate_proj.weight", 40), ("model.layers.1.mlp.up_proj.weight", 40)], 48
    )
    parts = [expected["model.layers.1.mlp.gate_proj.weight"], expected["model.layers.1.mlp.up_proj.weight"]]
    assert torch.equal(fused, torch.cat(parts))


def test_shards_are_opened_when_asked_for(sharded: Path) -> None:
    checkpoint = Checkpoint(sharded)
    assert not checkpoint._files
    norm = checkpoint.load("model.norm.weight", 48)
    assert norm.dtype == torch.float32  # stored as bf16
    assert len(checkpoint._files) == 1
    checkpoint.close()
    assert norm.sum() > 0
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert checkpoint.names == frozenset(index["weight_map"])


def test_missing_tensor_names_it_and_the_nearest(single: Path, tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.q_norm.weight"
    with pytest.raises(TensorMissing, match=f"no tensor '{name}'") as caught:
        ModelRunner(with_tensors(single, {name: None}, tmp_path), num_kv_blocks=4)
    assert caught.value.name == name
    assert "The nearest it has is 'model.layers." in str(caught.value)
    assert isinstance(caught.value, UBatchError)


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.mlp.experts.7.down_proj.weight", "model.layers.0.self_attn.v_proj.weight", "model.norm.weight"],
)
def test_wrong_shape_says_got_and_expected(single: Path, tmp_path: Path, name: str) -> None:
    good = load_file(single / "model.safetensors")[name]
    with pytest.raises(WrongShape) as caught:
        ModelRunner(with_tensors(single, {name: good[:-1].clone()}, tmp_path), num_kv_blocks=4)
    assert caught.value.name == name
    assert caught.value.expected == tuple(good.shape)
    assert caught.value.got == (len(good) - 1, *good.shape[1:])


def test_registering_models() -> None:
    assert "Qwen3MoeForCausalLM" in known_architectures()
    with pytest.raises(ConfigError, match="already"):
        register_model("Qwen3MoeForCausalLM", "my.models:Qwen")
    with pytest.raises(ConfigError, match="form"):
        register_model("Mine", "my.models.Mine")
    register_model("Qwen3MoeForCausalLM", "model_runner.models.qwen:Qwen3MoeForCausalLM")


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def rename(name: str, to: str) -> Callable[[Path], None]:
    return lambda path: (path / name).rename(path / to) and None


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(text) and None


def folder(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).mkdir()


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (remove("config.json"), CheckpointFileMissing, "config.json is missing"),
        (write("config.json", "{"), CheckpointError, "not valid JSON"),
        (write("config.json", "[]"), CheckpointError, "one JSON object"),
        (write("config.json", f'{{"a": {"9" * 6000}}}'), CheckpointError, "value has 6000 digits$"),
        (remove("model.safetensors"), CheckpointFileMissing, "neither model.safetensors nor"),
        (
            rename("model.safetensors", "model-00001-of-00001.safetensors"),
            CheckpointFileMissing,
            r"'model-00001-of-00001\.safetensors', but no model\.safetensors\.index\.json, .* Copy it from where",
        ),
        (write("model.safetensors", "not tensors"), CheckpointError, "not a readable safetensors file"),
        (write("model.safetensors.index.json", "{}"), CheckpointError, "weight_map"),
        (write("model.safetensors.index.json", "[" * 100_000), CheckpointError, r"index\.json is not valid JSON"),
        (folder("model.safetensors.index.json"), CheckpointError, r"cannot read .*index\.json: Is a directory"),
        (
            write("model.safetensors.index.json", '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
            CheckpointFileMissing,
            "model-00001-of-00002.safetensors is missing",
        ),
    ],
)
def test_damaged_files(
    single: Path, tmp_path: Path, damage: Callable[[Path], None], error: type[Exception], message: str
) -> None:
    path = copied(single, tmp_path)
    damage(path)
    with pytest.raises(error, match=message):
        ModelRunner(path)


OUT_OF_PLACE = "no safetensors file of that folder"


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "has no 'weight_map'"),
        ([], "has no 'weight_map'"),
        (None, "has no 'weight_map'"),
        *(
            ({"a": file}, OUT_OF_PLACE)
            for file in (1, None, [], ["model.safetensors"], {}, "", ".", "config.json", "\0.safetensors")
        ),
        ({"a": "../model.safetensors"}, OUT_OF_PLACE),
        ({"a": "/model.safetensors"}, OUT_OF_PLACE),
        ({"a": "x" * 1_000_000 + ".safetensors"}, OUT_OF_PLACE),
        ({"a" * 1_000_000: "\ud800" * 300 + ".safetensors"}, OUT_OF_PLACE),
        ({"a": "model.safetensors", "b": 2}, OUT_OF_PLACE),
    ],
)
def test_an_index_that_cannot_be_is_named(single: Path, tmp_path: Path, weight_map: object, message: str) -> None:
    index = copied(single, tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(index.parent).check_weights()
    assert str(index) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_is_long_in_a_file_is_cut(single: Path, tmp_path: Path) -> None:
    path = with_config(copied(single, tmp_path), dtype="z" * 1_000_000)
    assert [len(dtype) for dtype in Checkpoint(path).stored_dtypes()] == [200, 7]
    header = json.dumps({"a": {"dtype": "y" * 1_000_000, "shape": [1], "data_offsets": [0, 4]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match="not a readable safetensors file") as caught:
        Checkpoint(path).check_weights()
    assert len(str(caught.value)) < 1000


def test_a_tensor_that_only_the_index_has(single: Path, tmp_path: Path) -> None:
    index = copied(single, tmp_path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot read tensor 'a'"):
        Checkpoint(index.parent).load_scalar("a")


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileMissing, match="is not a folder"):
        ModelRunner(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_kv_blocks": 4, "kv_cache_memory": 1 << 20}, "num_kv_blocks and kv_cache_memory contradict each other"),
        ({"kv_cache_memory": 10}, "hold no block"),
        ({"num_kv_blocks": 0}, "num_blocks"),
        ({"num_kv_blocks": 4, "all2all_backend": "torch-dist"}, "did you mean 'torch_dist'"),
        ({"num_kv_blocks": 4, "attention_backend": "flash"}, "unknown attention back end"),
        ({"num_kv_blocks": 4, "experts_backend": "group"}, "experts back end"),
    ],
)
def test_runner_settings_that_cannot_be(single: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelRunner(single, **settings)


def test_blocks_by_memory(single: Path) -> None:
    with ModelRunner(single, kv_cache_memory=1 << 20, block_size=8) as runner:
        assert runner.kv_cache.num_blocks == (1 << 20) // (2 * 3 * 8 * 2 * 16 * 4)
