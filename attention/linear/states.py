"""The recurrent states of running requests: one slot per request, in every linear layer.

    windows   [layers, slots, kernel - 1, conv_dim]     the last inputs of the short convolution, in the model's dtype
    states    [layers, slots, v_heads, k_dim, v_dim]    float32: rounding would add up over thousands of tokens

A request's slot is its row of the request-to-token table, so slots are taken and freed with rows. A slot is never
cleared: a request whose tokens of a step are its first ones starts from zeros, whatever its slot held. That is also how
a request starts over after it was retracted.

    kept      [layers, slots, 1 + drafts, ...]          inputs of the last tokens that were verified, see `plan`

Behind the requests' slots are those of snapshots: copies of a request's window and state after a step, for requests
that begin with the same tokens. `keep` and `restore` copy on the caller's stream, so they are ordered with the steps.

A step changes states in place and cannot be repeated, unlike a step that only writes keys and values. So the pool notes
how many tokens each state has seen, and `follow` refuses a step that does not go on from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.kv_cache import KVCacheError, check_positive
from ubatch import ConfigError


@dataclass(frozen=True)
class GatedDeltaShape:
    """The shape of a gated-delta-rule layer on this rank.

    Attributes:
        num_k_heads: heads of queries and keys.
        num_v_heads: heads of values, gates and states; a multiple of `num_k_heads`, whose heads serve equally many
            consecutive ones.
        k_dim: elements of a query or key head.
        v_dim: elements of a value head.
        conv_kernel: tokens that the short convolution sees, the current one included.

    Source: Yang et al., Gated Delta Networks, 2024.
    """

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int

    def __post_init__(self) -> None:
        sizes = ("num_k_heads", "num_v_heads", "k_dim", "v_dim", "conv_kernel")
        check_positive("linear attention", self, *sizes)
        if self.num_v_heads % self.num_k_heads:
            raise ConfigError(
                f"linear attention: {self.num_v_heads} value heads cannot share {self.num_k_heads} key heads evenly."
            )

    @property
    def key_size(self) -> int:
        """Elements of all key heads of a token."""
        return self.num_k_heads * self.k_dim

    @property
    def value_size(self) -> int:
        """Elements of all value heads of a token."""
        return self.num_v_heads * self.v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size


class StatePool:
    """Windows and states of `num_slots` requests in `num_layers` linear layers.

    Args:
        dtype: dtype of the model's computation, and of the windows.
        num_drafts: most drafts of a request in a step.
        num_snapshots: room for so many copies of a request's states.

    Attributes:
        num_slots: requests that the pool has room for.
        num_snapshots: snapshots that it has room for.
    """

    num_slots: int
    num_snapshots: int

    def __init__(
        self,
        shape: GatedDeltaShape,
        num_layers: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        num_drafts: int = 0,
        num_snapshots: int = 0,
    ) -> None:
        if num_layers < 1 or num_slots < 1 or num_snapshots < 0:
            raise ConfigError(
                f"linear attention: {num_slots} slots and {num_snapshots} snapshots in {num_layers} layers; there must "
                "be at least 1 slot and 1 layer, and no negative number."
            )
        self.shape = shape
        self.num_slots, self.num_snapshots = num_slots, num_snapshots
        places = num_slots + num_snapshots
        window = (num_layers, places, shape.conv_kernel - 1, shape.conv_dim)
        state = (num_layers, places, shape.num_v_heads, shape.k_dim, shape.v_dim)
        # Zeros are not written to memory on Linux before they are used.
        self._held = (
            torch.zeros(window, dtype=dtype, device=device),
            torch.zeros(state, dtype=torch.float32, device=device),
        )
        self.windows: tuple[Tensor, ...] = self._held[0].unbind()
        self.states: tuple[Tensor, ...] = self._held[1].unbind()
        self.num_kept = 1 + num_drafts if num_drafts else 0
        mixed, gates = (
            (num_layers, num_slots, self.num_kept, size) for size in (shape.conv_dim, 2 * shape.num_v_heads)
        )
        self.kept = (
            torch.zeros(mixed, dtype=dtype, device=device).unbind(),
            torch.zeros(gates, dtype=torch.float32, device=device).unbind(),
        )
        self._seen, self._unsure = [0] * places, [0] * places
        self._accepted: dict[int, tuple[int, int]] = {}

    def follow(
        self, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int], *, verify: bool = False
    ) -> None:
        """Note that a step runs `counts` tokens of each request, from token `starts` on.

        Args:
            verify: all but the first token of each are drafts. How many of them are right, the request's next start
                tells.

        Raises:
            KVCacheError: a request neither begins nor goes on where its state is. Nothing is noted then.
        """
        for slot, start in zip(slots, starts, strict=True):
            if start and not 0 <= start - self._seen[slot] <= self._unsure[slot]:
                raise KVCacheError(
                    f"a step begins at token {start} of a request whose recurrent states (slot {slot}) have seen "
                    f"{self._seen[slot]}. Tokens whose keys and values are cached must be computed all the same, or "
                    "a snapshot of the states after them restored; run every step once."
                )
        self._accepted.clear()
        for slot, start, count in zip(slots, starts, counts, strict=True):
            if start > self._seen[slot]:
                self._accepted[slot] = start, start - self._seen[slot]
            self._seen[slot], self._unsure[slot] = (start, count) if verify else (start + count, 0)

    def accepted(self, slot: int, start: int) -> int:
        """How many kept tokens of a request were accepted, if the step that was noted last begins it at `start`."""
        noted, count = self._accepted.get(slot, (start, 0))
        return count if noted == start else 0

    def keep(self, slots: Sequence[int], snapshots: Sequence[int]) -> None:
        """Copy the states of requests into snapshots, after the step that was noted last.

        Args:
            snapshots: their numbers, 0 to `num_snapshots` - 1, all different.

        Raises:
            KVCacheError: a request's last step verified drafts: its states have not seen those that were accepted.
        """
        for slot in slots:
            if self._unsure[slot]:
                raise KVCacheError(
                    f"a snapshot of recurrent states (slot {slot}) right after a step with drafts, when nobody knows "
                    "which of them are right. Keep it after a step without drafts."
                )
        self._copy(slots, [self.num_slots + number for number in snapshots])

    def restore(self, snapshots: Sequence[int], slots: Sequence[int]) -> None:
        """Copy snapshots into the slots of requests, which then go on where the snapshots were kept."""
        self._copy([self.num_slots + number for number in snapshots], slots)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            for held in self._held:
                held[:, target].copy_(held[:, source])
            self._seen[target], self._unsure[target] = self._seen[source], 0

    @property
    def num_layers(self) -> int:
        """Linear layers."""
        return len(self.states)

    @property
    def device(self) -> torch.device:
        """Where the states are."""
        return self.states[0].device

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, snapshots included."""
        return sum(held[0].nbytes * self.num_layers for held in (self.windows, self.states, *self.kept))
