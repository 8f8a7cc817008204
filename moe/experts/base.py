"""The interface between a MoE layer and the experts of one rank.

Transports deliver two layouts (`moe.all2all.base`): rows of tokens, and batches of rows by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from moe.experts.quantization import FP8, check_scales, dequantize_blocks
from ubatch import ConfigError, GradientError

if TYPE_CHECKING:
    from moe.kernels.signals import Signals  # imports Triton


class Experts(Protocol):
    """The experts that one rank holds. Stateless between calls: several lanes share one."""

    @property
    def expert_range(self) -> range:
        """Global ids of these experts."""

    @property
    def capturable(self) -> bool:
        """Whether they can be captured into a CUDA graph: nothing is read on the host."""

    def __call__(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        """Each row's weighted sum over those of its experts that are held here.

        Args:
            hidden_states: `[N, H]`; rows may be strided. Float8_e4m3fn where `scales` come with them.
            topk_ids: `[N, k]` int32 or int64, global ids. Ids outside `expert_range` are ignored.
            topk_weights: `[N, k]` float32.
            scales: `[N, H / 128]` float32, of hidden states in fp8; else None.

        Returns:
            `[N, H]`, contiguous, dtype of the experts; zeros for a row without an expert here.
        """


@runtime_checkable
class BatchedExperts(Protocol):
    """Experts that also take rows sorted by expert."""

    def run_batched(self, hidden_states: Tensor, rows_per_expert: Tensor, scales: Tensor | None = None) -> Tensor:
        """Run every row through the expert whose batch it is in, without the router's weight: combine applies it.

        Args:
            hidden_states: `[E_local, C, H]`, contiguous. Float8_e4m3fn where `scales` come with them. Rows behind the
                counts are undefined, NaN included.
            rows_per_expert: `[E_local]` int32 on the device, each at most C.
            scales: `[E_local, C, H / 128]` float32, of hidden states in fp8; else None. Any strides.

        Returns:
            `[E_local, C, H]`, contiguous, dtype of the experts; rows behind the counts are undefined.
        """


@runtime_checkable
class BlockwiseExperts(Protocol):
    """Experts that can be computed block after block, for a transport that sends what a block has completed."""

    def run_blocks(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        blocks: Sequence[range],
        scales: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Each row's weighted sum, as soon as its last expert is done; the arguments are `Experts.__call__`'s.

        Args:
            blocks: of local experts, together all of them, in order.

        Yields:
            For each block, `[n, H]`: the sums of the rows whose last expert is in the block, in the rows' order. Rows
            without a local expert are in the first block. A block is computed when the caller asks for it.
        """


@runtime_checkable
class SignallingExperts(Protocol):
    """Batched experts whose down projection signals each finished block of rows."""

    def check_signalling(self) -> None:
        """Refuse weights that have no signalling down projection.

        Raises:
            ConfigError: says what to do.
        """

    def project_up_batched(
        self, hidden_states: Tensor, rows_per_expert: Tensor, scales: Tensor | None = None
    ) -> Tensor:
        """The first half of `BatchedExperts.run_batched`, with its arguments: `[E_local, C, I]`."""

    def project_down_signalling(self, rows: Tensor, rows_per_expert: Tensor, signals: Signals) -> Tensor:
        """The second half, signalling: see `moe.kernels.signals`.

        Args:
            rows: `[E_local, C, I]`, from `project_up_batched`.
            rows_per_expert: `[E_local]` int32 on the device.
            signals: for `[E_local, C, H]` results.
        """


