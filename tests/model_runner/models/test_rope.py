"""Rotary embeddings: frequencies and factors as transformers computes them, both layouts, and what is refused.

And how long a sequence may be: what configs say of it, and logits beyond the length that a model was trained for.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from model_checks import admitted, all_logits, close, expected_logits
from transformers import Glm4MoeConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave, yarn_apply_mscale
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as rotate_a_part
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from model_runner import CheckpointError, ModelRunner, ScheduledRequest, model_class
from model_runner.decoder.rope import RotaryEmbedding, RotaryTable, read_longest_context
from model_runner.models import DecoderConfig, Rope, read_rope
from model_runner.weights.files import HFConfig
from serving.cli import main
from ubatch import ConfigError

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 40.0, "original_max_position_embeddings": 256}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 12_345.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.5},
    "llama3": LLAMA3,
    "llama3, another ramp": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 32.0, "factor": 32.0},
    "yarn": YARN,
    "yarn, the ramp a step": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "truncate": False},
    "yarn, not truncated": {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn, a factor of its own": {**YARN, "attention_factor": 1.3},
    "yarn, DeepSeek-V3": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, DeepSeek-V2": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.8},
    "yarn, one mscale": {**YARN, "mscale_all_dim": 0.8},
    "yarn, nothing to extend": {**YARN, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
HEAD_DIM, MAX_POSITION = 64, 1024


def config_of(**values: Any) -> HFConfig:
    return HFConfig({"max_position_embeddings": MAX_POSITION, **values}, Path("config.json"))


def llama(parameters: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=dict(parameters),
    )


@pytest.mark.parametrize("parameters", VARIANTS.values(), ids=VARIANTS)
def test_frequencies_and_factors_equal_transformers(parameters: dict[str, Any]) -> None:
    rope = read_rope(config_of(rope_parameters=parameters))
    theirs = llama(parameters)
    if parameters["rope_type"] == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, CPU)
    torch.testing.assert_close(rope.inverse_frequencies(HEAD_DIM), frequencies, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor, rel=1e-12)
    assert rope.softmax_factor == pytest.approx(yarn_apply_mscale(theirs.rope_parameters, 1.0), rel=1e-12)


def test_the_variants_differ() -> None:
    """Else the test above could not tell them apart."""
    seen = {
        (tuple(rope.inverse_frequencies(HEAD_DIM).tolist()), rope.attention_factor, rope.softmax_factor)
        for rope in (read_rope(config_of(rope_parameters=parameters)) for parameters in VARIANTS.values())
    }
    assert len(seen) == len(VARIANTS)


@pytest.mark.parametrize("name", ["plain", "llama3", "yarn"])
def test_rotation_of_halves(name: str) -> None:
    parameters = VARIANTS[name]
    positions = torch.tensor([0, 1, 2, 500, MAX_POSITION - 1])
    q, k = torch.randn(2, 5, 3, HEAD_DIM)
    cos, sin = LlamaRotaryEmbedding(llama(parameters))(q, positions[None])
    expected = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    rotation = RotaryEmbedding(read_rope(config_of(rope_parameters=parameters)), HEAD_DIM, CPU)(positions)
    for ours, theirs in zip((q, k), expected, strict=True):
        # A rounding of a frequency is a thousand times larger at the last position.
        torch.testing.assert_close(rotation.rotate(ours), theirs[0], rtol=1e-4, atol=5e-4)


def test_rotation_of_neighbours() -> None:
    """DeepSeek's order: scores of rotated queries and keys, which no order of the results can change."""
    parameters = VARIANTS["yarn, DeepSeek-V2"]
    positions = torch.tensor([0, 3, 700, 700, 1023])
    q, k = torch.randn(2, 5, 3, HEAD_DIM)
    cos, sin = LlamaRotaryEmbedding(llama(parameters))(q, positions[None])
    q_theirs, k_theirs = apply_rotary_pos_emb_interleave(q[None], k[None], cos, sin, unsqueeze_dim=2)
    rope = read_rope(config_of(rope_parameters=parameters))
    table = RotaryTable(rope, HEAD_DIM, MAX_POSITION, interleaved=True, device=CPU)(positions)
    assert table.cos_sin.shape == (MAX_POSITION, HEAD_DIM)
    assert table.cos_sin.dtype == torch.float32
    scores = torch.einsum("thd,shd->hts", table.rotate(q), table.rotate(k))
    torch.testing.assert_close(scores, torch.einsum("thd,shd->hts", q_theirs[0], k_theirs[0]), rtol=1e-4, atol=1e-3)


