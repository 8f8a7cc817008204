"""Every end-of-sequence token that a checkpoint names ends a sequence, also one that only its tokenizer names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from repository import TINY_MOE

from model_runner import Checkpoint, ModelRunner, SamplingParams, generate
from model_runner.models.registry import read_model

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
