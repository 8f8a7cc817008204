"""Tiny random models of transformers with every kind of cache, and a look at all that a cache holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from ubatch.calls.containers import PLAIN

LONGEST = 16
"""Tokens that a static cache holds."""

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SSM = {"state_size": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_chunk_size": 4}
_SEQ2SEQ = {"vocab_size": 64, "d_model": 32, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 1}


def _lm(name: str, **settings: Any) -> Callable[[], Any]:
    config = getattr(hf, settings.pop("config", f"{name}Config"))
    return lambda: getattr(hf, f"{name}ForCausalLM")(config(**{**_SIZES, **settings}))


MODELS: dict[str, Callable[[], Any]] = {
    "llama": _lm("Llama", **_HEADS),
    "gemma3": _lm(
        "Gemma3",
        config="Gemma3TextConfig",
        **_HEADS,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "lfm2": _lm("Lfm2", **_HEADS, layer_types=["conv", "full_attention"]),
    "jamba": _lm(
        "Jamba",
        **{**_HEADS, "num_hidden_layers": 4},
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=4,
        num_experts_per_tok=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
    "qwen3_next": _lm(
        "Qwen3Next",
        **_HEADS,
        **_EXPERTS,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        shared_expert_intermediate_size=16,
    ),
    "mamba": _lm("Mamba", **_SSM),
    "mamba2": _lm("Mamba2", **_SSM, num_heads=8, head_dim=8, n_groups=2, chunk_size=4),
    "falcon_mamba": _lm("FalconMamba", **_SSM),
    "bamba": _lm("Bamba", **_HEADS, **_MAMBA, attn_layer_indices=[1]),
    "falcon_h1": _lm("FalconH1", **_HEADS, **_MAMBA, mamba_d_ssm=64),
    "zamba2": _lm(
        "Zamba2",
        **{**_HEADS, "num_hidden_layers": 3},
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=4,
        n_mamba_heads=8,
        mamba_headdim=8,
        mamba_ngroups=2,
        chunk_size=4,
        num_mem_blocks=1,
        adapter_rank=4,
    ),
    "minimax": _lm(
        "MiniMax",
        **_HEADS,
        layer_types=["linear_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=4,
    ),
    "deepseek_v4": _lm(
        "DeepseekV4",
        **{**_HEADS, **_EXPERTS, "num_key_value_heads": 1, "head_dim": 16},
        q_lora_rank=16,
        o_groups=2,
        o_lora_rank=8,
        sliding_window=4,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        index_topk=2,
        index_n_heads=2,
        index_head_dim=8,
        n_routed_experts=4,
    ),
    "glm_moe_dsa": _lm(
        "GlmMoeDsa",
        **{**_HEADS, **_EXPERTS, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        index_topk=4,
        index_n_heads=2,
        index_head_dim=8,
    ),
    "xlstm": _lm("xLSTM", hidden_size=128, num_heads=4, chunk_size=4),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(**_SEQ2SEQ, d_kv=8, d_ff=48, num_layers=2, num_heads=4, initializer_factor=2.0)
    ),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            **_SEQ2SEQ,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=32,
            init_std=0.2,
            bos_token_id=1,
            forced_eos_token_id=None,
        )
    ),
}

_made: dict[str, Any] = {}


def model_of(name: str) -> Any:
    """The model, made once per process, in `eval` mode."""
    if name not in _made:
        torch.manual_seed(0)
        _made[name] = MODELS[name]().eval()
    return _made[name]


def dynamic(model: Any) -> Any:
    return DynamicCache(config=model.config)


def static(model: Any) -> Any:
    return StaticCache(config=model.config, max_cache_len=LONGEST)


def encoder_decoder(model: Any) -> Any:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def encoder_decoder_static(model: Any) -> Any:
    return EncoderDecoderCache(static(model), DynamicCache())


def minimax(model: Any) -> Any:
    return type(model(prompts(1, 1)).past_key_values)()


def xlstm(model: Any) -> Any:
    from transformers.models.xlstm.modeling_xlstm import xLSTMCache

    return xLSTMCache(model.config, ROWS, dtype=torch.float32)


ROWS = 5
CASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{name: (name, dynamic) for name in MODELS if name not in ("minimax", "xlstm", "t5", "bart")},
    **{f"{name} static": (name, static) for name in ("llama", "gemma3", "lfm2", "falcon_h1", "glm_moe_dsa")},
    "llama lazy": ("llama", lambda model: DynamicCache()),
    "minimax": ("minimax", minimax),
    "xlstm": ("xlstm", xlstm),
    "t5": ("t5", encoder_decoder),
    "bart": ("bart", encoder_decoder),
    "bart static": ("bart", encoder_decoder_static),
}
"""A model, and the empty cache that a caller would give it."""


def prompts(rows: int = ROWS, length: int = 6) -> Tensor:
    return torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def call(model: Any, ids: Tensor, rows: slice | list[int], cache: Any) -> Any:
    """Logits of some rows of a step, with their cache."""
    if model.config.is_encoder_decoder:
        return model(input_ids=prompts()[rows], decoder_input_ids=ids[rows], past_key_values=cache).logits
    stateful = model.config.model_type in ("mamba", "mamba2", "falcon_mamba", "xlstm")
    name = "cache_params" if stateful else "past_key_values"
    return model(ids[rows], use_cache=True, **{name: cache}).logits


def held(value: Any, path: str = "cache") -> dict[str, Any]:
    """All that a cache holds, by path; an empty container as its class."""
    if isinstance(value, (Tensor, *PLAIN)):
        return {path: value}
    if isinstance(value, dict):
        items = [(f"[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"[{index}]", item) for index, item in enumerate(value)]
    else:
        items = [(f".{key}", item) for key, item in vars(value).items() if key != "config"]
    found: dict[str, Any] = {path: type(value)}
    for key, item in items:
        found.update(held(item, path + key))
    return found


def assert_held(result: dict[str, Any], expected: dict[str, Any], *, exact: bool = True) -> None:
    """Two looks at what a cache holds are alike."""
    assert list(result) == list(expected)
    for path, value in expected.items():
        assert type(result[path]) is type(value), path
        if isinstance(value, Tensor):
            rtol, atol = (0, 0) if exact else (1e-4, 1e-5)
            torch.testing.assert_close(
                result[path], value, rtol=rtol, atol=atol, msg=lambda text, at=path: f"{at}: {text}"
            )
        else:
            assert result[path] == value, path