# ------------------------------------------------------------------------------------------- how configs say it


def test_older_names() -> None:
    """`rope_scaling` with `type`, and `rope_theta` next to it."""
    old = config_of(rope_theta=7_000.0, rope_scaling={"type": "linear", "factor": 3.0})
    assert read_rope(old) == read_rope(
        config_of(rope_parameters={"rope_type": "linear", "rope_theta": 7_000.0, "factor": 3.0})
    )
    assert read_rope(config_of(rope_theta=7_000.0, rope_scaling=None)) == Rope(7_000.0)
    assert read_rope(config_of(), default_theta=1e6) == Rope(1e6)


@pytest.mark.parametrize("parameters", [VARIANTS["plain"], LLAMA3, YARN], ids=["plain", "llama3", "yarn"])
def test_a_part_of_every_head_is_rotated(parameters: dict[str, Any]) -> None:
    """As GLM-4.5 does: frequencies of the smaller dimension; the rest of a head stays as it is."""
    partly = {**parameters, "partial_rotary_factor": 0.5}
    positions = torch.tensor([0, 1, 2, 500])
    q, k = torch.randn(2, 4, 3, HEAD_DIM)
    config = Glm4MoeConfig(head_dim=HEAD_DIM, max_position_embeddings=MAX_POSITION, rope_parameters=dict(partly))
    cos, sin = Glm4MoeRotaryEmbedding(config)(q, positions[None])
    expected = rotate_a_part(q[None], k[None], cos, sin, unsqueeze_dim=2)
    inside = read_rope(config_of(rope_parameters=partly), default_partial=1.0)
    rotation = RotaryEmbedding(inside, HEAD_DIM, CPU)(positions)
    for ours, theirs in zip((q, k), expected, strict=True):
        torch.testing.assert_close(rotation.rotate(ours), theirs[0], rtol=1e-4, atol=5e-4)
    outside = config_of(rope_parameters=parameters, partial_rotary_factor=0.5)
    assert read_rope(outside, default_partial=1.0) == inside
    assert read_rope(config_of(rope_parameters=parameters), default_partial=0.5) == inside


def test_what_a_config_may_leave_out() -> None:
    """YaRN without a factor extends from the original context to the longest one; without that, from nothing."""
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 256}
    assert read_rope(config_of(rope_parameters=yarn)) == read_rope(config_of(rope_parameters={**yarn, "factor": 4.0}))
    outside = config_of(
        rope_parameters={**YARN, "original_max_position_embeddings": 9}, original_max_position_embeddings=256
    )
    assert read_rope(outside) == read_rope(config_of(rope_parameters=YARN))
    del yarn["original_max_position_embeddings"]
    assert read_rope(config_of(rope_parameters={**yarn, "factor": 2.0})) == read_rope(
        config_of(rope_parameters={**yarn, "factor": 2.0, "original_max_position_embeddings": MAX_POSITION})
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type is 'longrope'.*one of 'default', 'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "has no 'factor'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": None}}, "has no 'low_freq_factor'"),
        ({"rope_parameters": {**YARN, "truncate": "no"}}, "truncate is 'no'"),
        ({"rope_parameters": {**YARN, "mscale": -1.0}}, r"mscale is -1\.0"),
        ({"rope_theta": "big"}, "rope_theta is 'big'"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0}}, "partial_rotary_factor is 0.*positive"),
        ({"partial_rotary_factor": 1.25}, r"partial_rotary_factor is 1\.25.*at most 1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "the same rotary embeddings in all layers"),
        ({"rope_parameters": "default"}, "the same rotary embeddings in all layers"),
    ],
)
def test_ropes_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rope(config_of(**values))


