"""The random model for measuring: layout, size, repeatability; transformers loads it and agrees."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoints import load_reference, reference_greedy
from runner_graph_cases import TINY

from model_runner import ModelRunner, RandomQwen3Moe, SamplingParams, generate, make_random_qwen3_moe
from model_runner.random_checkpoint import weights_of
from ubatch import ConfigError


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
