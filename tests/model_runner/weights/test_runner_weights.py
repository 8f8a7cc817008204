"""Checkpoints: lazy reading, fused loading, and every way in which one can be wrong.

Every end-of-sequence token that one names ends a sequence, also one that only its tokenizer names. And the random model
for measuring: layout, size, repeatability; transformers loads it and agrees.
"""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    checkpoint_fixture,
    load_reference,
    make_qwen3_moe_checkpoint,
    reference_greedy,
    with_config,
    with_tensors,
)
from repository import TINY_MOE
from runner_graph_cases import TINY
from safetensors.torch import load_file

from model_runner import (
    Checkpoint,
    CheckpointError,
    CheckpointFileMissing,
    ModelRunner,
    RandomQwen3Moe,
    SamplingParams,
    TensorMissing,
    WrongShape,
    generate,
    known_architectures,
    make_random_qwen3_moe,
    register_model,
)
from model_runner.models.registry import read_model
from model_runner.random_checkpoint import weights_of
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
    index = json.loads((sharded / INDEX).read_text())
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


INDEX = "model.safetensors.index.json"


def write(text: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(text)


@pytest.mark.parametrize(
    ("name", "damage", "error", "message"),
    [
        ("config.json", Path.unlink, CheckpointFileMissing, "config.json is missing"),
        ("config.json", write("{"), CheckpointError, "not valid JSON"),
        ("config.json", write("[]"), CheckpointError, "one JSON object"),
        ("config.json", write(f'{{"a": {"9" * 6000}}}'), CheckpointError, "value has 6000 digits$"),
        ("model.safetensors", Path.unlink, CheckpointFileMissing, "neither model.safetensors nor"),
        (
            "model.safetensors",
            lambda file: file.rename(file.with_stem("model-00001-of-00001")),
            CheckpointFileMissing,
            r"'model-00001-of-00001\.safetensors', but no model\.safetensors\.index\.json, .* Copy it from where",
        ),
        ("model.safetensors", write("not tensors"), CheckpointError, "not a readable safetensors file"),
        (INDEX, write("{}"), CheckpointError, "weight_map"),
        (INDEX, write("[" * 100_000), CheckpointError, r"index\.json is not valid JSON"),
        (INDEX, Path.mkdir, CheckpointError, r"cannot read .*index\.json: Is a directory"),
        (
            INDEX,
            write('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'),
            CheckpointFileMissing,
            "model-00001-of-00002.safetensors is missing",
        ),
    ],
)
def test_damaged_files(
    single: Path, tmp_path: Path, name: str, damage: Callable[[Path], object], error: type[Exception], message: str
) -> None:
    path = copied(single, tmp_path)
    damage(path / name)
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
    index = copied(single, tmp_path) / INDEX
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
    index = copied(single, tmp_path) / INDEX
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot read tensor 'a'"):
        Checkpoint(index.parent).load_scalar("a")


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointFileMissing, match="is not a folder"):
        ModelRunner(tmp_path / "nowhere")


def test_blocks_by_memory(single: Path) -> None:
    with ModelRunner(single, kv_cache_memory=1 << 20, block_size=8) as runner:
        assert runner.kv_cache.num_blocks == (1 << 20) // (2 * 3 * 8 * 2 * 16 * 4)


Files = Mapping[str, Mapping[str, Any]]
NAMED = {"tokenizer_config.json": {"eos_token": "<|im_end|>"}}


def checkpoint_of(folder: Path, files: Files) -> Path:
    """tiny-moe with other files next to its weights; no tokenizer but the given one."""
    config = json.loads((TINY_MOE / "config.json").read_text()) | {"eos_token_id": None}
    for name, values in {"config.json": {}, **files}.items():
        whole = {**config, **values} if name == "config.json" else values
        (folder / name).write_text(json.dumps(whole))
    (folder / "model.safetensors").symlink_to(TINY_MOE / "model.safetensors")
    return folder


