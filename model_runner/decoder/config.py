"""The config of a decoder, and the entries of `config.json` that families share.

A family's `read_config` calls `read_decoder` with the entries in which it differs; `DecoderLM` builds the layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attention import AttentionShape, MLAShape
from model_runner.decoder.base import ModelConfig
from model_runner.decoder.rope import Rope, read_longest_context, read_rope
from model_runner.weights.files import HFConfig
from model_runner.weights.quantization import read_quantization
from moe import ClampedSwiGLU, Router


@dataclass(frozen=True)
class TensorNames:
    """Names of a MoE's tensors in a checkpoint: `{block}.experts.3.{gate}.weight`, and so on.

    Attributes:
        block: name of the MoE within its layer.
        router: name of the gate within the MoE.
        gate, up, down: the projections of an expert, `down(silu(gate(x)) * up(x))`.
        stacked: names within the MoE of the two tensors that hold all experts, `[E, 2 * intermediate, hidden]`, gate
            first, and `[E, hidden, intermediate]`. None if every expert has tensors of its own, or the two are called
            `experts.gate_up_proj` and `experts.down_proj`.
        shared: name of the shared experts within the layer.
        shared_fused: their projections, if gate and up are one: `(gate and up, down)`.
        shared_gate: name of the shared experts' gate within the MoE; see `MoEConfig.shared_gate`.
    """

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    stacked: tuple[str, str] | None = None
    shared: str = "mlp.shared_experts"
    shared_fused: tuple[str, str] | None = None
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True)
class MoEConfig:
    """The MoE layers of a model.

    Attributes:
        layers: numbers of the layers with a MoE; the others have a dense MLP.
        router: chooses experts; `SigmoidTopKRouter` gets every layer's own bias.
        shared_intermediate_size: intermediate size of all shared experts together; 0 for none.
        shared_gate: a token's result of the shared experts is multiplied by `sigmoid(shared_gate(x))`, one number.
        float32_gate: the router's logits are computed in float32 even if the model's dtype is another.
        gate_bias: the gate has a bias.
        clamped: activation of gpt-oss's routed experts, which have biases and are stacked in the checkpoint; None for
            SwiGLU without biases, and one tensor per projection.
    """

    layers: frozenset[int]
    intermediate_size: int
    router: Router
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    float32_gate: bool = False
    gate_bias: bool = False
    clamped: ClampedSwiGLU | None = None
    names: TensorNames = TensorNames()


@dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """All settings in which the families of `DecoderLM` differ.

    Attributes:
        rms_norm_eps: epsilon of all norms except those inside latent attention.
        tie_word_embeddings: logits come from the embedding's weights, unless the checkpoint has others for them.
        attention_bias: attention's projections have biases; in latent attention only the first and the last ones.
        qkv_bias: query, key and value projections have biases, but the output projection has none. Not for latent
            attention.
        mlp_bias: the dense MLPs' projections have biases.
        qk_norm: queries and keys are normalised per head.
        norms_all_heads: a token's queries are normalised over all heads together, and so are its keys.
        clip_qkv: largest absolute value of queries, keys and values before rotation; None for no limit. With
            `norms_all_heads` only.
        q_lora_rank: size of the compressed query; None if it is not compressed. Latent attention only.
        output_gate: attention's output is multiplied by the sigmoid of a gate per element, before its last projection.
            Not for latent attention.
        zero_centred_norms: norms multiply by 1 + weight.
        layer_ropes: rotary embeddings of every layer, if they differ; `rope` is then the first layer's. Not for latent
            attention.
        sinks_name: name of the attention sinks within attention, where the shape has them.
        value_scale: factor on attention's values. Not for latent attention.
        linear_grouped: the input projections of linear attention are two tensors, ordered by key head; else four.
        tensor_prefix: prefix of the names of all tensors except the output layer's.
        embedding_multiplier: factor of the embeddings.
        residual_multiplier: factor of what attention and MLPs add to the residual.
        logits_divisor: the logits are divided by it.
        rope_interleaved: a rotated pair is two neighbouring dimensions. Latent attention only.
        moe: the MoE layers; None for a dense model.
    """

    intermediate_size: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    attention_bias: bool = False
    qkv_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False
    clip_qkv: float | None = None
    q_lora_rank: int | None = None
    output_gate: bool = False
    zero_centred_norms: bool = False
    layer_ropes: tuple[Rope, ...] | None = None
    sinks_name: str = "sinks"
    value_scale: float = 1.0
    linear_grouped: bool = False
    tensor_prefix: str = "model"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_divisor: float = 1.0
    rope_interleaved: bool = True
    moe: MoEConfig | None = None

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings in the residual, which is kept divided by `residual_multiplier`.

        So no layer computes anything for it: what is added needs no factor, and norms differ in their epsilon only.
        """
        return self.embedding_multiplier / self.residual_multiplier

    @property
    def residual_eps(self) -> float:
        """Epsilon of the norms of that residual."""
        return self.rms_norm_eps / self.residual_multiplier**2

    @property
    def dense_intermediate_size(self) -> int | None:
        """See `ModelConfig`."""
        all_sparse = self.moe is not None and self.moe.layers.issuperset(range(self.num_layers))
        return None if all_sparse else self.intermediate_size

    @property
    def moe_layers(self) -> Sequence[int]:
        """See `ModelConfig`."""
        return () if self.moe is None else sorted(self.moe.layers)

    @property
    def biased_experts(self) -> bool:
        """See `ModelConfig`."""
        return self.moe is not None and self.moe.clamped is not None

    @property
    def expert_intermediate_size(self) -> int | None:
        """See `ModelConfig`."""
        return None if self.moe is None else self.moe.intermediate_size


