"""A config is not believed: made-up sizes and numbers are refused by name and value, fast, before memory is taken."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import family_checkpoints_fixture

from model_runner import Checkpoint, CheckpointError, ModelRunner
from model_runner.errors import fits_in_memory
from model_runner.models.registry import read_model
from model_runner.weights.dummy_weights import DummyCheckpoint
from serving.cli import main
from ubatch import ConfigError

INF, NAN = float("inf"), float("nan")
FAMILIES = ("Llama", "Qwen3Moe", "DeepseekV3", "MiMoV2Flash")


checkpoint = family_checkpoints_fixture()


def with_config(path: Path, to: Path, changes: dict[str, Any], weights: bool = True) -> Path:
    """A copy with a changed config; a dictionary changes some entries of one. JSON has no infinity, Python reads it."""
    values = json.loads((path / "config.json").read_text())
    for name, value in changes.items():
        values[name] = values[name] | value if isinstance(value, dict) and isinstance(values.get(name), dict) else value
    (to / "config.json").write_text(json.dumps(values))
    if weights:
        (to / "model.safetensors").symlink_to(path / "model.safetensors")
    return to


MADE_UP: list[tuple[str, dict[str, Any], str]] = [
    *(
        (family, {"num_hidden_layers": number}, f"num_hidden_layers is {number}")
        for family in FAMILIES[:3]
        for number in (4, 1000, 10**9)
    ),
    ("Llama", {"num_hidden_layers": 10**300}, r"num_hidden_layers is 1000+\.\.\.000+;"),
    ("Qwen3Moe", {"num_local_experts": 10**9}, f"num_local_experts is {10**9}.*at most 65536"),
    ("Qwen3Moe", {"num_local_experts": 9}, r"mlp\.gate\.weight' has shape \[8, 48\].*num_local_experts is 9"),
    ("Qwen3Moe", {"num_local_experts": 60_000}, r"mlp\.gate\.weight'.*num_local_experts is 60000"),
    ("DeepseekV3", {"n_routed_experts": 65_536}, r"mlp\.gate\.weight'.*n_routed_experts is 65536"),
    *(
        ("Llama", {"vocab_size": number}, rf"vocab_size is {number}")
        for number in (132, 10_000_000, 10**9, 2**63, 10**70)
    ),
    *(("Llama", {"hidden_size": number}, f"hidden_size is {number}") for number in (64, 16_000_000, 10**12)),
    *(("Llama", {"intermediate_size": number}, f"intermediate_size is {number}") for number in (41, 10**7, 10**15)),
    ("Qwen3Moe", {"moe_intermediate_size": 10**7}, "moe_intermediate_size is 10000000"),
    ("Qwen3Moe", {"mlp_only_layers": [*range(10**6), "x"]}, "mlp_only_layers is .*a list of integers"),
    ("Llama", {"num_attention_heads": 10**6}, "num_attention_heads is 1000000"),
    ("Llama", {"num_attention_heads": 10**6, "num_key_value_heads": 10**6, "head_dim": None}, "num_attention_heads is"),
    ("Llama", {"head_dim": 10**6}, "head_dim is 1000000"),
    ("DeepseekV3", {"kv_lora_rank": 10**7}, "kv_lora_rank is 10000000"),
    ("DeepseekV3", {"q_lora_rank": 10**7}, "q_lora_rank is 10000000"),
    ("DeepseekV3", {"n_shared_experts": 10**6}, "n_shared_experts is 1000000"),
    ("DeepseekV3", {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1000000000"),
    *(
        (family, {"max_position_embeddings": number}, f"max_position_embeddings is {number}")
        for family in FAMILIES
        for number in (10**8, 10**18)
    ),
    ("Llama", {"rope_parameters": {"original_max_position_embeddings": 10**10}}, "original_max_position_embeddings is"),
    ("Llama", {"rope_parameters": {"factor": 1e300}}, r"factor is 1e\+300.*from 1e-06 to 1e\+06"),
    ("Llama", {"rope_parameters": {"factor": 1e-300}}, "factor is 1e-300"),
    ("Llama", {"rope_parameters": {"high_freq_factor": 1.0}}, r"high_freq_factor is 1\.0.*more than"),
    *(
        ("DeepseekV3", {"rope_parameters": {"factor": factor}}, f"factor is .*{shown}")
        for factor, shown in ((1e300, "e.300"), (INF, "inf"), (NAN, "nan"), (10**400, "00"), (5e5, "64 original"))
    ),
    ("DeepseekV3", {"rope_parameters": {"beta_fast": INF}}, "beta_fast is inf"),
    ("DeepseekV3", {"rope_parameters": {"mscale": NAN}}, "mscale is nan"),
    *(
        (family, {"rope_parameters": {"rope_theta": theta}}, f"rope_theta is {theta}")
        for family in ("Llama", "DeepseekV3")
        for theta in (NAN, INF, -INF, 0, -1.0, 1.0)
    ),
    ("MiMoV2Flash", {"rope_parameters": None, "swa_rope_theta": NAN}, "swa_rope_theta is nan"),
    *(
        ("Llama", {"rms_norm_eps": eps}, f"rms_norm_eps is {eps}.*from 1e-20 to 1")
        for eps in (INF, NAN, -INF, 0, 0.0, -1e-6, 1e9, 1e-300)
    ),
    ("MiMoV2Flash", {"layernorm_epsilon": INF}, "layernorm_epsilon is inf"),
    ("DeepseekV3", {"routed_scaling_factor": INF}, "routed_scaling_factor is inf"),
    ("Llama", {"architectures": None}, "architectures is None.*a list with one name"),
    ("Llama", {"architectures": ["x" * 10**6]}, r"architectures is \['xxx.*\.\.\.xxx.*at most 200 characters"),
    ("Llama", {"architectures": ["LlamaForCausalLn" * 10]}, "unknown architecture 'LlamaForCausalLn"),
    ("Llama", {"hidden_act": "x" * 10**6}, r"hidden_act is 'xxx.*\.\.\.xxx"),
    ("Qwen3Moe", {"layer_types": ["x" * 10**6]}, r"has 'xxx.*\.\.\.xxx.*' layers"),
    ("Qwen3Moe", {"layer_types": 5, "mlp_only_layers": "x" * 10**6}, r"mlp_only_layers is 'xxx.*\.\.\.xxx"),
    ("Llama", {"quantization_config": {"quant_method": "x" * 10**6}}, r"quant_method 'xxx.*\.\.\.xxx"),
]


@pytest.mark.parametrize(("family", "changes", "message"), MADE_UP, ids=[str(case[1])[:60] for case in MADE_UP])
def test_made_up_entries(
    checkpoint: Callable[[str], Path], tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    path = with_config(checkpoint(family), tmp_path, changes)
    began, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((CheckpointError, ConfigError), match=message) as caught:
        read_model(Checkpoint(path))
    assert time.process_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100 << 10, "KiB"
    assert len(str(caught.value)) < 1200
    with pytest.raises(type(caught.value)):
        ModelRunner(path, num_kv_blocks=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000"),
        ({"rms_norm_eps": INF}, "rms_norm_eps is inf"),
    ],
)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_what_no_file_bounds_has_bounds_of_its_own(
    checkpoint: Callable[[str], Path], tmp_path: Path, changes: dict[str, Any], message: str, load_format: str
) -> None:
    """Random weights, and a checkpoint whose files are not downloaded yet."""
    with pytest.raises(CheckpointError, match=message):
        ModelRunner(with_config(checkpoint("Qwen3Moe"), tmp_path, changes, weights=False), load_format=load_format)


def test_weights_that_do_not_fit_into_memory(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each size may be within its bound; where nothing is stored, the allocator has the last word."""
    monkeypatch.setattr(DummyCheckpoint, "load", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    with pytest.raises(CheckpointError, match=r"the weights of .* do not fit into this machine's memory.*config\.json"):
        ModelRunner(checkpoint("Llama"), load_format="dummy")
    with pytest.raises(RuntimeError, match="another"), fits_in_memory("what"):
        raise RuntimeError("another")


def test_the_command_refuses_them_before_anything_is_launched(
    checkpoint: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = with_config(checkpoint("Qwen3Moe"), tmp_path, {"vocab_size": 10**6})
    assert main(["generate", str(path), "--prompt", "hi"]) == 2
    printed = capsys.readouterr()
    assert "has shape [131, 48], but config.json asks for [1000000, 48] (vocab_size is 1000000)" in printed.err
    assert "Traceback" not in printed.err


def test_bounds_leave_room_for_published_configs(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """The largest that have been published, and what long contexts were trained with."""
    published = {
        "max_position_embeddings": 4_194_304,
        "rope_parameters": {"rope_theta": 4.58e10},
        "rms_norm_eps": 1e-12,
    }
    _, config = read_model(Checkpoint(with_config(checkpoint("Llama"), tmp_path, published)))
    assert config.max_position_embeddings == 4_194_304
