"""A checkpoint is read whole: a tensor that nobody reads is refused by name, or known, and then the log counts it.

And its config is not believed: made-up sizes and numbers are refused by name and value, fast, before memory is taken.
"""

import json
import logging
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import family_checkpoints_fixture, make_checkpoint, with_tensors
from fp8_checkpoints import blockwise, write_fp8
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_runner import Checkpoint, CheckpointError, ModelRunner, TensorsUnread
from model_runner.errors import fits_in_memory
from model_runner.models.registry import read_model
from model_runner.weights.dummy_weights import DummyCheckpoint
from ranks import run_ranks
from serving.cli import main
from ubatch import CommGroup, ConfigError


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


KNOWN: dict[str, tuple[str, dict[str, Tensor], str]] = {
    "frequencies": (
        "Llama",
        {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": numbers(8) for layer in range(3)},
        "3 (rotary frequencies, which are computed)",
    ),
    "scales of the KV cache": (
        "Llama",
        {f"{LAYER}.self_attn.{part}_scale": numbers(1) for part in "kv"},
        "2 (scales of the KV cache)",
    ),
    "a vision tower and drafts": (
        "Qwen3_5Moe",
        {"model.visual.blocks.0.weight": numbers(2), "mtp.fc.weight": numbers(48, 96), "mtp.norm.weight": numbers(48)},
        "2 (multi-token prediction, which only speculative algorithm mtp reads), 1 (vision tower, which is not served)",
    ),
    "drafts of a hybrid": ("Qwen3Next", {"mtp.fc.weight": numbers(48, 96)}, "1 (multi-token prediction"),
    "drafts of MiMo": ("MiMoV2Flash", {"model.mtp.layers.0.x": numbers(1)}, "1 (layers for multi-token"),
    "drafts of DeepSeek": (
        "DeepseekV3",
        {f"model.layers.3.{name}": numbers(48, 96) for name in ("eh_proj.weight", "self_attn.indexer.wk.weight")},
        "2 (multi-token prediction",
    ),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_ones_are_left_and_counted(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family, add, counted = KNOWN[case]
    path = make_checkpoint(tmp_path / "plain", family)
    if family == "Qwen3_5Moe":  # under the names of the whole model
        path = as_seeing(path, tmp_path / "seeing")
    path = with_tensors(path, add, **({"num_nextn_predict_layers": 1} if family == "DeepseekV3" else {}))
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


@pytest.mark.long
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
