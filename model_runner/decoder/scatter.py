"""Where the rows of hidden states are, in a decoder layer whose attention is shared by T ranks.

    SCATTERED       each rank has its share, 1/T of the rows: the residual, norms, router and experts
    TP_ATTN_FULL    each rank has all rows of its replica: input of attention and dense MLPs, of which each rank holds
                    some columns. Their outputs are partial sums of all rows.
    (SGLang's FULL, all rows of all replicas, is inside the `allgather_reducescatter` transport, for the experts.)

    residual    SCATTERED    ---+------------------------------+------------------------------+---->
                                | add, norm                    ^ add, norm                    ^ (next layer)
    comm_prepare_attn           +-- all-gather  ATTN_GATHER    |                              |
    attention   TP_ATTN_FULL        qkv, core, out             |                              |
    comm_prepare_mlp                +-- reduce-scatter  ATTN_SCATTER, add, norm               |
    MoE         SCATTERED                                      +-- dispatch, experts, combine +
    dense MLP   TP_ATTN_FULL                                   +-- all-gather  MLP_GATHER     |
    decoder layer                                                  reduce-scatter  MLP_SCATTER +

Each point is passed while its transfer is under way: another lane computes meanwhile. All-gathers carry normalised
states, reduce-scatters carry partial sums, and each row's addition to the residual is done by one rank only. With one
rank per replica (`layout` is None) nothing is moved, and no point is passed.

Rows are padded to equal shares. Padding is added when rows are scattered and sliced off when they are gathered, so
attention never sees it (it writes no KV), and merged lanes have none. In a share, padding follows the tokens
(`Layout.share_tokens`), and the router sends it to no expert.

Source: SGLang's `ScatterMode` and `LayerCommunicator`.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from torch import Tensor
from torch.nn import functional as F

from model_runner.decoder.ops import add_rms_norm, rms_norm
from model_runner.parallel.tensor_parallel import TensorParallel, share_rows, valid_rows
from ubatch import ConfigError, Point, all_gather, get_forward_context, reduce_scatter


class ScatterMode(StrEnum):
    """Which rows a rank has; see the module's docstring."""

    SCATTERED = "scattered"
    TP_ATTN_FULL = "tp_attn_full"


@dataclass(frozen=True)
class Layout:
    """How one lane's rows (or a whole batch's) are spread. Made per forward by `current_layout`.

    Attributes:
        num_tokens: rows of this rank's replica, before padding to equal shares.
        rows: rows of its padded lane: `ForwardContext.local_dp_buffer_len`.
        num_valid: in a captured step, how many of the `num_tokens` rows are tokens; see `ForwardContext`.
    """

    parallel: TensorParallel
    num_tokens: int
    rows: int
    num_valid: Tensor | None = None

    @property
    def share(self) -> slice:
        """This rank's share of its replica's rows."""
        return share_rows(self.num_tokens, self.parallel.rank, self.parallel.size)

    @cached_property
    def share_tokens(self) -> int | Tensor:
        """Number of tokens in this rank's share; padding follows them. In a captured step it is on the device."""
        share = self.share
        if self.num_valid is None:
            return valid_rows(self.num_tokens, share)
        return (self.num_valid - share.start).clamp(0, share.stop - share.start)

    def own(self, x: Tensor) -> Tensor:
        """Slice this rank's share out of the replica's rows: `[num_tokens, ...]` to `[rows / T, ...]`."""
        return self._padded(x)[self.share]

    def gather(self, x: Tensor, mode: ScatterMode, point: Point) -> Tensor:
        """All-gather shares into `mode`.

        Args:
            x: `[rows / T, ...]`, this rank's share.
            mode: the rows to return.
            point: passed during the transfer.

        Returns:
            `[num_tokens, ...]` for `TP_ATTN_FULL`.
        """
        if mode is ScatterMode.SCATTERED:
            return x
        return all_gather(x, self.parallel.group, point=point, name=point, carry=self.parallel.carry)[: self.num_tokens]

    def scatter(self, partial: Tensor, mode: ScatterMode, point: Point) -> Tensor:
        """Reduce-scatter partial sums in `mode` (shaped as from `gather`) to this rank's share of the total."""
        if mode is ScatterMode.SCATTERED:
            return partial
        padded = self._padded(partial)
        return reduce_scatter(padded, self.parallel.group, point=point, name=point, carry=self.parallel.carry)

    def _padded(self, x: Tensor) -> Tensor:
        missing = self.rows - x.shape[0]
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def current_layout(parallel: TensorParallel | None) -> Layout | None:
    """The layout of the current forward's rows; None on a rank that is a replica by itself.

    Raises:
        ConfigError: the ranks share a replica, but the forward context does not say how many rows each has.
    """
    if parallel is None:
        return None
    context = get_forward_context()
    if context is None or context.local_dp_buffer_len is None or context.tokens_across_ranks is None:
        raise ConfigError(
            "a tensor-parallel model was called, but the forward context does not say how many rows the ranks have. "
            "Call it through ModelRunner, which votes and fills local_dp_buffer_len and tokens_across_ranks."
        )
    return Layout(parallel, context.num_tokens, context.local_dp_buffer_len, context.num_valid)


def comm_prepare_attn(
    update: Tensor | None, hidden: Tensor, weight: Tensor, eps: float, layout: Layout | None
) -> tuple[Tensor, Tensor]:
    """Add the update, normalise, and gather the input of attention: all rows of the replica.

    Args:
        update: the previous layer's output, `SCATTERED`, not yet added to the residual; None in the first layer.
        hidden: the residual, `SCATTERED`.
        layout: layout of the rows; None if every rank has all rows of its replica.

    Returns:
        Attention's input `[num_tokens, hidden_size]`, and the residual.
    """
    x, hidden = add_norm(update, hidden, weight, eps)
    if layout is not None:
        x = layout.gather(x, ScatterMode.TP_ATTN_FULL, Point.ATTN_GATHER)
    return x, hidden


def comm_prepare_mlp(
    update: Tensor, hidden: Tensor, weight: Tensor, eps: float, mode: ScatterMode, layout: Layout | None
) -> tuple[Tensor, Tensor]:
    """Scatter attention's output, add it, normalise; returns the MLP's input in `mode`, and the residual.

    Args:
        update: attention's output: partial sums of all rows of the replica.
        layout: see `comm_prepare_attn`.
    """
    if layout is None:
        return add_norm(update, hidden, weight, eps)
    update = layout.scatter(update, ScatterMode.TP_ATTN_FULL, Point.ATTN_SCATTER)
    x, hidden = add_norm(update, hidden, weight, eps)
    return layout.gather(x, mode, Point.MLP_GATHER), hidden


def comm_final(update: Tensor | None, hidden: Tensor, weight: Tensor, eps: float, layout: Layout | None) -> Tensor:
    """The final hidden states, normalised: all rows of the replica on every rank. Arguments: `comm_prepare_attn`."""
    x, _ = add_norm(update, hidden, weight, eps)
    return x if layout is None else layout.gather(x, ScatterMode.TP_ATTN_FULL, Point.FINAL_GATHER)


def add_norm(update: Tensor | None, hidden: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`hidden + update` normalised, and the sum itself."""
    if update is None:
        return rms_norm(hidden, weight, eps), hidden
    return add_rms_norm(update, hidden, weight, eps)