class FusedExperts(nn.Module):
    """Gated (SwiGLU) experts with their weights stacked: `y = w2 (silu(w1 x) * w3 x)`.

    A back end that computes in fp8 itself reads `scales`; the others begin with `dequantized`.

    Attributes:
        capturable: see `Experts`.
        obeys_sms: the kernels use only the SMs that a schedule leaves to compute (`ubatch.SMBudget`).
        dtype: dtype of the weights and of the output.
        hidden_size, intermediate_size: `H` and `I`.

    Args:
        w13: `[E_local, 2 * I, H]`: of each expert the gate projection `w1`, then the up projection `w3`.
        w2: `[E_local, H, I]`: the down projection.
        first_expert: global id of the first local expert.

    Raises:
        ConfigError: shapes, dtypes or devices do not fit together.
    """

    capturable: ClassVar[bool] = False
    obeys_sms: ClassVar[bool] = False

    def __init__(self, w13: Tensor, w2: Tensor, first_expert: int = 0) -> None:
        super().__init__()
        if w13.dim() != 3 or w2.dim() != 3 or w13.shape[1] % 2 or w13.shape[0] < 1:
            raise ConfigError(
                f"w13 {list(w13.shape)} must be [experts, 2 * intermediate, hidden] and w2 {list(w2.shape)} "
                "[experts, hidden, intermediate]."
            )
        num_experts, twice_intermediate, hidden_size = w13.shape
        expected = (num_experts, hidden_size, twice_intermediate // 2)
        if tuple(w2.shape) != expected:
            raise ConfigError(f"w2 must be {list(expected)} to fit w13 {list(w13.shape)}, not {list(w2.shape)}.")
        if w13.dtype != w2.dtype or w13.device != w2.device or not w13.is_floating_point():
            raise ConfigError(
                f"w13 ({w13.dtype} on {w13.device}) and w2 ({w2.dtype} on {w2.device}) must have one floating dtype "
                "and one device."
            )
        if first_expert < 0:
            raise ConfigError(f"first_expert must be at least 0, not {first_expert}.")
        self.w13 = w13 if isinstance(w13, nn.Parameter) else nn.Parameter(w13, requires_grad=False)
        self.w2 = w2 if isinstance(w2, nn.Parameter) else nn.Parameter(w2, requires_grad=False)
        self.expert_range = range(first_expert, first_expert + num_experts)
        self.dtype = w13.dtype
        self.hidden_size = hidden_size
        self.intermediate_size = twice_intermediate // 2

    def check_input(
        self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, scales: Tensor | None = None
    ) -> None:
        """Refuse what `forward` cannot compute.

        Raises:
            ConfigError: wrong shapes, or a dtype other than the weights' (fp8 where there are `scales`).
        """
        if hidden_states.dim() != 2 or hidden_states.shape[1] != self.hidden_size:
            raise ConfigError(
                f"hidden_states must be [tokens, {self.hidden_size}] for these experts, not "
                f"{list(hidden_states.shape)}."
            )
        if scales is not None or hidden_states.dtype is not self.dtype:
            self._check_dtype(hidden_states, scales)
        if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.is_floating_point():
            raise ConfigError(f"topk_ids must be int32 or int64, not {topk_ids.dtype}.")
        if topk_ids.shape != topk_weights.shape or topk_ids.dim() != 2 or topk_ids.shape[0] != hidden_states.shape[0]:
            raise ConfigError(
                f"topk_ids {list(topk_ids.shape)} and topk_weights {list(topk_weights.shape)} must both be [tokens, "
                f"k], for {hidden_states.shape[0]} tokens."
            )

    def _refuse_gradients(self, *inputs: Tensor) -> None:
        """For experts without a backward.

        Raises:
            GradientError: an input or a weight requires grad, and grad mode is on.
        """
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *self.parameters())):
            raise GradientError(
                f"{type(self).__name__} have no backward. Run under torch.no_grad(), or use experts 'grouped'."
            )

    def check_batched_input(self, hidden_states: Tensor, rows_per_expert: Tensor, scales: Tensor | None = None) -> None:
        """Refuse what `run_batched` cannot compute. Reads nothing on the host.

        Raises:
            ConfigError: wrong shapes, or a dtype other than the weights' (fp8 where there are `scales`).
        """
        held = len(self.expert_range)
        if hidden_states.dim() != 3 or hidden_states.shape[0] != held or hidden_states.shape[2] != self.hidden_size:
            raise ConfigError(
                f"hidden_states must be [{held}, rows, {self.hidden_size}] for these experts, not "
                f"{list(hidden_states.shape)}."
            )
        if not hidden_states.is_contiguous():
            raise ConfigError(f"batched hidden_states {list(hidden_states.shape)} must be contiguous.")
        self._check_dtype(hidden_states, scales)
        if rows_per_expert.dtype != torch.int32 or tuple(rows_per_expert.shape) != (held,):
            raise ConfigError(
                f"rows_per_expert must be [{held}] int32, not {list(rows_per_expert.shape)} {rows_per_expert.dtype}."
            )

    def _check_dtype(self, hidden_states: Tensor, scales: Tensor | None) -> None:
        if scales is not None:
            check_scales(hidden_states, scales)
        elif hidden_states.dtype == FP8:
            raise ConfigError("hidden_states are in fp8, but came without scales.")
        elif hidden_states.dtype != self.dtype:
            raise ConfigError(f"hidden_states are {hidden_states.dtype}, the experts {self.dtype}. Convert one.")

    def dequantized(self, hidden_states: Tensor, scales: Tensor | None) -> Tensor:
        """`hidden_states` in the experts' dtype, for experts that do not take fp8 themselves."""
        return hidden_states if scales is None else dequantize_blocks(hidden_states, scales, self.dtype)

    @classmethod
    def check_movable(cls) -> None:
        """Check that these experts can move between ranks.

        Raises:
            ConfigError: the weights are kept in a layout that is not known.
        """

    def slot_tensors(self) -> Sequence[Tensor]:
        """Everything that these experts compute with, each `[E_local, ...]` and contiguous: one row per expert, whose
        bytes may be changed between steps, in the order of the device's stream.

        Raises:
            ConfigError: see `check_movable`.
        """
        self.check_movable()
        return [*self.parameters(), *self.buffers()]

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        held = self.expert_range
        return (
            f"experts={held.start}..{held.stop - 1}, hidden={self.hidden_size}, intermediate={self.intermediate_size}"
        )