def read_decoder(
    config: HFConfig,
    generation: HFConfig,
    attention: AttentionShape | MLAShape,
    *,
    rope: Rope | None = None,
    layer_ropes: Sequence[Rope] | None = None,
    moe: MoEConfig | None = None,
    default_eps: float = 1e-6,
    flags: Sequence[str] = (),
    **differences: Any,
) -> DecoderConfig:
    """Read the entries that every family has, as a model without biases and without query and key norms.

    Args:
        rope: result of `read_rope`, for a family with its own defaults; None to read it here.
        layer_ropes: rotary embeddings of every layer instead, without scaling.
        moe: the MoE layers; None for a dense model.
        default_eps: the family's `rms_norm_eps`, used if the config has none.
        flags: entries that are true or false, by default false, and fields of `DecoderConfig` by the same name.
        differences: other fields of `DecoderConfig` in which the family differs.

    Raises:
        CheckpointError: an entry is missing or invalid, the activation is not SiLU, or the weights are quantised in a
            way that is not supported.
    """
    read_quantization(config)  # weights that cannot be loaded are refused before anything is launched
    if layer_ropes is not None:
        rope = layer_ropes[0]
    rope = read_rope(config) if rope is None else rope
    for each in dict.fromkeys(layer_ropes or (rope,)):
        _check_rotary_dim(config, attention, each)
    activation = config.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):  # two names of one function
        raise config.wrong("hidden_act", activation, "'silu'")
    longest = read_longest_context(config) if layer_ropes is None else config.integer("max_position_embeddings")
    differences |= {name: config.flag(name, False) for name in flags}
    return DecoderConfig(
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        num_layers=config.integer("num_hidden_layers"),
        attention=attention,
        max_position_embeddings=longest,
        num_experts=0 if moe is None else read_num_experts(config),
        num_experts_per_tok=0 if moe is None else read_top_k(config),
        full_attention_length=_read_full_attention_length(config),
        eos_token_ids=(*generation.integers("eos_token_id"), *config.integers("eos_token_id")),
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("rms_norm_eps", default_eps),
        rope=rope,
        layer_ropes=None if layer_ropes is None else tuple(layer_ropes),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        moe=moe,
        **differences,
    )


