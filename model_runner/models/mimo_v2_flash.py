"""MiMo-V2-Flash: layers with full and with sliding-window attention that differ in more than the window, and a MoE.

    kind of layer    key/value heads            rotary base       sinks
    full             num_key_value_heads        its own           no
    sliding window   twice as many by default   its own           one per head

Value heads have a size of their own, and values are multiplied by a factor. A part of every head is rotated. The router
is DeepSeek-V3's, without shared experts; the first layer is dense. A config may have the entries of transformers
(`layer_types`, `mlp_layer_types`, `rope_parameters` by kind) or those published first (`hybrid_layer_pattern`,
`moe_layer_freq`, `swa_*`). The layers for multi-token prediction in published checkpoints are not loaded.

Source: MiMo-V2-Flash Technical Report (2026) and the `MiMoV2FlashForCausalLM` checkpoint on the Hugging Face hub.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from attention import AttentionShape
from model_runner.decoder.config import DecoderConfig, MoEConfig, read_decoder, read_grouped_query
from model_runner.decoder.decoder import DecoderLM
from model_runner.decoder.rope import Rope
from model_runner.models.deepseek import read_sigmoid_router
from model_runner.weights.files import HFConfig
from model_runner.weights.weights import Checkpoint

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ATTENTION, _MLPS = (_FULL, _SLIDING), ("dense", "sparse")
_THETAS = {_FULL: ("rope_theta", 5_000_000.0), _SLIDING: ("swa_rope_theta", 10_000.0)}
_PARTIAL = 0.334
_WINDOW = 129
_VALUE_SCALE = 0.707
_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_projection_layout": "split"}
"""Entries of a published config, and the one value that is served; null is the same as none."""


class MiMoV2FlashForCausalLM(DecoderLM):
    """The model. See `CausalLM`."""

    @classmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> DecoderConfig:
        """See `CausalLM.read_config`."""
        _refuse_others(config)
        num_layers = config.integer("num_hidden_layers")
        usual = [_FULL if layer == 0 or (layer + 1) % 6 == 0 else _SLIDING for layer in range(num_layers)]
        kinds = _read_kinds(config, "layer_types", "hybrid_layer_pattern", _ATTENTION, usual)
        usual = ["dense"] + ["sparse"] * (num_layers - 1)
        mlps = _read_kinds(config, "mlp_layer_types", "moe_layer_freq", _MLPS, usual)
        numbers = {name: config.integer(name, default=1) for name in ("n_group", "topk_group")}
        with_groups = HFConfig({**config.values, **numbers}, config.path)
        layers = frozenset(layer for layer, kind in enumerate(mlps) if kind == "sparse")
        router = read_sigmoid_router(with_groups, config.number("routed_scaling_factor", 1.0))
        moe = MoEConfig(layers, config.integer("moe_intermediate_size"), router, float32_gate=True)
        shapes, ropes = _read_shapes(config, kinds), {kind: _read_rope(config, kind) for kind in dict.fromkeys(kinds)}
        eps = config.number("layernorm_epsilon", 1e-5)
        of_layers = [ropes[kind] for kind in kinds]
        has_value_scale = "attention_value_scale" in config.values  # null is a factor of 1
        return replace(
            read_decoder(config, generation, shapes, layer_ropes=of_layers, moe=moe, default_eps=eps),
            qkv_bias=config.flag("attention_bias", False),
            sinks_name="attention_sink_bias",
            value_scale=config.number("attention_value_scale", 1.0 if has_value_scale else _VALUE_SCALE),
        )

    @classmethod
    def left(cls, config: DecoderConfig, checkpoint: Checkpoint) -> Mapping[str, str]:
        """See `CausalLM.left`."""
        return {"layers for multi-token prediction, which are not served": r"model\.mtp\..*"}


def _refuse_others(config: HFConfig) -> None:
    """Refuse what a config can say and is not served."""
    for name, known in _ONLY.items():
        if config.values.get(name) not in (None, known):
            raise config.wrong(name, config.values[name], repr(known))
    scaling = config.values.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(scaling[name] != "default" for name in scaling):
        raise config.wrong("rope_scaling", scaling, "null, or the type 'default' and no more")
    block = config.values.get("hybrid_block_size")
    if block is not None and not any(config.values.get(name) for name in ("layer_types", "hybrid_layer_pattern")):
        raise config.wrong("hybrid_block_size", block, "the kinds of its layers in hybrid_layer_pattern")
    if config.values.get("n_shared_experts"):
        raise config.wrong("n_shared_experts", config.values["n_shared_experts"], "no shared experts")
    for name in ("num_attention_heads", "head_dim", "v_head_dim"):
        of_windows, of_all = config.optional_integer(f"swa_{name}"), config.integer(name)
        if of_windows not in (None, of_all):
            raise config.wrong(f"swa_{name}", of_windows, f"{of_all}, as in the layers without a window")


def _read_kinds(
    config: HFConfig, name: str, published: str, known: tuple[str, str], usual: Sequence[str]
) -> Sequence[str]:
    """The kind of every layer, by entry `name`, or by the numbers 0 and 1 for the `known` ones in entry `published`.

    Raises:
        CheckpointError: there are not as many as layers, one is another, or the two entries contradict each other.
    """
    found = []
    for entry, words in ((name, known), (published, (0, 1))):
        kinds = config.values.get(entry)
        if kinds is None:
            continue
        valid = isinstance(kinds, list) and len(kinds) == len(usual) and all(kind in words for kind in kinds)
        if not valid:
            raise config.wrong(entry, kinds, f"{words[0]} or {words[1]} for each of its {len(usual)} layers")
        found.append([known[words.index(kind)] for kind in kinds])
    if found[1:] and found[0] != found[1]:
        raise config.wrong(published, config.values[published], f"the same kinds of layers as {name}, {found[0]}")
    return found[0] if found else usual


def _read_shapes(config: HFConfig, kinds: Sequence[str]) -> AttentionShape:
    """The shapes of the layers. Sizes of heads have no usual values: what a config leaves out is refused."""
    of_full = config.integer("num_key_value_heads")
    plain = replace(read_grouped_query(config), v_head_dim=config.integer("v_head_dim"))
    full = replace(plain, sinks=config.flag("add_full_attention_sink_bias", False))
    if _SLIDING not in kinds:
        return full
    kv_heads = config.integer("swa_num_key_value_heads", default=2 * of_full)
    if plain.num_heads % kv_heads:
        wanted = f"a divisor of its {plain.num_heads} attention heads (by default twice its num_key_value_heads)"
        raise config.wrong("swa_num_key_value_heads", kv_heads, wanted)
    # This entry counts the tokens before a query, the other one the query, too.
    before = config.optional_integer("sliding_window_size")
    window = config.integer("sliding_window", default=_WINDOW) if before is None else before + 1
    sinks = config.flag("add_swa_attention_sink_bias", True)
    sliding = replace(plain, num_kv_heads=kv_heads, sliding_window=window, sinks=sinks)
    return AttentionShape.of_layers([sliding if kind == _SLIDING else full for kind in kinds])


def _read_rope(config: HFConfig, kind: str) -> Rope:
    """The rotary embeddings of one kind of layer."""
    by_kind = config.values.get("rope_parameters")
    if by_kind is None:
        name, usual = _THETAS[kind]
        theta, entries = config.number(name, usual), config
    else:
        own = by_kind.get(kind) if isinstance(by_kind, dict) else None
        if not isinstance(own, dict):
            raise config.wrong("rope_parameters", by_kind, f"an entry {kind!r} for its layers of that kind")
        entries = HFConfig(own, config.path)
        if own.get("rope_type", "default") != "default":
            raise config.wrong(f"rope_type of {kind}", own["rope_type"], "'default'")
        theta = entries.number("rope_theta")
    partial = entries.number("partial_rotary_factor", _PARTIAL)
    if partial > 1:
        raise config.wrong("partial_rotary_factor", partial, "at most 1: the whole head")
    return Rope(theta, partial_rotary_factor=partial)
