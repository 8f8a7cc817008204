"""Tiny random models of transformers with every kind of cache, and a look at all that a cache holds."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from zoo_entry import SIZES, pretrained
from zoo_states import dynamic_cache, static_cache

from ubatch.calls.containers import PLAIN

_STATES = ["linear_attention", "full_attention"]
_HEADS = {**SIZES.llama, "head_dim": 4}
_INDEXED = {**_HEADS, "q_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 8, "moe_intermediate_size": 16}
_COMPRESSED = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}

MODELS: dict[str, Callable[[], Any]] = {
    "llama": pretrained("LlamaForCausalLM", **SIZES.llama),
    "gemma3": pretrained(
        "Gemma3ForCausalLM",
        **_HEADS,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "lfm2": pretrained("Lfm2ForCausalLM", **SIZES.lfm2),
    "jamba": pretrained("JambaForCausalLM", **{**SIZES.jamba, "num_hidden_layers": 4}),
    "qwen3_next": pretrained("Qwen3NextForCausalLM", **SIZES.next),
    "mamba": pretrained("MambaForCausalLM", **SIZES.ssm),
    "mamba2": pretrained("Mamba2ForCausalLM", **SIZES.mamba2),
    "falcon_mamba": pretrained("FalconMambaForCausalLM", **SIZES.ssm),
    "bamba": pretrained("BambaForCausalLM", **SIZES.bamba),
    "falcon_h1": pretrained("FalconH1ForCausalLM", **SIZES.bamba, mamba_d_ssm=32),
    "zamba2": pretrained(
        "Zamba2ForCausalLM",
        **{**_HEADS, "num_hidden_layers": 3},
        layers_block_type=["mamba", "hybrid", "mamba"],
        mamba_d_state=4,
        n_mamba_heads=4,
        mamba_headdim=8,
        mamba_ngroups=2,
        chunk_size=4,
        num_mem_blocks=1,
        adapter_rank=4,
    ),
    "minimax": pretrained("MiniMaxForCausalLM", **SIZES.moe, head_dim=4, layer_types=_STATES, block_size=4),
    "deepseek_v4": pretrained(
        "DeepseekV4ForCausalLM",
        **{**_INDEXED, "num_key_value_heads": 1, "head_dim": 16},
        o_groups=2,
        o_lora_rank=8,
        sliding_window=4,
        layer_types=[*_COMPRESSED],
        compress_rates=_COMPRESSED,
        index_topk=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
    ),
    "glm_moe_dsa": pretrained("GlmMoeDsaForCausalLM", **{**_INDEXED, **SIZES.latent}, index_topk=4),
    "xlstm": pretrained("xLSTMForCausalLM", **{**SIZES.llama, "hidden_size": 128}, num_heads=4, chunk_size=4),
    "t5": pretrained("T5ForConditionalGeneration", **SIZES.t5, initializer_factor=2.0),
    "bart": pretrained("BartForConditionalGeneration", **SIZES.seq2seq),
}


@cache
def model_of(name: str) -> Any:
    """The model, made once per process, in `eval` mode."""
    torch.manual_seed(0)
    return MODELS[name]()


def encoder_decoder(model: Any) -> Any:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def encoder_decoder_static(model: Any) -> Any:
    return EncoderDecoderCache(static_cache(model), DynamicCache())


def minimax(model: Any) -> Any:
    return type(model(prompts(1, 1)).past_key_values)()


def xlstm(model: Any) -> Any:
    from transformers.models.xlstm.modeling_xlstm import xLSTMCache

    return xLSTMCache(model.config, ROWS, dtype=torch.float32)


ROWS = 5
CASES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **{name: (name, dynamic_cache) for name in MODELS if name not in ("minimax", "xlstm", "t5", "bart")},
    **{f"{name} static": (name, static_cache) for name in ("llama", "gemma3", "lfm2", "falcon_h1", "glm_moe_dsa")},
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
