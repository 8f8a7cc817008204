"""What the runner needs to know of a model, and the model of the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from attention import AttentionPlan, AttentionShape, MLAPlan, MLAShape
from model_runner.parallel.tensor_parallel import WHOLE, Shard, TensorParallel
from model_runner.weights.hf_config import HFConfig
from model_runner.weights.weights import Checkpoint
from moe import All2All
from ubatch import ConfigError, get_forward_context

__all__ = ["CausalLM", "ExpertParallel", "ModelConfig", "check_tensor_parallel", "current_plan"]


@dataclass(frozen=True)
class ModelConfig:
    """What every decoder-only model says about itself; families add to it.

    Attributes:
        vocab_size: rows of the logits.
        hidden_size: numbers per token between layers.
        num_layers: decoder layers, each with attention.
        attention: heads of each of them, those of all tensor-parallel ranks; it says what the KV cache is like, too.
        max_position_embeddings: longest sequence, prompt and output together.
        num_experts: routed experts per MoE layer; 0 for a dense model.
        num_experts_per_tok: how many of them a token visits; 0 for a dense model.
        eos_token_ids: tokens that end a sequence.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    attention: AttentionShape | MLAShape
    max_position_embeddings: int
    num_experts: int
    num_experts_per_tok: int
    eos_token_ids: tuple[int, ...]

    @property
    def dense_intermediate_size(self) -> int | None:
        """Columns of the dense MLPs that tensor-parallel ranks share; None where no layer has one."""
        return None

    @property
    def expert_intermediate_size(self) -> int | None:
        """Columns of a routed expert; None for a dense model. Without it `auto` does not measure the experts."""
        return None


def check_tensor_parallel(config: ModelConfig, size: int) -> None:
    """Whether a model can be shared by so many ranks.

    Args:
        config: of the model.
        size: ranks of a replica.

    Raises:
        ConfigError: its heads, key/value heads or dense MLPs do not divide.
    """
    if size < 1:
        raise ConfigError(f"tensor_parallel_size must be at least 1, not {size}.")
    shape, dense = config.attention, config.dense_intermediate_size
    if shape.num_heads % size:
        raise _undivided(size, f"its {shape.num_heads} attention heads")
    kv_heads = size if isinstance(shape, MLAShape) else shape.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise _undivided(size, f"its {kv_heads} key/value heads, nor they it")
    if dense is not None and dense % size:
        raise _undivided(size, f"the intermediate size {dense} of its dense MLPs")


def _undivided(size: int, what: str) -> ConfigError:
    return ConfigError(
        f"tensor_parallel_size {size} does not fit the model: it does not divide {what}. Choose another, or run more "
        "data-parallel ranks instead."
    )


@dataclass(frozen=True)
class ExpertParallel:
    """How a model is spread over the ranks; the runner fills it.

    Attributes:
        all2all: the transport that all layers and lanes share; it knows which experts this rank holds.
        experts: the experts' back end, by name; with `native`, layers keep their other weights packed, too.
        tensor: the ranks that share attention and dense MLPs; None where this one has them whole.
    """

    all2all: All2All[Any]
    experts: str = "grouped"
    tensor: TensorParallel | None = None

    @property
    def shard(self) -> Shard:
        """What this rank holds of attention and dense MLPs."""
        return WHOLE if self.tensor is None else self.tensor.shard


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over flattened tokens.

    All state of a step travels in its arguments and the forward context: several lanes run one model at once.
    """

    config: ModelConfig
    serves_tensor_parallel: ClassVar[bool] = False
    """Whether `load` heeds `ExpertParallel.tensor`, and `forward` moves rows as `model_runner.decoder.scatter` says."""

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
        """The model with its weights, of the experts only those that `parallel` gives to this rank."""

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Run all layers.

        Args:
            input_ids: `[T]` int64, the tokens of all requests one after the other.
            positions: `[T]` int64, each token's place in its request.

        Returns:
            `[T, hidden_size]`, normalised: what `compute_logits` takes.

        Raises:
            ConfigError: there is no forward context with an attention plan.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[rows, vocab_size]` of the rows `[rows, hidden_size]` that are sampled from."""


def current_plan() -> tuple[AttentionPlan | MLAPlan, int | Tensor]:
    """The attention plan of the current forward context, and its number of tokens without padding.

    In a captured step that number is on the device: `ForwardContext.num_valid`.

    Raises:
        ConfigError: there is none.
    """
    context = get_forward_context()
    if context is None or context.attn_metadata is None:
        raise ConfigError(
            "a model was called without an attention plan. Call it through ModelRunner, or set a forward context "
            "with attn_metadata=backend.plan(metadata)."
        )
    plan: Any = context.attn_metadata
    return plan, context.num_tokens if context.num_valid is None else context.num_valid