YARN_OF_LENGTH = {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("positions", "rope", "longest"),
    [
        (40_960, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),  # Qwen3
        (163_840, {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}, 163_840),  # DeepSeek-V3
        (131_072, {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, 131_072),  # Kimi-K2
        (8192, {"type": "yarn", "original_max_position_embeddings": 4096}, 8192),  # its factor is the quotient
        (8192, {"type": "yarn", "factor": 4.0}, 8192),  # of what, it does not say
        (4096, {"type": "linear", "factor": 2.5, "original_max_position_embeddings": 4096}, 10_240),
        (16_384, {"type": "linear", "factor": 4.0}, 16_384),  # deepseek-coder: multiplied already
        (
            131_072,
            {
                **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                "original_max_position_embeddings": 8192,
            },
            131_072,  # Llama 3.1
        ),
        (4096, None, 4096),
    ],
)
def test_what_configs_say(positions: int, rope: dict[str, Any] | None, longest: int) -> None:
    values = {"max_position_embeddings": positions, "rope_scaling": rope}
    assert read_longest_context(HFConfig(values, Path("config.json"))) == longest
    if rope and "original_max_position_embeddings" in rope:  # it may stand beside the scaling
        values["original_max_position_embeddings"] = rope.pop("original_max_position_embeddings")
        assert read_longest_context(HFConfig(values, Path("config.json"))) == longest


def check(path: Path, length: int, **settings: Any) -> None:
    prompt = [(7 * place) % 131 for place in range(length)]
    with ModelRunner(path, num_kv_blocks=64, block_size=8, **settings) as runner:
        assert runner.max_model_len == length + 1
        (request,) = admitted(runner, [prompt], length + 1)
        got = all_logits(runner, [ScheduledRequest(request, length)])
    close(got, expected_logits(path, [prompt]))


@pytest.mark.parametrize("family", ["Qwen3", "DeepseekV3"])
def test_a_recipe_for_longer_contexts(family: str, tmp_path: Path) -> None:
    """Positions behind `max_position_embeddings`, as far as the scaling reaches; with latent attention, too."""
    check(make_checkpoint(tmp_path, family, max_position_embeddings=40, rope_parameters=YARN_OF_LENGTH), 127)


@pytest.mark.parametrize("family", ["Llama", "DeepseekV2"])
def test_longer_than_the_model_if_allowed(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = {"rope_type": "default", "rope_theta": 50_000.0}
    path = make_checkpoint(tmp_path, family, max_position_embeddings=64, rope_parameters=plain)
    with pytest.raises(ConfigError, match=r"1 to the model's 64 positions, not 101\. With allow_long"):
        ModelRunner(path, num_kv_blocks=64, max_model_len=101)
    check(path, 100, max_model_len=101, allow_long_max_model_len=True)
    assert "max_model_len is 101, but the model has 64 positions" in caplog.text


def test_dual_chunk_attention_is_refused_beyond_its_original_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen2.5-1M: up to the original length attention is plain."""
    chunked = {"chunk_size": 64, "local_size": 16, "original_max_position_embeddings": 96}
    path = make_checkpoint(tmp_path, "Qwen2", dual_chunk_attention_config=chunked)
    for options in ({}, {"max_model_len": 97}, {"max_model_len": 300, "allow_long_max_model_len": True}):
        with pytest.raises(ConfigError, match=r"beyond 96 tokens \(dual_chunk.*Lower it to 96 at most"):
            ModelRunner(path, num_kv_blocks=4, **options)  # type: ignore[arg-type]
    with ModelRunner(path, num_kv_blocks=4, max_model_len=96) as runner:
        assert runner.max_model_len == 96
    command = ["serve", str(path), "--print-config", "--max-model-len"]
    assert main([*command, "97"]) == 2
    assert "--max-model-len is 97, but beyond 96 tokens" in capsys.readouterr().err
    assert main(command[:-1]) == 2, "the checkpoint's own length is longer"
    assert "--max-model-len is 256, but beyond 96 tokens" in capsys.readouterr().err
    main([*command, "96"])
    assert "has no tokenizer" in capsys.readouterr().err, "which is checked last"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "has no 'original_max_position_embeddings'"),
        ({"original_max_position_embeddings": "long"}, "original_max_position_embeddings is 'long'"),
        ([], r"dual_chunk_attention_config is \[\].*or null"),
        (None, None),
    ],
)
def test_a_dual_chunk_attention_config_without_its_original_length(entries: object, message: str | None) -> None:
    values = HFConfig({**FAMILIES["Qwen2"], "dual_chunk_attention_config": entries}, Path("config.json"))
    with pytest.raises(CheckpointError, match=message) if message else nullcontext():
        config = model_class("Qwen2ForCausalLM").read_config(values, HFConfig({}, Path()))
        assert isinstance(config, DecoderConfig)
        assert config.full_attention_length is None
