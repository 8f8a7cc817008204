"""Attention tensor parallelism beside expert parallelism: which ranks share a replica, and what each of them holds.

    rank = dp_rank * T + tp_rank

             tp_rank 0         tp_rank 1
    dp 0     rank 0            rank 1         the same requests; each has 1/T of the heads, their KV, and of the dense
    dp 1     rank 2            rank 3         MLPs' columns; a `Shard` says which
             experts of all ranks: the group that votes

The T ranks of a replica launch the same steps and get the same tokens. Whatever follows a step is computed by all of
them, from hidden states that are equal bit by bit, for they were computed once and gathered. What comes out may still
differ in its last bits, as each process picks its own kernels, and two tokens may be equally likely; so tokens and
drafts are those of the replica's first rank (`of_first_rank`).

A batch, or a lane of it, of n tokens is padded to a multiple of T (`padded_len`), and every rank's share of it are
equally many rows. The last shares may hold padding: `valid_rows` of them are tokens.

Source: SGLang's attention tensor parallelism in its data-parallel attention (`attn_tp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from attention import AttentionShape, MLAShape
from model_runner.weights.weights import Part
from moe import EmulatedLink
from ubatch import CommGroup, ConfigError
from ubatch.ranks.collectives import Carry

__all__ = [
    "WHOLE",
    "Shard",
    "TensorParallel",
    "make_tensor_parallel",
    "padded_len",
    "share_rows",
    "share_tokens",
    "valid_rows",
]


def padded_len(num_tokens: int, size: int) -> int:
    """Rows of a batch or lane of so many tokens, padded to a multiple of `size`; 0 stays 0."""
    return -(-num_tokens // size) * size


def valid_rows(num_tokens: int, rows: slice) -> int:
    """How many of `rows` are tokens, where the first `num_tokens` rows are: `min(split, n)` of the first part of two,
    `max(0, n - split)` of the second.
    """
    return min(max(num_tokens - rows.start, 0), rows.stop - rows.start)


def share_rows(num_tokens: int, rank: int, size: int) -> slice:
    """The rows of a padded batch of `num_tokens` tokens that one of `size` ranks has."""
    rows = padded_len(num_tokens, size) // size
    return slice(rank * rows, (rank + 1) * rows)


def share_tokens(tokens: Sequence[int], size: int) -> tuple[int, ...]:
    """Every rank's own tokens, without padding.

    Args:
        tokens: of every rank's replica; ranks of one replica follow each other and have the same.
        size: ranks of a replica.
    """
    if size == 1:
        return tuple(tokens)
    return tuple(valid_rows(count, share_rows(count, rank % size, size)) for rank, count in enumerate(tokens))


@dataclass(frozen=True)
class Shard:
    """Which part of a replica's attention and dense MLPs a rank holds.

    Attributes:
        rank: among the ranks of the replica.
        size: how many they are.
    """

    rank: int = 0
    size: int = 1

    def part(self, total: int, most: int | None = None) -> Part:
        """This rank's of `total` rows or columns.

        Args:
            total: of all ranks.
            most: how many parts there may be; where ranks outnumber them, neighbours have the same one.
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
        """The same for multi-head attention. Where ranks outnumber key/value heads, several hold the same one."""
        kv_heads = max(1, shape.num_kv_heads // self.size)
        return replace(shape, num_heads=shape.num_heads // self.size, num_kv_heads=kv_heads)


WHOLE = Shard()
"""Everything, on a rank that is a replica by itself."""


@dataclass(frozen=True)
class TensorParallel:
    """This rank's place. `make_tensor_parallel` makes it.

    Attributes:
        group: the ranks of this replica. They vote in `world`, and never by themselves.
        world: the ranks of all replicas, which share the experts.
        carry: what gathers and scatters are handed to when they are launched; None delays none of them.
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
        """Which of them this one is."""
        return self.group.rank

    @cached_property
    def dp_size(self) -> int:
        """Replicas."""
        return self.world.size // self.size

    @cached_property
    def dp_rank(self) -> int:
        """Which of them this rank belongs to."""
        return self.world.rank // self.size

    @cached_property
    def shard(self) -> Shard:
        """What this rank holds."""
        return Shard(self.rank, self.size)

    def of_first_rank(self, chosen: Tensor) -> Tensor:
        """What the first rank of this replica chose, on all of them; of the same shape on all, and small.

        Raises:
            PeerFailed, TransferTimeout, GroupBroken: another rank did not call it.
        """
        connection = self.group.usable_connection()
        told = chosen.clone()
        # Not among the launches whose order all ranks compare: where one replica samples, another may not.
        work = dist.broadcast(told, group=connection.pg, group_src=0, async_op=True)
        if connection.is_stream_ordered(told.device):
            work.wait()
        else:
            connection.wait_for_works((work,), "of_first_rank")
        return told


def make_tensor_parallel(group: CommGroup | None, size: int, link: EmulatedLink | None = None) -> TensorParallel | None:
    """The place of this rank among `group`, whose ranks are taken `size` at a time; None for `size` 1.

    Every rank of `group` must call this.

    Args:
        group: all ranks.
        size: ranks of a replica.
        link: deliver gathers and scatters over this emulated link; it may carry the experts' transfers as well.

    Raises:
        ConfigError: `size` does not divide the ranks.
        TransferTimeout: a rank of this replica did not call it in time.
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
