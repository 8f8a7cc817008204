"""Attention tensor parallelism with expert parallelism: which ranks share a replica, and which part each rank holds.

    rank = dp_rank * T + tp_rank

             tp_rank 0         tp_rank 1
    dp 0     rank 0            rank 1         the same requests; each has 1/T of the heads, their KV, and of the dense
    dp 1     rank 2            rank 3         MLPs' columns; a `Shard` says which
             experts of all ranks: the group that votes

The T ranks of a replica launch the same steps and get the same tokens. All of them compute logits and sampling, from
hidden states that are equal bit by bit, because they are computed once and gathered. The logits may still differ in
their last bits, as each process picks its own kernels, and two tokens may be equally likely; so tokens and drafts are
taken from the replica's first rank (`of_first_rank`).

A batch or lane of n tokens is padded to a multiple of T rows (`padded_len`), and every rank gets an equal share. The
last shares may hold padding: `valid_rows` is the number of rows that are tokens.

Source: SGLang's attention tensor parallelism in its data-parallel attention (`attn_tp`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from attention import AttentionShape, GatedDeltaShape, MLAShape
from model_runner.weights.weights import Part
from moe import EmulatedLink
from ubatch import CommGroup, ConfigError, Point, all_gather
from ubatch.ranks import Carry


def padded_len(num_tokens: int, size: int) -> int:
    """Rows of a batch or lane of `num_tokens` tokens, padded to a multiple of `size`; 0 stays 0."""
    return -(-num_tokens // size) * size


def valid_rows(num_tokens: int, rows: slice) -> int:
    """Number of `rows` that are tokens, if the first `num_tokens` rows of the batch are tokens and the rest padding."""
    return min(max(num_tokens - rows.start, 0), rows.stop - rows.start)


def share_rows(num_tokens: int, rank: int, size: int) -> slice:
    """One rank's rows of a batch of `num_tokens` tokens, padded for `size` ranks."""
    rows = padded_len(num_tokens, size) // size
    return slice(rank * rows, (rank + 1) * rows)


def share_tokens(tokens: Sequence[int], size: int) -> tuple[int, ...]:
    """Every rank's own tokens, without padding.

    Args:
        tokens: for every rank, the tokens of its replica; ranks of one replica are neighbours with equal numbers.
        size: ranks of a replica.
    """
    if size == 1:
        return tuple(tokens)
    return tuple(valid_rows(count, share_rows(count, rank % size, size)) for rank, count in enumerate(tokens))


@dataclass(frozen=True)
class Shard:
    """The part of a replica's attention and dense MLPs that a rank holds.

    Attributes:
        rank: the rank's number in its replica.
        size: ranks of the replica.
    """

    rank: int = 0
    size: int = 1

    def part(self, total: int, most: int | None = None) -> Part:
        """This rank's part of `total` rows or columns.

        Args:
            total: rows or columns of all ranks.
            most: largest number of parts; if there are more ranks, neighbouring ranks hold the same part.
        """
        count = self.size if most is None else min(self.size, most)
        rows = total // count
        return Part(self.rank * count // self.size * rows, rows, total)

    def attention(self, shape: AttentionShape | MLAShape) -> AttentionShape | MLAShape:
        """The heads of this rank. Latent attention's cache is the same on all ranks: the latent has no heads."""
        if isinstance(shape, MLAShape):
            return replace(shape, num_heads=shape.num_heads // self.size)
        return self.grouped(shape)

    def grouped(self, shape: AttentionShape) -> AttentionShape:
        """The heads of this rank for multi-head attention. Extra ranks repeat key/value heads."""
        kv_heads = max(1, shape.num_kv_heads // self.size)
        layers = None if shape.layers is None else tuple(map(self.grouped, shape.layers))
        return replace(shape, num_heads=shape.num_heads // self.size, num_kv_heads=kv_heads, layers=layers)

    def linear(self, shape: GatedDeltaShape) -> GatedDeltaShape:
        """The heads of this rank for linear attention; the size divides them."""
        key_heads, value_heads = shape.num_k_heads // self.size, shape.num_v_heads // self.size
        return replace(shape, num_k_heads=key_heads, num_v_heads=value_heads)


WHOLE = Shard()
"""The shard of a rank that is a replica by itself: everything."""


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place among replicas and ranks; made by `make_tensor_parallel`.

    Attributes:
        group: the ranks of this replica. Votes take place only in `world`.
        world: the ranks of all replicas, which share the experts.
        carry: delays gathers and scatters (an emulated link); None delays none.
    """

    group: CommGroup
    world: CommGroup
    carry: Carry | None = None

    @cached_property
    def size(self) -> int:
        """Ranks of a replica, `T`."""
        return self.group.size

    @cached_property
    def rank(self) -> int:
        """This rank's number in its replica."""
        return self.group.rank

    @cached_property
    def dp_size(self) -> int:
        """Number of replicas."""
        return self.world.size // self.size

    @cached_property
    def dp_rank(self) -> int:
        """Number of this rank's replica."""
        return self.world.rank // self.size

    @cached_property
    def shard(self) -> Shard:
        """The part of attention and dense MLPs that this rank holds."""
        return Shard(self.rank, self.size)

    def mean(self, x: Tensor, point: Point) -> Tensor:
        """The mean over the replica's ranks of `x`, which has the same shape on all; equal on all to the last bit.

        Args:
            point: passed while `x` travels.
        """
        every = all_gather(x, self.group, point=point, name=point, carry=self.carry)
        return every.view(self.size, *x.shape).mean(0)

    def of_first_rank(self, chosen: Tensor) -> Tensor:
        """Broadcast a small tensor from this replica's first rank; it must have the same shape on all ranks.

        Raises:
            PeerFailed, TransferTimeout, GroupBroken: another rank did not call it.
        """
        connection = self.group.usable_connection()
        told = chosen.clone()
        # Not counted in the launch order that all ranks compare: one replica may sample while another does not.
        work = dist.broadcast(told, group=connection.pg, group_src=0, async_op=True)
        if connection.is_stream_ordered(told.device):
            work.wait()
        else:
            connection.wait_for_works((work,), "of_first_rank")
        return told


def make_tensor_parallel(group: CommGroup | None, size: int, link: EmulatedLink | None = None) -> TensorParallel | None:
    """This rank's place if every `size` neighbouring ranks of `group` form a replica; None for `size` 1.

    Every rank of `group` must call this.

    Args:
        link: emulated link for gathers and scatters; the experts' transfers may use it, too.

    Raises:
        ConfigError: `size` does not divide the number of ranks.
        TransferTimeout: a rank of this replica did not call this function in time.
    """
    ranks = 1 if group is None else group.size
    if size < 1 or ranks % size:
        raise ConfigError(
            f"tensor_parallel_size {size} does not divide the {ranks} ranks of the group. Start data-parallel size x "
            "tensor-parallel size ranks, and give the runner a group of all of them."
        )
    if group is None or size == 1:
        return None
    first = group.rank // size * size
    part = group.part(group.ranks[first : first + size])
    return TensorParallel(part, group, None if link is None else link.carry)