def _read_full_attention_length(config: HFConfig) -> int | None:
    """See `ModelConfig`; up to its original length a model with dual chunk attention has plain attention."""
    entries = config.values.get("dual_chunk_attention_config")
    if entries is None:
        return None
    if not isinstance(entries, dict):
        raise config.wrong("dual_chunk_attention_config", entries, "an object with its original length, or null")
    return HFConfig(entries, config.path).integer("original_max_position_embeddings")


def read_grouped_query(
    config: HFConfig,
    *,
    sliding_window: int | None = None,
    layer_windows: Sequence[int | None] | None = None,
    sinks: bool = False,
) -> AttentionShape:
    """The heads of multi-head and grouped-query attention.

    Args:
        sliding_window: the window of all layers in tokens; None for none.
        layer_windows: the window of every layer, instead; see `read_layer_windows`.
        sinks: see `AttentionShape`.

    Raises:
        CheckpointError: an entry is missing, or the key/value heads do not divide the heads.
    """
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", num_kv_heads, f"a divisor of its {num_heads} attention heads")
    if config.values.get("head_dim") is None and num_heads > config.integer("hidden_size"):
        wanted = f"at most its hidden_size, {config.integer('hidden_size')}, or a head_dim"
        raise config.wrong("num_attention_heads", num_heads, wanted)
    head_dim = config.integer("head_dim", default=config.integer("hidden_size") // num_heads)
    shape = AttentionShape(num_heads, num_kv_heads, head_dim, sliding_window=sliding_window, sinks=sinks)
    if layer_windows is None:
        return shape
    return AttentionShape.of_layers([replace(shape, sliding_window=window) for window in layer_windows])


def read_layer_windows(config: HFConfig, window: int | None, default: Sequence[str]) -> list[int | None]:
    """The window of every layer, by `layer_types`: `window` tokens where that is `sliding_attention`, else None.

    Args:
        default: `layer_types` of a config that has none.

    Raises:
        CheckpointError: there are not as many kinds as layers, or one is another; or a window is needed and missing.
    """
    given = config.words("layer_types")
    kinds = list(default) if given is None else given
    known = ("full_attention", "sliding_attention")
    num_layers = config.integer("num_hidden_layers")
    if len(kinds) != num_layers or not all(kind in known for kind in kinds):
        raise config.wrong("layer_types", kinds, f"one of {' and '.join(known)} for each of its {num_layers} layers")
    if window is None and known[1] in kinds:
        raise config.wrong("sliding_window", window, "the window of its sliding_attention layers")
    return [window if kind == known[1] else None for kind in kinds]


def read_num_experts(config: HFConfig) -> int:
    """Number of routed experts of a MoE layer, under any of the three names in use."""
    return config.integer("num_experts", "num_local_experts", "n_routed_experts")


def read_top_k(config: HFConfig) -> int:
    """Experts that a token visits.

    Raises:
        CheckpointError: the entry is missing, or larger than the number of experts.
    """
    top_k, num_experts = config.integer("num_experts_per_tok"), read_num_experts(config)
    if top_k > num_experts:
        raise config.wrong("num_experts_per_tok", top_k, f"at most its {num_experts} experts")
    return top_k


def _check_rotary_dim(config: HFConfig, attention: AttentionShape | MLAShape, rope: Rope) -> None:
    """Refuse an odd number of rotated dimensions; a family with latent attention checks its own."""
    if isinstance(attention, MLAShape):
        return
    factor, dim = rope.partial_rotary_factor, rope.rotary_dim(attention.head_dim)
    if factor == 1 and dim % 2:
        raise config.wrong("head_dim", dim, "an even number, for rotary embeddings")
    if dim % 2 or not dim:
        what = f"a factor that rotates an even number of the head's {attention.head_dim} dimensions, and at least 2"
        raise config.wrong("partial_rotary_factor", factor, what)
