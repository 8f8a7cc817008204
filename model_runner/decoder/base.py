"""The interface between runner and model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention import AttentionPlan, AttentionShape, GatedDeltaShape, HybridPlan, MLAPlan, MLAShape
from model_runner.parallel.tensor_parallel import WHOLE, Shard, TensorParallel
from model_runner.weights.files import HFConfig, tokenizer_end_tokens
from model_runner.weights.weights import Checkpoint
from moe import All2All, ExpertLoads, ExpertMap, ExpertPlacement
from ubatch import ConfigError, get_forward_context


@dataclass(frozen=True)
class ModelConfig:
    """Config entries of every decoder-only model; families add to it.

    Attributes:
        vocab_size: rows of the logits.
        hidden_size: numbers per token between layers.
        num_layers: decoder layers, each with attention or linear attention.
        attention: heads of each layer with attention, over all tensor-parallel ranks; it determines the KV cache's
            shape, too.
        max_position_embeddings: longest sequence in tokens, prompt and output together.
        num_experts: routed experts per MoE layer; 0 for a dense model.
        num_experts_per_tok: routed experts that a token visits; 0 for a dense model.
        eos_token_ids: tokens that end a sequence; all that the checkpoint names, see `read_model_config`.
        linear: heads of the layers with linear attention, over all tensor-parallel ranks; None if there are none.
        linear_layers: numbers of these layers; they have a recurrent state per request instead of keys and values.
        full_attention_length: longest sequence that attention is right for, if that is less: beyond it the model was
            trained for dual chunk attention, which is not served. None for no such limit.
        serves_tensor_parallel: whether ranks can share this model. A family whose class does not serve it need not set
            this, see `read_model_config`; one that cannot for some of its checkpoints sets it to False for these.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: AttentionShape | MLAShape
    max_position_embeddings: int
    num_experts: int
    num_experts_per_tok: int
    eos_token_ids: tuple[int, ...]
    linear: GatedDeltaShape | None = field(default=None, kw_only=True)
    linear_layers: frozenset[int] = field(default=frozenset(), kw_only=True)
    full_attention_length: int | None = field(default=None, kw_only=True)
    serves_tensor_parallel: bool = field(default=True, kw_only=True)

    @property
    def num_kv_layers(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - len(self.linear_layers)

    def place(self, layer: int) -> int:
        """Number of a layer among those of its kind: its place in the KV cache, or in the pool of states."""
        before = sum(other < layer for other in self.linear_layers)
        return before if layer in self.linear_layers else layer - before

    @property
    def dense_intermediate_size(self) -> int | None:
        """Intermediate size of the dense MLPs, over all tensor-parallel ranks; None if no layer has one."""
        return None

    @property
    def expert_intermediate_size(self) -> int | None:
        """Intermediate size of a routed expert; None for a dense model. Without it `auto` does not measure experts."""
        return None

    @property
    def moe_layers(self) -> Sequence[int]:
        """Numbers of the layers with routed experts. A family that does not say has no counted loads."""
        return ()

    @property
    def biased_experts(self) -> bool:
        """Whether the routed experts have biases, or another activation than SwiGLU."""
        return False


def check_tensor_parallel(config: ModelConfig, size: int) -> None:
    """Check that `size` ranks can share a model.

    Args:
        config: the model's config.
        size: ranks of a replica.

    Raises:
        ConfigError: the heads, key/value heads, heads of linear attention or dense MLPs cannot be divided by `size`, or
            the model not at all.
    """
    if size < 1:
        raise ConfigError(f"tensor_parallel_size must be at least 1, not {size}.")
    if size > 1 and not config.serves_tensor_parallel:
        raise ConfigError(
            f"tensor_parallel_size {size} does not fit the model: its family does not serve tensor parallelism with "
            "these settings. Use 1, and more data-parallel ranks instead."
        )
    attention, dense = config.attention, config.dense_intermediate_size
    several = attention.layers if isinstance(attention, AttentionShape) else None
    for shape in dict.fromkeys(several or (attention,)):
        if shape.num_heads % size:
            raise _undivided(size, f"its {shape.num_heads} attention heads")
        kv_heads = size if isinstance(shape, MLAShape) else shape.num_kv_heads
        if kv_heads % size and size % kv_heads:
            raise _undivided(size, f"its {kv_heads} key/value heads, nor they it")
    if config.linear is not None and config.linear.num_k_heads % size:
        raise _undivided(size, f"the {config.linear.num_k_heads} key heads of its linear attention")
    if dense is not None and dense % size:
        raise _undivided(size, f"the intermediate size {dense} of its dense MLPs")


def _undivided(size: int, what: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size {size} does not fit the model: it does not divide {what}. Choose another, or run more "
        "data-parallel ranks instead."
    )


@dataclass(frozen=True)
class ExpertParallel:
    """How a model is spread over the ranks; filled by the runner.

    Attributes:
        all2all: the transport that all layers and lanes share; it knows which experts this rank holds.
        experts: name of the experts' back end; with `native`, the layers' other weights are packed, too.
        tensor: the ranks that share attention and dense MLPs; None if this rank has them whole.
        fp8_block: experts stored in fp8 with a scale per such block stay so; None if all weights are dequantised.
        loads: counts the tokens of every expert; None for a network whose load nobody wants.
        placement: which expert every slot of the transport holds; None if slots are experts.
    """

    all2all: All2All[Any]
    experts: str = "grouped"
    tensor: TensorParallel | None = None
    fp8_block: tuple[int, int] | None = None
    loads: ExpertLoads | None = None
    placement: ExpertPlacement | None = None

    def held(self, moe_layer: int) -> list[int]:
        """The experts in this rank's slots.

        Args:
            moe_layer: the layer's number among those with experts.
        """
        if self.placement is None:
            return list(self.all2all.experts)
        held: list[int] = self.placement.held(moe_layer, self._rank).tolist()
        return held

    def expert_map(self, moe_layer: int, device: torch.device) -> ExpertMap | None:
        """The slots of a layer's experts, on `device`; None if slots are experts."""
        if self.placement is None or self.placement.is_plain(moe_layer):
            return None
        return ExpertMap(self.placement.dispatch_table(moe_layer, self._rank), device)

    @property
    def _rank(self) -> int:
        return self.all2all.experts.start // len(self.all2all.experts)

    @property
    def shard(self) -> Shard:
        """This rank's share of attention and dense MLPs."""
        return WHOLE if self.tensor is None else self.tensor.shard


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over flattened tokens.

    All state of a step travels in its arguments and the forward context: several lanes run one model at once.
    """

    config: ModelConfig
    serves_tensor_parallel: ClassVar[bool] = False
    """Whether the family supports tensor parallelism: `load` uses `ExpertParallel.tensor`, and `forward` moves rows as
    in `model_runner.decoder.scatter`.
    """

    @classmethod
    @abstractmethod
    def read_config(cls, config: HFConfig, generation: HFConfig) -> ModelConfig:
        """The model's config from the checkpoint's files.

        Raises:
            CheckpointError: an entry is missing, or asks for something that is not supported.
        """

    @classmethod
    @abstractmethod
    def load(cls, config: Any, checkpoint: Checkpoint, parallel: ExpertParallel) -> CausalLM:
        """The model with its weights; of the experts only those of this rank, as `parallel` says."""

    @classmethod
    def left(cls, config: Any, checkpoint: Checkpoint) -> Mapping[str, str]:
        """Stored tensors that the family does not read, and need not: what they are, and a pattern of whole names.

        All others are refused. What every family may leave is in `model_runner.models.registry`.
        """
        return {}

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run all layers.

        Args:
            input_ids: `[T]` int64, the tokens of all requests one after the other.
            positions: `[T]` int64, each token's position in its request.

        Returns:
            `[T, hidden_size]`, normalised: the input of `compute_logits`.

        Raises:
            ConfigError: there is no forward context with an attention plan.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[rows, vocab_size]` of the rows `[rows, hidden_size]` that are sampled from."""


def read_model_config(kind: type[CausalLM], config: HFConfig, generation: HFConfig) -> ModelConfig:
    """`kind.read_config`, with what the class itself does not serve, and every end-of-sequence token of the folder.

    Both configs and the tokenizer name such tokens. Ids outside the vocabulary are left out: the model cannot write
    them.

    Raises:
        CheckpointError: as there.
    """
    own = kind.read_config(config, generation)
    ends = (*own.eos_token_ids, *config.integers("eos_token_id"), *tokenizer_end_tokens(config.path.parent))
    known = tuple(dict.fromkeys(token for token in ends if 0 <= token < own.vocab_size))
    own = replace(own, eos_token_ids=known)
    return own if kind.serves_tensor_parallel else replace(own, serves_tensor_parallel=False)


def current_plan() -> tuple[AttentionPlan | MLAPlan | HybridPlan, int | Tensor]:
    """The attention plan of the current forward context, and its number of tokens without padding.

    In a captured step that number is on the device: `ForwardContext.num_valid`.

    Raises:
        ConfigError: there is no forward context, or it has no plan.
    """
    context = get_forward_context()
    if context is None or context.attn_metadata is None:
        raise ConfigError(
            "a model was called without an attention plan. Call it through ModelRunner, or set a forward context "
            "with attn_metadata=backend.plan(metadata)."
        )
    plan: Any = context.attn_metadata
    return plan, context.num_tokens if context.num_valid is None else context.num_valid