def ends_of(folder: Path) -> tuple[int, ...]:
    return read_model(Checkpoint(folder))[1].eos_token_ids


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, ()),
        ({"config.json": {"eos_token_id": 3}}, (3,)),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [5, 3]}}, (5, 3)),
        ({"config.json": {"eos_token_id": -1}}, ()),
        ({"config.json": {"eos_token_id": [-1, 2047, 2048]}}, (2047,)),
        ({**NAMED, "added_tokens.json": {"<|im_end|>": 7}}, (7,)),
        ({**NAMED, "config.json": {"eos_token_id": 0}, "added_tokens.json": {"<|im_end|>": 7}}, (0, 7)),
        ({**NAMED, "added_tokens.json": {"<|im_end|>": 2048}}, ()),
        ({**NAMED, "tokenizer.json": {"added_tokens": [{"id": 9, "content": "<|im_end|>"}]}}, (9,)),
        ({**NAMED, "tokenizer.json": {"model": {"vocab": {"a": 0, "<|im_end|>": 11}}}}, (11,)),
        ({**NAMED, "tokenizer.json": {"model": {"vocab": [["a", -1.5], ["<|im_end|>", 0.0]]}}}, (1,)),
        ({**NAMED, "vocab.json": {"<|im_end|>": 13}}, (13,)),
        ({**NAMED, "vocab.json": {"another": 13}}, ()),
        (
            {
                "tokenizer_config.json": {
                    "eos_token": {"content": "<|im_end|>", "special": True},
                    "added_tokens_decoder": {"17": {"content": "<|im_end|>"}},
                }
            },
            (17,),
        ),
        ({"special_tokens_map.json": {"eos_token": "</s>"}, "vocab.json": {"</s>": 2}}, (2,)),
        ({"tokenizer_config.json": {"eos_token": None}, "vocab.json": {"</s>": 2}}, ()),
    ],
)
def test_the_stop_set_is_all_that_the_checkpoint_says(tmp_path: Path, files: Files, ends: tuple[int, ...]) -> None:
    assert ends_of(checkpoint_of(tmp_path, files)) == ends


def test_a_broken_tokenizer_is_left_to_who_loads_it(tmp_path: Path) -> None:
    checkpoint_of(tmp_path, NAMED)
    (tmp_path / "tokenizer.json").write_text("{")
    assert ends_of(tmp_path) == ()


def test_generation_ends_at_the_tokenizers_token(tmp_path: Path) -> None:
    prompt, params = [40, 300, 7, 12], SamplingParams(max_tokens=12, ignore_eos=True)
    with ModelRunner(TINY_MOE, num_kv_blocks=8) as runner:
        [whole] = generate(runner, [prompt], params)
    token = whole.token_ids[5]
    checkpoint_of(tmp_path, {**NAMED, "added_tokens.json": {"<|im_end|>": token}})
    with ModelRunner(tmp_path, num_kv_blocks=8) as runner:
        [ended] = generate(runner, [prompt], SamplingParams(max_tokens=12))
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert ended.finish_reason == "stop"


def test_an_id_below_zero_forbids_no_token(tmp_path: Path) -> None:
    """Before, -1 with `min_tokens` forbade the vocabulary's last token."""
    last = 2047
    checkpoint_of(tmp_path, {"config.json": {"eos_token_id": -1}})
    params = SamplingParams(max_tokens=2, min_tokens=2, logit_bias=((last, 100.0),))
    with ModelRunner(tmp_path, num_kv_blocks=8) as runner:
        assert generate(runner, [[40, 300]], params)[0].token_ids == (last, last)


def test_default_size_is_about_100_million() -> None:
    total = sum(math.prod(shape) for shape in weights_of(RandomQwen3Moe(), torch.bfloat16).shapes.values())
    assert 100e6 < total < 110e6


@pytest.mark.parametrize(("tied", "layers_per_shard"), [(True, 1), (False, None)])
def test_transformers_agrees(tmp_path: Path, tied: bool, layers_per_shard: int | None) -> None:
    size = RandomQwen3Moe(**{**vars(TINY), "tie_word_embeddings": tied})
    path = make_random_qwen3_moe(tmp_path / "model", 5, size=size, layers_per_shard=layers_per_shard)
    assert (path / "model.safetensors").exists() == (layers_per_shard is None)
    reference = load_reference(path)
    prompts = [[1, 2, 3, 4], [60, 5]]
    with ModelRunner(path, num_kv_blocks=16, block_size=8) as runner:
        outputs = generate(runner, prompts, SamplingParams(max_tokens=8))
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, logits = reference_greedy(reference, prompt, 8)
        assert list(output.token_ids) == tokens
        assert all(0.1 < step.std() < 10 for step in logits)  # neither dead nor exploding


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        make_random_qwen3_moe(tmp_path / name, seed, size=TINY, layers_per_shard=None)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    read = [(path / "model.safetensors").read_bytes() for path in (first, again, other)]
    assert read[0] == read[1] != read[2]
    assert json.loads((first / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]


def test_shards_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers_per_shard"):
        make_random_qwen3_moe(tmp_path, layers_per_shard=0)
